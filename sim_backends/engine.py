"""One simulated replica: vLLM V1's engine core over a block cache, in virtual time.

Model     steps follow one another without a gap while there is work; the scheduler says what is in each. A request
          emits at the end of the step that computes its last known token
Valid     calls come in order of time; `run_due` before anything later than `due_s` is told
Blind to  priorities, speculative decoding, adapters
Source    vLLM 0.29 to 0.33, vllm/v1/engine/core.py

Runs: an engine that hands out only the ends of requests works out many steps at once while they hold the same
decodes and nothing else. All but the last of such a run change nothing but counts: no request ends, no block fills.
Whatever is told meanwhile makes the step in progress the last one. Times, events and counters come out as step by
step; only `counters.generation` lags until the run is over or `catch_up` is called.

No clock and no await: the caller says what time it is. Engines are driven together with the links, the store and the
alarms they share by `world.World`, which keeps the order of time between them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from math import inf
from typing import Literal

from sim_backends.alarms import Alarms
from sim_backends.block_cache import BlockCache
from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import EventBatch
from sim_backends.directives import Path
from sim_backends.engine_fetches import EngineFetches
from sim_backends.fetch import Peer
from sim_backends.fetching import Fetcher
from sim_backends.intake import Intake
from sim_backends.lifecycle import Lifecycle, State
from sim_backends.requests import Counters, EngineRequest, EngineSettings, LiveRequest, Output, Phase
from sim_backends.roles import KeptState, Role
from sim_backends.scheduler import Scheduler
from sim_backends.sequence_blocks import SequenceBlocks
from sim_backends.service_times import ServiceTimes

Outputs = Literal["all", "ends"]


class Engine:
    """Owns its cache, queue and counters; links, store and alarms behind `fetcher` may be shared.

    peer : what others can read of it, set by who joins replicas
    """

    peer: Peer | None = None

    def __init__(
        self,
        settings: EngineSettings,
        times: ServiceTimes,
        *,
        fetcher: Fetcher | None = None,
        alarms: Alarms | None = None,
        role: Role = Role.BOTH,
        record_events: bool = False,
        outputs: Outputs = "all",
        fresh_ids: Iterator[int] | None = None,
    ) -> None:
        """`record_events` False saves the work when nobody publishes; `outputs` "ends" hands out only the first and
        last token of each request. Engines that share blocks share `fresh_ids`, see `content.IdContent`."""
        self.settings = settings
        self.counters = Counters()
        self.due_s = inf  # when `run_due` is wanted: the end of the step or run under way, or a start
        alarms = alarms or Alarms()
        self.lifecycle = Lifecycle(settings.name, alarms)
        self.kept = KeptState(alarms, self._let_go_kept)
        self.fetcher = fetcher
        self._role = role
        self._blocks = SequenceBlocks(settings, self.counters, fetcher=fetcher, record_events=record_events)
        hasher = BlockHasher(block_tokens=settings.block_tokens, vocab=settings.vocab)
        self._intake = Intake(settings, hasher, fresh_ids=fresh_ids)
        self._times = times
        self._scheduler = Scheduler(settings, self._blocks, self.counters)
        self._fetches: EngineFetches | None = None
        if fetcher is not None:
            self._fetches = self._scheduler.fetches = EngineFetches(
                fetcher, self._blocks, self.counters, queue=self._scheduler.add_holder, changed=self._changed
            )
        self._live: dict[str, LiveRequest] = {}
        self._in_step = False
        self._only_ends = outputs == "ends"
        self._runs = self._only_ends
        # Called with the outputs of a step, before the next step begins: what it submits here is in that next step.
        self.between_steps: Callable[[list[Output]], None] | None = None
        self._ends_s: list[float] = []  # of the steps of a run that are not counted yet; empty outside runs

    # Facts for faces and metrics.

    @property
    def cache(self) -> BlockCache:
        return self._blocks.cache

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, tokens."""
        return self._intake.max_model_len

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests not yet running, those that are fetching included."""
        return len(self._live) - len(self._scheduler.running)

    # What the world tells.

    def slow_down(self, factor: float) -> None:
        """Every step that is planned from now on takes `factor` > 0 times as long as the card would; 1 is healthy."""
        self._times.slow_factor = factor

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Take a request. Raises RequestRefused for one that can never run, NotServing when it takes none now."""
        self.lifecycle.check()
        assert now_s <= self.due_s, "run what is due before telling what comes later"
        assert request.request_id not in self._live, "request ids are unique among live requests"
        live = self._intake.accept(request, now_s)
        self._assume_role(live)
        self._live[live.request_id] = live
        self._interrupt(now_s)
        if self._fetches is not None and self._fetches.arrived(live, now_s):
            return
        self._scheduler.add(live)
        self._kick(now_s)

    def _assume_role(self, live: LiveRequest) -> None:
        """A prefill ends with its first token, and its state is kept for who takes the request over."""
        directive = live.directive
        if self._role is Role.PREFILL:
            live.planned, live.finish_reason = 1, "length"
        if self._role is Role.PREFILL or (directive is not None and directive.keep):
            named = directive.request_id if directive is not None and directive.path is not Path.HAND_OFF else None
            live.keep_as = named or live.request_id

    def abort(self, request_id: str, now_s: float) -> bool:
        """Drop a request in any phase; False when it is not here (any more). No output follows."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._interrupt(now_s)
        self._remove(live, now_s)
        self.counters.finished["abort"] += 1
        self._kick(now_s)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget the cache and the tiers; False while any request holds a block.

        Announced with the next step, as in vLLM, whose event names no tier and so means all of them.
        """
        cleared = self.cache.clear()
        if cleared and self.fetcher is not None:
            self.fetcher.tiers.clear()
        return cleared

    def run_due(self) -> list[Output]:
        """Do the one thing due at `due_s`: end the step or run under way and start the next, or start one."""
        now_s = self.due_s
        outputs = self._end_step(now_s) if self._in_step else []
        if outputs and self.between_steps is not None:
            self.between_steps(outputs)
        self._begin_step(now_s)
        return outputs

    def advance(self, now_s: float) -> list[Output]:
        """Everything due by `now_s`, in order of time. For an engine without a store; see `world.World`."""
        outputs: list[Output] = []
        while self.due_s <= now_s:
            outputs.extend(self.run_due())
        self.catch_up(now_s)
        return outputs

    def catch_up(self, now_s: float) -> None:
        """Count the steps of a run that have ended by `now_s` < `due_s`."""
        if self._ends_s and self._ends_s[0] <= now_s:
            self._pass_steps(bisect_right(self._ends_s, now_s))

    def next_due_s(self) -> float | None:
        """When `advance` has something to do; None while idle."""
        return None if self.due_s == inf else self.due_s

    def take_event_batches(self) -> list[EventBatch]:
        """Batches since the last call, oldest first: one for each step that had events."""
        return self._blocks.take_batches()

    # Its process and its neighbours.

    def drain(self) -> None:
        """Take nothing new and finish what is here; `lifecycle.resume` ends it."""
        self.lifecycle.drain()

    @property
    def drained(self) -> bool:
        return self.lifecycle.state is State.DRAINING and not self._live

    def crash(self, now_s: float, *, back_after_s: float = inf) -> list[Output]:
        """Lose everything at once: requests, memory, tiers, counters. Returns the ends of the requests it had.

        It takes requests again after `back_after_s` >= 0, empty.
        """
        assert now_s <= self.due_s, "run what is due before telling what comes later"
        self.lifecycle.go_down(now_s, back_after_s=back_after_s)
        lost = [Output(live.request_id, now_s, -1, 0, "error", live.cached_tokens) for live in self._live.values()]
        self._interrupt(now_s)
        for live in list(self._live.values()):
            self._remove(live, now_s)
        self._in_step = False
        self.due_s = inf
        self.kept.drop(now_s)
        if self.peer is not None:
            self.peer.lose_readers(now_s)
        if self.fetcher is not None:
            self.fetcher.tiers.clear()
        self._blocks.lose()
        self.counters.reset()
        return lost

    def _remove(self, live: LiveRequest, now_s: float) -> None:
        """Out of everything, before its end."""
        del self._live[live.request_id]
        self._scheduler.drop(live)
        if self._fetches is not None:
            self._fetches.drop(live, now_s)
        live.phase = Phase.OVER
        self._blocks.let_go(live)

    def _let_go_kept(self, blocks: list[int], now_s: float) -> None:
        self._blocks.release(blocks)
        self._changed(now_s)

    def _changed(self, now_s: float) -> None:
        """Something came between two tellings: the run ends with the step in progress, an idle engine starts."""
        self._interrupt(now_s)
        self._kick(now_s)

    # Runs of steps.

    def _start_run(self, now_s: float, kv_tokens_read: int) -> bool:
        """Work out the steps up to the first that changes more than counts; False if that is the next one."""
        batch, size = self._scheduler.batch, self.settings.block_tokens
        steps = size
        for live in batch:
            if live.output == 0:  # all but one token of its prompt was cached: it decodes its first token
                return False
            to_end, to_full_block = live.planned - live.output, size - live.computed % size
            if to_end < steps:
                steps = to_end
            if to_full_block < steps:
                steps = to_full_block
        if steps == 1:
            return False
        self._ends_s = self._times.decode_ends_s(now_s, steps, decoding=len(batch), kv_tokens_read=kv_tokens_read)
        self.due_s = self._ends_s[-1]
        return True

    def _interrupt(self, now_s: float) -> None:
        """Make the step in progress at `now_s` the last of its run. One that ends at `now_s` is still in progress."""
        ends_s = self._ends_s
        if ends_s:
            ended = bisect_left(ends_s, now_s)
            self.due_s = ends_s[ended]
            self._times.give_back(len(ends_s) - ended - 1)
            self._pass_steps(ended)
            self._ends_s = []

    def _pass_steps(self, steps: int) -> None:
        """Count `steps` steps of the run, never its last: one more token for each request in each."""
        if not steps:
            return
        del self._ends_s[:steps]
        batch = self._scheduler.batch
        for live in batch:
            live.computed += steps
            live.known += steps
            live.output += steps
        self.counters.generation += steps * len(batch)

    # Steps.

    def _kick(self, now_s: float) -> None:
        """Start a step at `now_s` unless one is under way: after all that is told at this same time."""
        scheduler = self._scheduler
        if self._fetches is not None and self._fetches.hold_gpu:
            return
        if not self._in_step and (scheduler.waiting or scheduler.running) and now_s < self.due_s:
            self.due_s = now_s

    def _begin_step(self, now_s: float) -> None:
        decodes = self._scheduler.schedule(now_s)
        batch = self._scheduler.batch
        self.due_s = inf
        self._in_step = bool(batch)
        if not batch:
            return
        kv_read = 0
        for live in batch[:decodes]:
            kv_read += live.computed
        quiet = self._runs and self._scheduler.steady and not self._blocks.has_news  # told when this step ends
        if quiet and self._start_run(now_s, kv_read):
            return
        tokens = emitting = decodes
        pairs = float(kv_read)
        for live in batch[decodes:]:
            new = live.step_tokens
            tokens += new
            pairs += new * live.computed + 0.5 * new * new
            emitting += live.computed + new == live.known
        self.due_s = now_s + self._times.step_s(tokens=tokens, pairs=pairs, kv_tokens_read=kv_read, emitting=emitting)

    def _end_step(self, now_s: float) -> list[Output]:
        if self._ends_s:
            self._pass_steps(len(self._ends_s) - 1)
            self._ends_s = []
        outputs: list[Output] = []
        size, only_ends, emitted = self.settings.block_tokens, self._only_ends, 0
        self._in_step = False
        for live in self._scheduler.batch:
            if live.phase is not Phase.RUNNING:  # aborted while the step ran
                continue
            live.computed = computed = live.computed + live.step_tokens
            if live.output == 0:
                self.counters.computed += live.step_tokens
            if computed >= (live.registered + 1) * size and live.fetch is None:
                self._blocks.register(live, now_s)
            if computed == live.known:
                emitted += 1
                live.known += 1
                live.output += 1
                if not only_ends or live.output == 1 or live.output == live.planned:
                    outputs.append(self._emit(live, now_s))
        self.counters.generation += emitted
        self._blocks.end_batch(now_s)
        return outputs

    def _emit(self, live: LiveRequest, now_s: float) -> Output:
        """The token just made, and what follows from its being the first or the last."""
        index = live.output - 1
        if index == 0:
            self.counters.prompt += live.prompt_tokens
            self.counters.saw_first_token(now_s - live.arrival_s)
        reason = None
        if live.output == live.planned:
            reason = live.finish_reason
            self._finish(live, reason, now_s)
        token_id = live.content.output_token(index)
        return Output(live.request_id, now_s, index, token_id, reason, live.cached_tokens)

    def _finish(self, live: LiveRequest, reason: str, now_s: float) -> None:
        live.phase = Phase.OVER
        self._scheduler.running.remove(live)
        del self._live[live.request_id]
        if live.keep_as is not None:
            self.kept.keep(live.keep_as, live.blocks, live.computed, now_s)
            live.blocks = []
        else:
            self._blocks.let_go(live)
        self.counters.finished[reason] += 1
