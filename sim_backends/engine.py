"""One simulated replica: vLLM V1's scheduler over a block cache, in virtual time.

Model     steps follow one another without a gap while there is work. A step gives one token to each decoding
          request, then continues prefills, then admits waiting requests in order of arrival, all within a budget
          of tokens. A request emits at the end of the step that computes its last known token
Valid     calls come in order of time; `run_due` before anything later than `due_s` is told
Blind to  priorities, speculative decoding, adapters, host and disk tiers, several ranks
Source    vLLM 0.29 to 0.33, vllm/v1/core/sched/scheduler.py. Unlike it, admission takes the blocks of the whole
          prompt at once, and requests that hold their blocks may pass a head that does not fit (no deadlock)

No clock and no await: the caller says what time it is. Several engines on one store are driven together by
`world.World`, which keeps the order of time between them.
"""

from __future__ import annotations

from bisect import insort
from itertools import count
from math import inf
from operator import attrgetter

from sim_backends.block_cache import BlockCache
from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import CacheEvent, EventBatch, Stored
from sim_backends.intake import Intake
from sim_backends.requests import Counters, EngineRequest, EngineSettings, LiveRequest, Output, Phase
from sim_backends.service_times import ServiceTimes
from sim_backends.store import StoreReader

_RANK = attrgetter("rank")
_TOKEN_STRIDE = 7919  # a prime: output tokens of one request do not repeat within a vocabulary


class Engine:
    """Owns its cache, queue and counters; the store behind `reader` is shared."""

    def __init__(
        self,
        settings: EngineSettings,
        times: ServiceTimes,
        *,
        reader: StoreReader | None = None,
        record_events: bool = False,
    ) -> None:
        """`record_events` False saves the work when nobody publishes."""
        self.settings = settings
        self.counters = Counters()
        self.due_s = inf  # when `run_due` is wanted: the end of the step under way, or a start
        self._events: list[CacheEvent] | None = [] if record_events else None
        self._batches: list[EventBatch] = []
        self.cache = BlockCache(settings.kv_blocks, events=self._events)
        self._hasher = BlockHasher(block_tokens=settings.block_tokens, vocab=settings.vocab)
        self._intake = Intake(settings, self._hasher)
        self._times = times
        self._reader = reader
        self._to_front = count(-1, -1)
        self._live: dict[str, LiveRequest] = {}
        self._waiting: list[LiveRequest] = []  # by rank
        self._running: list[LiveRequest] = []  # by admission
        self._batch: list[LiveRequest] = []  # of the step under way
        self._in_step = False
        self._waiting_holders = 0  # waiting requests that hold their blocks
        self._blocked: tuple[LiveRequest, int] | None = None  # head that did not fit, and the free blocks then

    # Facts for faces and metrics.

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, tokens."""
        return self._intake.max_model_len

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests not yet running, those that are fetching included."""
        return len(self._live) - len(self._running)

    # What the world tells.

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Take a request. Raises RequestRefused for one that can never run."""
        assert now_s <= self.due_s, "run what is due before telling what comes later"
        assert request.request_id not in self._live, "request ids are unique among live requests"
        live = self._intake.accept(request, now_s)
        self._live[live.request_id] = live
        if self._reader is not None and self._reader.discipline != "serial" and self._start_fetch(live, now_s):
            return
        self._waiting.append(live)
        self._kick(now_s)

    def abort(self, request_id: str, now_s: float) -> bool:
        """Drop a request in any phase; False when it is not here (any more). No output follows."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        if live.phase is Phase.RUNNING:
            self._running.remove(live)
        elif live.phase is Phase.WAITING:
            self._waiting.remove(live)
            self._waiting_holders -= bool(live.blocks)
        if live.fetch is not None:
            live.fetch.cancel(now_s)
        live.phase = Phase.OVER
        self._let_go(live)
        self.counters.finished["abort"] += 1
        self._kick(now_s)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget the cache; False while any request holds a block. Announced with the next step, as in vLLM."""
        return self.cache.clear()

    def run_due(self) -> list[Output]:
        """Do the one thing due at `due_s`: end the step under way and start the next, or start one."""
        now_s = self.due_s
        outputs = self._end_step(now_s) if self._in_step else []
        self._begin_step(now_s)
        return outputs

    def advance(self, now_s: float) -> list[Output]:
        """Everything due by `now_s`, in order of time. For an engine without a store; see `world.World`."""
        outputs: list[Output] = []
        while self.due_s <= now_s:
            outputs.extend(self.run_due())
        return outputs

    def next_due_s(self) -> float | None:
        """When `advance` has something to do; None while idle."""
        return None if self.due_s == inf else self.due_s

    def take_event_batches(self) -> list[EventBatch]:
        """Batches since the last call, oldest first: one for each step that had events."""
        batches, self._batches = self._batches, []
        return batches

    # Blocks.

    def _findable(self, live: LiveRequest) -> int:
        """Blocks that may be reused: at least one token is always computed."""
        return (len(live.tokens) - 1) // self.settings.block_tokens

    def _reserve(self, live: LiveRequest, hits: int) -> bool:
        """Hold the blocks of all known tokens, the first `hits` from the cache."""
        size = self.settings.block_tokens
        total = -(-len(live.tokens) // size)
        blocks = self.cache.reserve(live.digests[:hits], total)
        if blocks is None:
            return False
        live.blocks = blocks
        live.registered = hits
        live.computed = hits * size
        if live.cached_tokens < 0:
            live.cached_tokens = live.computed
            self.counters.prefix_queries += live.prompt_tokens
            self.counters.prefix_hits += live.computed
            if self._reader is not None:
                self.counters.external_queries += live.prompt_tokens - live.computed
        return True

    def _let_go(self, live: LiveRequest) -> None:
        self.cache.release(live.blocks)
        live.blocks = []
        self._blocked = None

    def _register(self, live: LiveRequest, now_s: float) -> None:
        """Make all full computed blocks findable, announce them and write them through to the store."""
        size = self.settings.block_tokens
        first, last = live.registered, live.computed // size
        digests = live.digests
        while len(digests) < last:
            start = len(digests) * size
            tokens = live.tokens[start : start + size]
            if digests:
                digests.append(self._hasher.next(digests[-1], tokens))
            else:
                digests.extend(self._hasher.chain(tokens, salt=live.salt))
        fresh = digests[first:last]
        for block, digest in zip(live.blocks[first:last], fresh, strict=True):
            self.cache.register(block, digest)
        live.registered = last
        if self._events is not None:
            parent = digests[first - 1] if first else None
            salt = live.salt if first == 0 else None
            self._events.append(Stored(fresh, parent, live.tokens[first * size : last * size], salt))
        if self._reader is not None:
            self._reader.store.put(fresh, now_s)

    # Fetches.

    def _start_fetch(self, live: LiveRequest, now_s: float) -> bool:
        """Look HBM and the store up; reserve and fetch if that gains enough and there is room."""
        reader = self._reader
        assert reader is not None, "only engines with a store fetch"
        limit = self._findable(live)
        here = self.cache.match(live.digests, limit)
        there = reader.store.match(live.digests, here, limit)
        gain = (there - here) * self.settings.block_tokens
        fresh = live.cached_tokens < 0
        if gain == 0 or gain < reader.minimum_tokens or not self._reserve(live, here):
            return False
        if fresh:
            live.cached_tokens += gain
            self.counters.external_hits += gain
        live.phase = Phase.FETCHING
        live.fetched_to = there
        live.fetch = reader.fetch(
            live.digests[here:there],
            now_s,
            first_done=lambda at_s: self._first_layer_here(live, at_s),
            done=lambda at_s: self._fetched(live, at_s),
        )
        return True

    def _first_layer_here(self, live: LiveRequest, now_s: float) -> None:
        """Layerwise: the prefill may start, and trails the layers that come."""
        live.computed = live.fetched_to * self.settings.block_tokens
        self._queue_again(live, now_s)

    def _fetched(self, live: LiveRequest, now_s: float) -> None:
        live.fetch = None
        live.computed = max(live.computed, live.fetched_to * self.settings.block_tokens)
        self._register(live, now_s)
        if live.phase is Phase.FETCHING:
            self._queue_again(live, now_s)
        else:
            self._kick(now_s)

    def _queue_again(self, live: LiveRequest, now_s: float) -> None:
        live.phase = Phase.WAITING
        insort(self._waiting, live, key=_RANK)
        self._waiting_holders += 1
        self._kick(now_s)

    # Steps.

    def _kick(self, now_s: float) -> None:
        """Start a step at `now_s` unless one is under way: after all that is told at this same time."""
        if not self._in_step and (self._waiting or self._running) and now_s < self.due_s:
            self.due_s = now_s

    def _begin_step(self, now_s: float) -> None:
        batch: list[LiveRequest] = []
        self._batch = batch
        preemptions = self.counters.preemptions
        budget, prefills = self._schedule_decodes(self.settings.token_budget)
        kv_read = 0
        for live in batch:
            kv_read += live.computed
        tokens = len(batch)
        pairs = float(kv_read)
        budget = self._schedule_prefills(prefills, budget)
        if self._waiting and budget and preemptions == self.counters.preemptions:
            self._admit(budget, now_s)
        emitting = tokens
        for live in batch[tokens:]:
            new = live.step_tokens
            tokens += new
            pairs += new * live.computed + 0.5 * new * new
            emitting += live.computed + new == len(live.tokens)
        self._in_step = bool(batch)
        self.due_s = inf
        if batch:
            step_s = self._times.step_s(tokens=tokens, pairs=pairs, kv_tokens_read=kv_read, emitting=emitting)
            self.due_s = now_s + step_s

    def _schedule_decodes(self, budget: int) -> tuple[int, list[LiveRequest]]:
        """One token for each decoding request, oldest first; returns the budget left and the prefills met."""
        prefills: list[LiveRequest] = []
        batch, running, size = self._batch, self._running, self.settings.block_tokens
        index = 0
        while index < len(running):
            live = running[index]
            index += 1
            if len(live.tokens) - live.computed > 1 or live.fetch is not None:
                prefills.append(live)
                continue
            if not budget or (live.computed == len(live.blocks) * size and not self._grow(live)):
                continue
            live.step_tokens = 1
            batch.append(live)
            budget -= 1
        return budget, prefills

    def _grow(self, live: LiveRequest) -> bool:
        """One more block for a decoding request, from the youngest running ones if need be; False if it went itself."""
        while not self.cache.free_blocks:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is live:
                return False
        live.blocks.extend(self.cache.take(1))
        return True

    def _preempt(self, live: LiveRequest) -> None:
        """Back to the front of the queue, to be computed again; what it had stays findable until it is needed."""
        assert self._running.pop() is live, "the youngest running request goes first"
        if live.fetch is not None:
            live.fetch.cancel(self.due_s)
            live.fetch = None
        self._let_go(live)
        live.computed = live.registered = 0
        live.phase = Phase.WAITING
        live.rank = next(self._to_front)
        insort(self._waiting, live, key=_RANK)
        self.counters.preemptions += 1

    def _schedule_prefills(self, prefills: list[LiveRequest], budget: int) -> int:
        for live in prefills:
            if budget and live.phase is Phase.RUNNING:
                budget -= self._chunk(live, budget)
        return budget

    def _chunk(self, live: LiveRequest, budget: int) -> int:
        """Put the next chunk of a prefill into the batch; its last token waits for the last bytes of a fetch."""
        left = len(live.tokens) - live.computed - (live.fetch is not None)
        new = min(left, budget)
        if new:
            live.step_tokens = new
            self._batch.append(live)
        return new

    def _admit(self, budget: int, now_s: float) -> None:
        """From the queue in order of rank. Behind a head that does not fit only holders of blocks go on."""
        waiting, running = self._waiting, self._running
        stuck = False
        index = 0
        while budget and index < len(waiting) and len(running) < self.settings.max_running:
            live = waiting[index]
            if live.blocks:
                self._waiting_holders -= 1
            elif stuck:
                index += 1
                continue
            elif self._fetch_in_turn(live, now_s):
                del waiting[index]
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
            budget -= self._chunk(live, budget)

    def _fits(self, live: LiveRequest) -> bool:
        """Reserve for a head; one that failed is not matched again before a block has been let go."""
        if self._blocked is not None and self._blocked[0] is live and self._blocked[1] >= self.cache.free_blocks:
            return False
        if self._reserve(live, self.cache.match(live.digests, self._findable(live))):
            return True
        self._blocked = (live, self.cache.free_blocks)
        return False

    def _fetch_in_turn(self, live: LiveRequest, now_s: float) -> bool:
        reader = self._reader
        return reader is not None and reader.discipline == "serial" and self._start_fetch(live, now_s)

    def _end_step(self, now_s: float) -> list[Output]:
        outputs: list[Output] = []
        size = self.settings.block_tokens
        self._in_step = False
        for live in self._batch:
            if live.phase is not Phase.RUNNING:  # aborted while the step ran
                continue
            live.computed = computed = live.computed + live.step_tokens
            if live.output == 0:
                self.counters.computed += live.step_tokens
            if computed >= (live.registered + 1) * size and live.fetch is None:
                self._register(live, now_s)
            if computed == len(live.tokens):
                outputs.append(self._emit(live, now_s))
        self.counters.generation += len(outputs)
        if self._events:
            self._batches.append(EventBatch(now_s, list(self._events)))
            self._events.clear()  # the cache appends to the same list
        return outputs

    def _emit(self, live: LiveRequest, now_s: float) -> Output:
        index = live.output
        token_id = (live.token_base + index * _TOKEN_STRIDE) % self.settings.vocab
        live.tokens.append(token_id)
        live.output = index + 1
        if index == 0:
            self.counters.prompt += live.prompt_tokens
            self.counters.saw_first_token(now_s - live.arrival_s)
        reason = None
        if live.output == live.planned:
            reason = live.finish_reason
            self._finish(live, reason)
        return Output(live.request_id, now_s, index, token_id, reason, live.cached_tokens)

    def _finish(self, live: LiveRequest, reason: str) -> None:
        live.phase = Phase.OVER
        self._running.remove(live)
        del self._live[live.request_id]
        self._let_go(live)
        self.counters.finished[reason] += 1
