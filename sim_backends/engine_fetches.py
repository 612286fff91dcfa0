"""What becomes of one engine's fetches: on arrival, at a request's turn, when bytes have come, when it is over.

Model     the engine's discipline, see `disciplines`. A request holds the blocks of its whole prompt from the start of
          its fetch. What a fetch has brought is announced and written through like computed blocks
Valid     calls in order of time
Blind to  a fetch that is retried: one that found no room on arrival, in HBM or in the prefetch space, is computed
"""

from __future__ import annotations

from collections.abc import Callable

from sim_backends.directives import Path
from sim_backends.disciplines import AtTurn
from sim_backends.fetch import Plan
from sim_backends.fetching import Fetcher
from sim_backends.requests import Counters, LiveRequest, Phase
from sim_backends.sequence_blocks import SequenceBlocks

Told = Callable[[LiveRequest, float], None]


class EngineFetches:
    """Owns what is under way; blocks and counters are the engine's.

    queue : puts a request that holds its blocks into the queue at its rank
    changed : told whenever time alone has changed something a step depends on; a step may start
    """

    def __init__(
        self,
        fetcher: Fetcher,
        blocks: SequenceBlocks,
        counters: Counters,
        *,
        queue: Callable[[LiveRequest], None],
        changed: Callable[[float], None],
    ) -> None:
        self._fetcher = fetcher
        self._blocks = blocks
        self._counters = counters
        self._queue = queue
        self._changed = changed
        self._holder: LiveRequest | None = None  # whose fetch holds the GPU

    @property
    def hold_gpu(self) -> bool:
        """Whether no step may start now."""
        return self._holder is not None

    @property
    def in_turn(self) -> bool:
        """Whether a request's turn may start a fetch."""
        return not self._fetcher.discipline.on_arrival

    def arrived(self, live: LiveRequest, now_s: float) -> bool:
        """A request came; True when its fetch has started and the caller has nothing more to do for it."""
        if not (self._fetcher.discipline.on_arrival or _is_hand_off(live)):
            return False
        plan = self._plan(live)
        if plan is None:
            return False
        if not self._start(live, plan, now_s):
            live.no_room = True
            return False
        if live.phase is Phase.WAITING:
            self._queue(live)
            self._changed(now_s)
        return True

    def starts_at_turn(self, live: LiveRequest, now_s: float) -> bool:
        """The turn of a request that holds nothing; True when it left for a fetch."""
        again = self._fetcher.discipline.looks_again and not live.no_room
        if not (self.in_turn or again or _is_hand_off(live)):
            return False
        plan = self._plan(live)
        return plan is not None and self._start(live, plan, now_s)

    def waits_at_turn(self, live: LiveRequest, now_s: float) -> bool:
        """The turn of a request whose fetch is under way; True when it leaves the queue to wait for more of it."""
        fetch = live.fetch
        assert fetch is not None, "only a request with a fetch"
        at_turn, limit_s = fetch.plan.discipline.at_turn, self._fetcher.limit_s
        if at_turn is AtTurn.WAIT and limit_s > 0.0:
            live.phase = Phase.FETCHING
            live.patience = self._fetcher.alarms.at(now_s + limit_s, lambda at_s: self._out_of_patience(live, at_s))
            return True
        if at_turn in (AtTurn.TAKE, AtTurn.WAIT):
            self._take(live, fetch.stop(now_s), now_s)
        return False

    def computable(self, live: LiveRequest, now_s: float) -> int:
        """Tokens that a running request may compute now beside its fetch."""
        fetch = live.fetch
        assert fetch is not None, "only a request with a fetch"
        if fetch.plan.discipline.at_turn is not AtTurn.MEET:
            return live.known - live.computed - 1  # its last token waits for the last bytes
        tail = fetch.tail_from_tokens
        if live.computed < tail:
            return tail - live.computed
        fetch.stop(now_s)
        self._count(live, fetch.plan.end_tokens - live.computed)
        self._take(live, fetch.plan.end_tokens, now_s, counted=True)
        return live.known - live.computed

    def drop(self, live: LiveRequest, now_s: float) -> None:
        """The request goes, or begins anew: nothing more comes for it."""
        if live.fetch is not None:
            live.fetch.stop(now_s)
            live.fetch = None
        if live.patience is not None:
            self._fetcher.alarms.cancel(live.patience)
            live.patience = None
        if self._holder is live:
            self._holder = None

    def _plan(self, live: LiveRequest) -> Plan | None:
        """Look everything up; None where a fetch gains too little."""
        if live.given_tokens:
            return None
        return self._fetcher.plan(
            live.digests,
            here=self._blocks.match(live),
            limit=self._blocks.findable(live),
            prompt_tokens=live.prompt_tokens,
            directive=live.directive,
        )

    def _start(self, live: LiveRequest, plan: Plan, now_s: float) -> bool:
        """Reserve and fetch what `plan`, just made, says; False where there is no room."""
        blocks, fetcher = self._blocks, self._fetcher
        fresh = live.cached_tokens < 0
        if not fetcher.has_space(plan) or not blocks.reserve(live, plan.start_tokens // blocks.size):
            return False
        live.fetch_counts = fresh
        if plan.discipline.at_turn is AtTurn.NOT_QUEUED:
            live.phase = Phase.FETCHING
        if plan.discipline.holds_gpu:
            self._holder = live
        live.fetch = fetcher.start(
            plan,
            live.digests,
            now_s,
            first_done=lambda at_s: self._first_layer_here(live, at_s),
            done=lambda at_s: self._done(live, at_s),
        )
        return True

    def _first_layer_here(self, live: LiveRequest, now_s: float) -> None:
        """The prefill may start, and trails the layers that come."""
        assert live.fetch is not None, "its fetch is under way"
        self._reach(live, live.fetch.plan.end_tokens)
        self._queue(live)
        self._changed(now_s)

    def _done(self, live: LiveRequest, now_s: float) -> None:
        fetch = live.fetch
        assert fetch is not None, "its fetch has just ended"
        if fetch.plan.discipline.at_turn is AtTurn.MEET:
            return  # the request finds the tail there when it has its next chunk
        self._take(live, fetch.usable_tokens, now_s)
        if live.phase is Phase.FETCHING:
            self._queue(live)
        self._changed(now_s)

    def _out_of_patience(self, live: LiveRequest, now_s: float) -> None:
        assert live.fetch is not None, "the alarm is cancelled when the fetch ends"
        self._take(live, live.fetch.stop(now_s), now_s)
        self._queue(live)
        self._changed(now_s)

    def _take(self, live: LiveRequest, usable_tokens: int, now_s: float, *, counted: bool = False) -> None:
        """The fetch is over and the first `usable_tokens` tokens are here."""
        fetch = live.fetch
        assert fetch is not None, "what is taken was fetched"
        self.drop(live, now_s)
        if not counted:
            self._count(live, usable_tokens - fetch.plan.start_tokens)
        self._reach(live, usable_tokens)
        if live.computed // self._blocks.size > live.registered:
            self._blocks.register(live, now_s)

    def _reach(self, live: LiveRequest, tokens: int) -> None:
        """At least one token is always computed."""
        live.computed = max(live.computed, min(tokens, live.known - 1))

    def _count(self, live: LiveRequest, tokens: int) -> None:
        if live.fetch_counts:
            live.cached_tokens += min(tokens, live.prompt_tokens - 1 - live.cached_tokens)
            self._counters.external_hits += tokens


def _is_hand_off(live: LiveRequest) -> bool:
    return live.directive is not None and live.directive.path is Path.HAND_OFF
