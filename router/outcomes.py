"""Compares forecasts with what came: believed blocks, the first token, and whether quantiles held.

Model     an engine's own count of reused tokens says which tiers kept their word; without it the counters of its
          prefix cache do, and without those the first token itself, by how likely it is after a hit and after a miss
Valid     streamed answers that ended well
Blind to  a first token that was late for another reason than a missing block, while nothing better is reported
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from estimators.estimates import Doubt
from estimators.hit_probability import hit_posterior
from estimators.paths import Path
from estimators.tiers import Tier
from router.bookings import Booking


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a prompt that were expected from one tier: from the first to the last of them."""

    tier: Tier
    start_tokens: float
    stop_tokens: float


def parts_of(booking: Booking) -> Iterator[Part]:
    """What was expected from each tier, in the order of the prompt. A peer's HBM is not this replica's."""
    forecast, reused = booking.forecast, booking.reused_tokens
    ends = [(Tier.HBM, forecast.local_tokens), (Tier.HOST, forecast.host_tokens), (Tier.DISK, forecast.disk_tokens)]
    if booking.path is Path.REMOTE:
        ends.append((Tier.REMOTE, reused))
    start = 0.0
    for tier, end in ends:
        stop = min(end, reused)
        if stop > start:
            yield Part(tier, start, stop)
            start = stop


class Outcomes:
    """Feeds what is learned of how estimates fail: `placed`, `first_token`, `answered`, `gone`, at most once each."""

    def __init__(self, doubt: Doubt) -> None:
        self._doubt = doubt
        self._open: dict[Booking, list[int]] = {}  # without a first token, and its quantiles that have passed
        self._passes: list[tuple[float, int, Booking, int]] = []  # a heap: when each quantile passes
        self._order = count()

    def placed(self, booking: Booking, now_s: float) -> None:
        """A streamed request was booked."""
        self._note_overdue(now_s)
        self._open[booking] = []
        for level, quantile_s in enumerate(booking.forecast.quantiles_s):
            heappush(self._passes, (booking.placed_at_s + quantile_s, next(self._order), booking, level))

    def gone(self, booking: Booking) -> None:
        """It ended; without a first token nothing more is expected of it."""
        self._open.pop(booking, None)

    def _note_overdue(self, now_s: float) -> None:
        """Quantiles that have passed without a first token are missed, however long that still takes."""
        while self._passes and self._passes[0][0] < now_s:
            _at_s, _order, booking, level = heappop(self._passes)
            passed = self._open.get(booking)
            if passed is not None:
                passed.append(level)
                self._doubt.conformal.overdue(booking.request.prompt_tokens, level)

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The first token of a streamed answer came."""
        self._note_overdue(now_s)
        forecast, request = booking.forecast, booking.request
        self._doubt.conformal.observe(
            request.prompt_tokens,
            observed_s=max(now_s - booking.placed_at_s, 1e-6),
            predicted_s=forecast.raw_quantiles_s,
            issued_s=forecast.quantiles_s,
            counted=self._open.pop(booking, ()),
        )
        # Also what was expected to reuse nothing: else its tokens in the counters look like another client's.
        self._doubt.hits.expected(
            booking.row,
            Tier.HBM,
            reuse_tokens=min(forecast.local_tokens, booking.reused_tokens),
            prompt_tokens=request.prompt_tokens,
            age_s=forecast.age_of(Tier.HBM),
        )

    def answered(self, booking: Booking, cached_tokens: int | None, now_s: float) -> None:
        """The answer ended well; cached_tokens as the engine reported them, None if it did not."""
        if cached_tokens is not None:
            self._reported(booking, cached_tokens, now_s)
        observed_s = booking.first_token_at_s - booking.placed_at_s
        if not observed_s > 0:  # NaN: nobody saw it
            return
        forecast = booking.forecast
        hit_s, miss_s = forecast.first_token_s, forecast.recompute_s
        scale = float(self._doubt.spread.scale(now_s)[booking.row])
        if cached_tokens is None and booking.reused_tokens > 0:
            for part in parts_of(booking):
                self._doubt.hits.timed(
                    booking.row,
                    part.tier,
                    observed_s=observed_s,
                    hit_s=hit_s,
                    miss_s=miss_s,
                    scale=scale,
                    age_s=forecast.age_of(part.tier),
                    now_s=now_s,
                )
        was_hit = self._was_hit(booking, cached_tokens, observed_s, scale)
        self._doubt.spread.observe(
            booking.row, observed_s=observed_s, predicted_s=hit_s if was_hit else miss_s, now_s=now_s
        )

    def _reported(self, booking: Booking, cached_tokens: int, now_s: float) -> None:
        block = booking.request.block_tokens
        for part in parts_of(booking):
            if cached_tokens < part.start_tokens:
                return  # broken before: nothing is known of what follows
            expected = round((part.stop_tokens - part.start_tokens) / block)
            came = round((min(cached_tokens, part.stop_tokens) - part.start_tokens) / block)
            if expected > 0:
                self._doubt.hits.reported(
                    booking.row,
                    part.tier,
                    expected_blocks=expected,
                    reported_blocks=came,
                    age_s=booking.forecast.age_of(part.tier),
                    now_s=now_s,
                )

    def _was_hit(self, booking: Booking, cached_tokens: int | None, observed_s: float, scale: float) -> bool:
        """Whether the first token is that of the expected reuse: reported, or the likelier of the two."""
        forecast = booking.forecast
        if booking.reused_tokens <= 0 or forecast.recompute_s <= forecast.first_token_s:
            return True
        if cached_tokens is not None:
            return cached_tokens >= booking.reused_tokens / 2
        prior = forecast.hit_probability
        posterior = hit_posterior(
            prior=prior, observed_s=observed_s, hit_s=forecast.first_token_s, miss_s=forecast.recompute_s, scale=scale
        )
        return posterior >= 0.5
