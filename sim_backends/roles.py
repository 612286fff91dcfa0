"""Prefill and decode on different replicas: state that waits on one for the other.

Model     a prefill replica makes one token and keeps the request's blocks; a decode replica that is told to takes all
          of that state over the link between them and computes only the last prompt token again. Kept blocks are
          let go when the read ends, in whatever way, or when nobody has come for them
Valid     both replicas serve the same model with the same block size
Blind to  layer-by-layer pushes during the prefill, different tensor parallelism on the two sides
Source    vLLM NixlConnector (do_remote_decode, do_remote_prefill, VLLM_NIXL_ABORT_REQUEST_TIMEOUT = 480 s)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from sim_backends.alarms import Alarm, Alarms

HOLD_S = 480.0  # vLLM's default; shorter ones lose state to a slow decode queue, longer ones block memory after a crash


class Role(Enum):
    BOTH = "both"
    PREFILL = "prefill"  # every request makes one token there, and its state is kept
    DECODE = "decode"  # takes hand-offs; a request that comes without one is computed there in full, as vLLM does


@dataclass(slots=True)
class _Kept:
    blocks: list[int]
    tokens: int
    alarm: Alarm


class KeptState:
    """Blocks of finished prefills on one replica. `let_go(blocks, now_s)` gets each request's blocks once."""

    def __init__(self, alarms: Alarms, let_go: Callable[[list[int], float], None], *, hold_s: float = HOLD_S) -> None:
        """`hold_s` > 0: how long state waits for its reader."""
        self._alarms = alarms
        self._let_go = let_go
        self._hold_s = hold_s
        self._kept: dict[str, _Kept] = {}
        self.expired = 0  # requests whose state nobody came for

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, blocks: list[int], tokens: int, now_s: float) -> None:
        """Hold `blocks`, which have the state of the first `tokens` tokens; what had this id before is let go."""
        self.release(request_id, now_s)
        self._kept[request_id] = _Kept(blocks, tokens, self._alarms.at(now_s + self._hold_s, self._expire(request_id)))

    def tokens(self, request_id: str) -> int:
        """Tokens whose state can be read; 0 when it is not here (any more)."""
        kept = self._kept.get(request_id)
        return kept.tokens if kept is not None else 0

    def reading(self, request_id: str) -> None:
        """A read has begun: it will end with `release`, and no time limit cuts it."""
        self._alarms.cancel(self._kept[request_id].alarm)

    def release(self, request_id: str, now_s: float) -> None:
        """Let go of one request's blocks. Without effect when they are not here."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._alarms.cancel(kept.alarm)
            self._let_go(kept.blocks, now_s)

    def drop(self, now_s: float) -> None:
        """Let go of everything."""
        for request_id in list(self._kept):
            self.release(request_id, now_s)

    def _expire(self, request_id: str) -> Callable[[float], None]:
        def expire(now_s: float) -> None:
            self.expired += 1
            self.release(request_id, now_s)

        return expire
