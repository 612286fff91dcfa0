"""Two equal tiny completions: do their blocks come as events, and does usage tell what the second one reused?

Model     a prompt of random token ids is new to every cache, so its blocks must be announced after the first run and
          reused by the second; the router's own chain of the prompt says which blocks those are. Of several
          data-parallel ranks one is asked for as the router does, and its events must be the ones that tell
Valid     engines that take token ids as `prompt`; ids from 1000 to 29999 are in every vocabulary of a chat model
Blind to  ranks that were not asked for
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from router.decider import RANK_HEADER
from router.doctor.ask import Asker
from router.doctor.facts import ProbeFacts
from router.doctor.listen import Ears
from router.doctor.pages import cached_tokens_in, counters_moved
from router.identity import Identity, chain
from router.signals.claims import Applied
from router.signals.load import together
from router.signals.prometheus_text import loads_of

_FEWEST_TOKENS = 32
_LOWEST_ID, _HIGHEST_ID = 1000, 29_999


def probe_prompt(rng: random.Random, block_tokens: int) -> list[int]:
    """Token ids of two blocks or 32 tokens, whichever is more, and one more that is always computed."""
    blocks = max(2, -(-_FEWEST_TOKENS // block_tokens))
    return [rng.randint(_LOWEST_ID, _HIGHEST_ID) for _ in range(blocks * block_tokens + 1)]


def probe_body(model: str, prompt: Sequence[int]) -> dict[str, Any]:
    return {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}


async def probe(
    asker: Asker, ears: Ears | None, *, model: str, prompt: list[int], rank: int | None = None, wait_s: float
) -> ProbeFacts:
    """Send the completions and see what comes.

    ears : None where there is no source to hear
    rank : of the first source, to be asked for; None where there is one only
    """
    headers = {} if rank is None else {RANK_HEADER.decode(): str(rank)}
    page = await asker.get("/metrics")
    batches = 0 if ears is None else ears.batches
    first = await asker.post("/v1/completions", probe_body(model, prompt), headers)
    if first.json_trouble("/v1/completions") is not None:
        return ProbeFacts(trouble=first.json_trouble("/v1/completions"))
    block_tokens = 1 if ears is None else ears.directory.block_tokens
    blocks = chain(Identity(model, block_tokens=block_tokens).root(), prompt[:-1], block_tokens)
    if ears is not None:
        await ears.until(lambda: max(ears.matches(blocks)) == len(blocks), wait_s)
    second = await asker.post("/v1/completions", probe_body(model, prompt), headers)
    later = await asker.get("/metrics")
    asked, *others = [0] if ears is None else ears.matches(blocks)
    moved = counters_moved(together([*loads_of(page.text).values()]), together([*loads_of(later.text).values()]))
    return ProbeFacts(
        trouble=second.json_trouble("/v1/completions"),
        rank=rank,
        blocks=len(blocks),
        seen_blocks=asked,
        elsewhere_blocks=max(others, default=0),
        batches=0 if ears is None else ears.batches - batches,
        cached_tokens=cached_tokens_in(second.json()),
        reusable_tokens=len(prompt) - 1,
        figures_moved=moved,
        unmatched="" if ears is None else unmatched(ears.directory.stats().totals),
    )


def unmatched(totals: Applied) -> str:
    """What of the events could not be matched, in words; "" when all could."""
    counted = {
        "of another block size": totals.mismatched,
        "with an unknown parent": totals.orphans,
        "of a kind that is no prefix": totals.ignored,
        "malformed": totals.bad,
        "of an unknown type or medium": totals.unknown,
    }
    return ", ".join(f"{count} {what}" for what, count in counted.items() if count)
