"""What an answer shows of the directory: whether the blocks a choice counted on were there, and came.

Model     an engine reuses leading blocks: those of its own tiers, then those it fetches. So the first block that was
          not reused names the copy that was missing, and nothing is known of those behind it
Valid     answers that report reused tokens; blocks of tokens. Without a report only a fetch that overran is seen
Blind to  why a block was not reused; what was in flight, not yet confirmed, when the choice was made; shortfalls of
          engines that start with what has come by then (`Discipline.takes_parts`), which say nothing of the copies
Errors    an engine that rounds its reuse down to larger blocks contradicts the last one: it lost that credit anyway
"""

from __future__ import annotations

from dataclasses import dataclass

from estimators.estimates import Estimates
from estimators.paths import Path
from estimators.request import RequestFacts
from estimators.routes import Blocks, Held
from estimators.tiers import Tier
from policies.base import Choice
from router.bookings import Booking
from router.holdings import Holdings


@dataclass(frozen=True, slots=True)
class Belief:
    """Leading blocks of a prompt that one choice counted on.

    own : from the replica's own tiers; sure : of those, not only expected of requests in flight
    total : with what is fetched from elsewhere; >= own
    row, tier : whose copies those are; row of no meaning for REMOTE
    """

    own: int
    sure: int
    total: int
    row: int
    tier: Tier


def belief_of(request: RequestFacts, held: Held, estimates: Estimates, choice: Choice) -> Belief | None:
    """What `choice` counts on; None where nothing of the prompt is known, or its blocks are of text."""
    if not request.chain or request.chain_of_text:
        return None
    row, path, block_tokens = choice.row, choice.path, request.block_tokens
    confirmed = held.local_blocks if held.confirmed_blocks is None else held.confirmed_blocks
    own, sure = held.local_blocks.item(row), confirmed.item(row)
    below = _below(held, path)
    if below is not None and below.item(row) > own:
        own = sure = below.item(row)
    own = min(own, len(request.chain))
    total = max(own, int(estimates.one(path, row).reused_tokens) // block_tokens)
    if path is Path.PEER and estimates.peers is not None:
        return Belief(own, min(sure, own), total, int(estimates.peers[row]), Tier.HBM)
    return Belief(own, min(sure, own), total, row, Tier.REMOTE)


def _below(held: Held, path: Path) -> Blocks | None:
    """What each replica has with the tiers below HBM that this path reads."""
    if path in (Path.LOCAL, Path.RECOMPUTE):
        return None
    return held.host_blocks if path is Path.HOST else held.disk_blocks


def tell(
    holdings: Holdings, belief: Belief, booking: Booking, cached_tokens: int | None, now_s: float, *, in_parts: bool
) -> None:
    """Tell the directory what an answer shows that ended well at `now_s`.

    cached_tokens : as the engine reported; None if it did not
    in_parts : the engine starts with what its fetch has brought by then
    """
    chain, row = booking.request.chain, booking.row
    if cached_tokens is not None:
        reused = min(max(cached_tokens, 0) // booking.request.block_tokens, len(chain))
        used = max(reused, belief.sure)
        if used:
            holdings.reused(row, chain[:used], reused, now_s, since_s=booking.placed_at_s)
        if belief.own <= reused < belief.total and not in_parts:
            holdings.fetch_failed(belief.row, belief.tier, chain[: belief.total], reused, now_s)
        if reused < belief.total:
            return
    if belief.total > belief.own:
        if overran(booking):
            holdings.fetch_failed(belief.row, belief.tier, chain[: belief.total], belief.own, now_s)
        elif cached_tokens is not None and belief.tier is Tier.REMOTE:
            holdings.fetched(chain[: belief.total], now_s)


def overran(booking: Booking) -> bool:
    """Whether the fetch must have taken so long that computing everything would have been sooner.

    The first token came after the 99 % quantile and after that of a recompute, and it was not the queue: when the
    replica came to it, there was time enough.
    """
    forecast, placed_at_s = booking.forecast, booking.placed_at_s
    late_s = max(forecast.quantiles_s[-1], forecast.recompute_s)
    if not booking.first_token_at_s - placed_at_s > late_s:  # NaN: nobody saw it
        return False
    return forecast.fetch_s > 0.0 and booking.starts_at_s + booking.compute_s <= placed_at_s + late_s
