"""What has to be done again after a failure, and what of a saved state is of use.

Model     state is read in whole pages and used as far as it continues what is there: an engine computes the last
          prompt token itself, so a page that ends with it is read in vain
          an answer of which n tokens are known stands on prompt + n - 1 tokens of state: the last one has not been fed
          back. What saved state lacks of that is one prefill when the tokens were logged; without the log those
          tokens are lost, and other ones are drawn step by step
Valid     one request on one replica; state of the same model, adapter and format
Blind to  finding out about the failure, building the replica anew, the queue that waits there
Source    AI Infra textbook, sections 9.5.3 and 9.6.3
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from estimators.ranges import require
from estimators.roofline import Roofline


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages read for one prompt and pages that replaced computing."""

    page_bytes: float
    read_pages: int
    used_pages: int
    used_tokens: int

    @property
    def read_bytes(self) -> float:
        return self.read_pages * self.page_bytes

    @property
    def used_bytes(self) -> float:
        return self.used_pages * self.page_bytes


def page_use(*, prompt_tokens: int, stored_tokens: int, page_tokens: int, token_bytes: float) -> PageUse:
    """Pages of a prompt that are read from storage, and those that are of use.

    prompt_tokens >= 1; stored_tokens : from the start of the prompt, >= 0; page_tokens >= 1; token_bytes > 0
    """
    require(prompt_tokens >= 1, "prompt_tokens", prompt_tokens)
    require(stored_tokens >= 0, "stored_tokens", stored_tokens)
    require(page_tokens >= 1, "page_tokens", page_tokens)
    require(0 < token_bytes < inf, "token_bytes", token_bytes)
    read = min(stored_tokens, prompt_tokens) // page_tokens
    used = min(read, (prompt_tokens - 1) // page_tokens)
    return PageUse(page_tokens * token_bytes, read, used, used * page_tokens)


def page_segments(*, layers: int, page_bytes: float, gathered: bool) -> tuple[int, float]:
    """Transfers of one page and the bytes of each: one if gathered, else K and V of each layer apart."""
    require(layers >= 1, "layers", layers)
    require(0 < page_bytes < inf, "page_bytes", page_bytes)
    return (1, page_bytes) if gathered else (2 * layers, page_bytes / (2 * layers))


@dataclass(frozen=True, slots=True)
class Resumption:
    """How one request goes on after its replica was lost.

    state_tokens : state the next token stands on
    read_bytes, read_s : saved state brought back
    replayed_tokens, replay_s : computed in one prefill from tokens that are known
    redrawn_tokens, redraw_s : decoded anew, and different where sampling is by chance
    """

    state_tokens: int
    read_bytes: float
    read_s: float
    replayed_tokens: int
    replay_s: float
    redrawn_tokens: int
    redraw_s: float

    @property
    def ready_s(self) -> float:
        """From the start of the recovery until the next token can be decoded."""
        return self.read_s + self.replay_s + self.redraw_s


def resume(
    roofline: Roofline,
    *,
    prompt_tokens: int,
    answered_tokens: int,
    saved_tokens: int,
    logged: bool,
    read_bytes_per_s: float,
) -> Resumption:
    """What it takes to go on with a request that had answered `answered_tokens` (>= 1).

    Parameters
    ----------
    prompt_tokens : >= 1
    saved_tokens : tokens from the start whose state was saved, >= 0; more than is needed does not help
    logged : whether the tokens of the answer are known; else those beyond the saved state are drawn again
    read_bytes_per_s : of the way to the saved state, > 0
    """
    require(prompt_tokens >= 1, "prompt_tokens", prompt_tokens)
    require(answered_tokens >= 1, "answered_tokens", answered_tokens)
    require(saved_tokens >= 0, "saved_tokens", saved_tokens)
    require(0 < read_bytes_per_s < inf, "read_bytes_per_s", read_bytes_per_s)
    state = prompt_tokens + answered_tokens - 1
    saved = min(saved_tokens, state)
    known = state if logged else max(prompt_tokens, saved)
    replayed, redrawn = known - saved, state - known
    read_bytes = float(roofline.costs.kv_bytes_between(0, saved))
    step_s = roofline.decode_step_s([known + redrawn / 2]) if redrawn else 0.0
    return Resumption(
        state_tokens=state,
        read_bytes=read_bytes,
        read_s=read_bytes / read_bytes_per_s,
        replayed_tokens=replayed,
        replay_s=roofline.prefill_s(new_tokens=replayed, cached_tokens=saved) if replayed else 0.0,
        redrawn_tokens=redrawn,
        redraw_s=redrawn * step_s,
    )


def patience_s(*, read_s: float, compute_s: float) -> float:
    """How long to wait for state to appear before computing it: what it would save. Both >= 0.

    Whoever waits so long and then computes has lost no more than the state could have saved, so never takes more than
    twice as long as the better of the two would have, whenever the state comes. At zero it is not worth reading.
    """
    require(0 <= read_s < inf, "read_s", read_s)
    require(0 <= compute_s < inf, "compute_s", compute_s)
    return max(0.0, compute_s - read_s)
