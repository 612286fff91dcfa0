"""Which requests are in the next step of an engine, and with how many tokens each.

Model     one token to each decoding request, oldest first; then prefills go on; then waiting requests are admitted
          in order of arrival, all within a budget of tokens. A decode that needs a block takes it from the youngest
          running request if none is free
Valid     one call of `schedule` for each step
Blind to  priorities, speculative decoding
Source    vLLM 0.29 to 0.33, vllm/v1/core/sched/scheduler.py. Unlike it, admission takes the blocks of the whole
          prompt at once, and requests that hold their blocks may pass a head that does not fit (no deadlock)
"""

from __future__ import annotations

from bisect import insort
from itertools import count
from operator import attrgetter

from sim_backends.engine_fetches import EngineFetches
from sim_backends.requests import Counters, EngineSettings, LiveRequest, Phase
from sim_backends.sequence_blocks import SequenceBlocks

_RANK = attrgetter("rank")


class Scheduler:
    """Owns the queue and the running requests. `fetches` is None where nothing is beyond HBM; set before use."""

    fetches: EngineFetches | None = None

    def __init__(self, settings: EngineSettings, blocks: SequenceBlocks, counters: Counters) -> None:
        self.waiting: list[LiveRequest] = []  # by rank
        self.running: list[LiveRequest] = []  # by admission
        self.batch: list[LiveRequest] = []  # of the step last scheduled; decodes come first
        self.steady = False  # the next step would be the last one over again until a request changes
        self._token_budget = settings.token_budget
        self._max_running = settings.max_running
        self._blocks = blocks
        self._counters = counters
        self._to_front = count(-1, -1)
        self._waiting_holders = 0  # waiting requests that hold their blocks
        self._blocked: tuple[LiveRequest, int, int] | None = None  # head that did not fit, let-gos and free blocks then

    # Requests come and go.

    def add(self, live: LiveRequest) -> None:
        """To the end of the queue."""
        self.waiting.append(live)

    def add_holder(self, live: LiveRequest) -> None:
        """Into the queue at its rank, with its blocks."""
        live.phase = Phase.WAITING
        insort(self.waiting, live, key=_RANK)
        self._waiting_holders += 1

    def drop(self, live: LiveRequest) -> None:
        """Out of the queue or of the running ones. Its blocks are the caller's to let go."""
        if live.phase is Phase.RUNNING:
            self.running.remove(live)
        elif live.phase is Phase.WAITING:
            self.waiting.remove(live)
            self._waiting_holders -= bool(live.blocks)

    # One step.

    def schedule(self, now_s: float) -> int:
        """Fill `batch` with the step that starts at `now_s`; how many of it, from its start, decode."""
        batch: list[LiveRequest] = []
        self.batch = batch
        preemptions = self._counters.preemptions
        budget, prefills = self._schedule_decodes(now_s)
        decodes = len(batch)
        budget = self._schedule_prefills(prefills, budget, now_s)
        calm = preemptions == self._counters.preemptions  # else what was thrown out would come straight back
        if self.waiting and budget and calm:
            self._admit(budget, now_s)
        running = len(self.running)
        fetches = self.fetches
        may_fetch = self.waiting and fetches is not None and fetches.in_turn and running < self._max_running
        self.steady = calm and decodes == running and not may_fetch
        if fetches is not None and fetches.hold_gpu:
            self.batch = []  # what was scheduled keeps its blocks and is scheduled again
            return 0
        return decodes

    def _schedule_decodes(self, now_s: float) -> tuple[int, list[LiveRequest]]:
        """One token for each decoding request, oldest first; returns the budget left and the prefills met."""
        prefills: list[LiveRequest] = []
        budget = self._token_budget
        batch, running, size = self.batch, self.running, self._blocks.size
        index = 0
        while index < len(running):
            live = running[index]
            index += 1
            if live.known - live.computed > 1 or live.fetch is not None:
                prefills.append(live)
                continue
            if not budget or (live.computed == len(live.blocks) * size and not self._grow(live, now_s)):
                continue
            live.step_tokens = 1
            batch.append(live)
            budget -= 1
        return budget, prefills

    def _grow(self, live: LiveRequest, now_s: float) -> bool:
        """One more block for a decoding request, from the youngest running ones if need be; False if it went itself."""
        while not self._blocks.cache.free_blocks:
            victim = self.running[-1]
            self._preempt(victim, now_s)
            if victim is live:
                return False
        self._blocks.grow(live)
        return True

    def _preempt(self, live: LiveRequest, now_s: float) -> None:
        """Back to the front of the queue, to be computed again; what it had stays findable until it is needed."""
        youngest = self.running.pop()
        assert youngest is live, "the youngest running request goes first"
        if self.fetches is not None:
            self.fetches.drop(live, now_s)
        self._blocks.let_go(live)
        live.computed = live.registered = 0
        live.phase = Phase.WAITING
        live.rank = next(self._to_front)
        insort(self.waiting, live, key=_RANK)
        self._counters.preemptions += 1

    def _schedule_prefills(self, prefills: list[LiveRequest], budget: int, now_s: float) -> int:
        for live in prefills:
            if budget and live.phase is Phase.RUNNING:
                budget -= self._chunk(live, budget, now_s)
        return budget

    def _chunk(self, live: LiveRequest, budget: int, now_s: float) -> int:
        """Put the next chunk of a prefill into the batch: what its fetch, if any, leaves to compute now."""
        left = live.known - live.computed
        if live.fetch is not None:
            assert self.fetches is not None, "who fetched"
            left = self.fetches.computable(live, now_s)
        new = min(left, budget)
        if new:
            live.step_tokens = new
            self.batch.append(live)
        return new

    def _admit(self, budget: int, now_s: float) -> None:
        """From the queue in order of rank. Behind a head that does not fit only holders of blocks go on."""
        waiting, running, fetches = self.waiting, self.running, self.fetches
        stuck = False
        index = 0
        while budget and index < len(waiting) and len(running) < self._max_running:
            live = waiting[index]
            if live.blocks:
                self._waiting_holders -= 1
                if fetches is not None and live.fetch is not None and fetches.waits_at_turn(live, now_s):
                    del waiting[index]
                    continue
            elif stuck:
                index += 1
                continue
            elif fetches is not None and not self._still_blocked(live) and fetches.starts_at_turn(live, now_s):
                del waiting[index]
                if fetches.hold_gpu:
                    return
                continue
            elif not self._fits(live):
                if not self._waiting_holders:
                    return
                stuck = True
                index += 1
                continue
            del waiting[index]
            live.phase = Phase.RUNNING
            running.append(live)
            budget -= self._chunk(live, budget, now_s)

    def _fits(self, live: LiveRequest) -> bool:
        """Reserve for a head; one that failed is not matched again before a block has been let go."""
        blocks = self._blocks
        if self._still_blocked(live):
            return False
        if blocks.reserve(live, blocks.match(live)):
            return True
        self._blocked = (live, blocks.let_gos, blocks.cache.free_blocks)
        return False

    def _still_blocked(self, live: LiveRequest) -> bool:
        """Whether there was no room for `live` when it was last tried, and no block has been let go since."""
        if self._blocked is None:
            return False
        head, let_gos, free = self._blocked
        return head is live and let_gos == self._blocks.let_gos and free >= self._blocks.cache.free_blocks
