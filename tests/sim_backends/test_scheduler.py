from __future__ import annotations

from sim_backends.alarms import Alarms
from sim_backends.block_hash import BlockHasher
from sim_backends.disciplines import DISCIPLINES
from sim_backends.engine_fetches import EngineFetches
from sim_backends.fetching import Fetcher
from sim_backends.intake import Intake
from sim_backends.requests import Counters, EngineSettings, LiveRequest
from sim_backends.scheduler import Scheduler
from sim_backends.sequence_blocks import SequenceBlocks
from tests.sim_backends.builders import a_block_request

SETTINGS = EngineSettings(name="e", vocab=1000, kv_blocks=20, token_budget=64, max_running=3)


class Bench:
    """A scheduler whose steps end at once."""

    def __init__(self, *, discipline: str | None = None) -> None:
        """`discipline` of a replica that has nowhere to fetch from; None for one that never looks."""
        self.counters = Counters()
        self.blocks = SequenceBlocks(SETTINGS, self.counters, fetcher=None, record_events=False)
        self.scheduler = Scheduler(SETTINGS, self.blocks, self.counters)
        if discipline is not None:
            fetcher = Fetcher(DISCIPLINES[discipline], Alarms(), block_tokens=16, bytes_per_token=1, layers=1)
            self.scheduler.fetches = EngineFetches(
                fetcher, self.blocks, self.counters, queue=self.scheduler.add_holder, changed=lambda _now_s: None
            )
        self._intake = Intake(SETTINGS, BlockHasher(block_tokens=16, vocab=1000))
        self._next_id = 0

    def add(self, tokens: int) -> LiveRequest:
        ids = range(self._next_id, self._next_id + tokens // 16)
        self._next_id = ids.stop
        live = self._intake.accept(a_block_request(list(ids), tokens, output=100, max_tokens=100), 0.0)
        self.scheduler.add(live)
        return live

    def step(self) -> dict[str, int]:
        """Tokens of each request in the next step."""
        self.scheduler.schedule(0.0)
        batch = self.scheduler.batch
        tokens = {live.request_id: live.step_tokens for live in batch}
        for live in batch:
            live.computed += live.step_tokens
            live.known += live.computed == live.known
        return tokens


def test_decodes_come_before_prefills_and_these_before_newcomers() -> None:
    bench = Bench()
    decoding, prefilling = bench.add(10), bench.add(100)
    bench.step()
    newcomer = bench.add(20)
    assert bench.step() == {decoding.request_id: 1, prefilling.request_id: 46, newcomer.request_id: 17}


def test_a_step_is_steady_when_all_that_runs_decodes() -> None:
    bench = Bench()
    bench.add(100)
    steady = []
    for _ in range(4):
        bench.step()
        steady.append(bench.scheduler.steady)
    assert steady == [False, False, True, True]


def test_a_queue_that_cannot_move_leaves_the_step_steady() -> None:
    bench = Bench()
    for _ in range(4):
        bench.add(10)
    bench.step()
    bench.step()
    assert (len(bench.scheduler.waiting), bench.scheduler.steady) == (1, True)


def test_a_head_that_may_find_something_to_fetch_later_leaves_no_step_steady() -> None:
    """What others write to the store is not seen here: the head has to be asked again in each step."""
    bench = Bench(discipline="serial")
    bench.add(200)
    for _ in range(5):
        bench.step()
    bench.add(150)  # does not fit beside the first
    bench.step()
    assert (len(bench.scheduler.waiting), bench.scheduler.steady) == (1, False)


def test_a_step_that_threw_a_request_out_is_not_steady() -> None:
    bench = Bench()
    old, young = bench.add(160), bench.add(158)
    for _ in range(12):
        bench.step()
        if bench.counters.preemptions:
            break
    assert (young.blocks, bench.scheduler.running, bench.scheduler.waiting) == ([], [old], [young])
    assert not bench.scheduler.steady
