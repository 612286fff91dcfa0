"""Publishers behind streams that lose, repeat and restart, against what their engines really hold."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.tiers import Tier
from router.blocks import in_tables, ledger
from router.directory import Directory
from router.identity import chain
from router.signals.sequence import State
from router.signals.stream import Stream
from router.signals.wire import Batch, Cleared, Event, Removed, Stored
from tests.router.signals.events import BLOCK, MODEL, chain_of

ROWS = 3
ONE_COPY = (False, True, False)  # the second is an engine with one logical copy per tier
FAMILIES, DEPTH, SHARED = 3, 6, 2  # prompts of six blocks that share their first two

Step = tuple[str, int, int, int, int, bool]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "store", "store", "remove", "remove", "offload", "drop host copy", "clear", "restart", "replay"]
        ),
        st.integers(0, ROWS - 1),
        st.integers(0, FAMILIES - 1),
        st.integers(0, DEPTH - 1),
        st.integers(1, DEPTH),
        st.integers(0, 9).map(bool),  # whether the batch is delivered
    ),
    max_size=50,
)


@pytest.fixture(
    params=[(0, 1), (0, 10**9), (16, 3), (1 << 16, 10**9)],
    ids=["tables, all together", "tables, one by one", "tables soon, mixed", "dictionaries"],
    autouse=True,
)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done one by one and what together, in which form: all ways must give the same."""
    few, many = request.param
    monkeypatch.setattr(ledger, "_FEW", few)
    monkeypatch.setattr(in_tables, "_MANY", many)


def family_of(family: int, block: int) -> int:
    return 0 if block < SHARED else family


def key_of(family: int, block: int) -> int:
    return 1000 + family_of(family, block) * 100 + block


def tokens_of(family: int, block: int) -> list[int]:
    return [family_of(family, block) * 1000 + block * BLOCK + i for i in range(BLOCK)]


CHAINS = [chain_of([t for block in range(DEPTH) for t in tokens_of(family, block)]) for family in range(FAMILIES)]
BLOCK_OF = {key_of(f, block): CHAINS[f][block] for f in range(FAMILIES) for block in range(DEPTH)}
Held = dict[Tier, Counter[int]]


class Engine:
    """One replica as it is: copies by engine hash and tier; and the batches its present process published."""

    def __init__(self, *, one_copy: bool) -> None:
        self.one_copy = one_copy
        self.held: Held = {tier: Counter() for tier in (Tier.HBM, Tier.HOST)}
        self.seen: set[int] = set()  # hashes stored since the cache was last empty
        self.log: list[Batch] = []

    def restart(self) -> None:
        self._empty()
        self.log = []

    def _empty(self) -> None:
        for copies in self.held.values():
            copies.clear()
        self.seen.clear()

    def do(self, kind: str, family: int, block: int, count: int) -> Event | None:
        """The event this causes, as an engine would send it; None when an engine would not do it."""
        key = key_of(family, block)
        if kind == "clear":
            self._empty()
            return Cleared()
        if kind == "store":
            return self._store(family, range(block, min(DEPTH, block + count)))
        tier = Tier.HBM if kind == "remove" else Tier.HOST
        if kind == "offload":
            if key not in self.seen:
                return None
            self._add(tier, [key])
            return Stored(hashes=[key], parent=None, tokens=array("I"), block_tokens=0, tier=tier)
        if not self.held[tier][key]:
            return None
        self.held[tier][key] -= 1
        return Removed(hashes=[key], tier=tier)

    def _store(self, family: int, blocks: range) -> Event | None:
        parent = key_of(family, blocks[0] - 1) if blocks[0] else None
        if parent is not None and not self.held[Tier.HBM][parent]:
            return None
        keys = [key_of(family, block) for block in blocks]
        self._add(Tier.HBM, keys)
        self.seen.update(keys)
        tokens = array("I", [token for block in blocks for token in tokens_of(family, block)])
        return Stored(hashes=keys, parent=parent, tokens=tokens, block_tokens=BLOCK, tier=Tier.HBM)

    def _add(self, tier: Tier, keys: list[int]) -> None:
        for key in keys:
            self.held[tier][key] = 1 if self.one_copy else self.held[tier][key] + 1


class Fleet:
    """Engines, streams and the directory under test. `told[row]` is the engine when its last batch was delivered."""

    def __init__(self, *, put: bool, at_once: int = 1000) -> None:
        self.directory = Directory(BLOCK, ROWS, at_once=at_once)
        self.engines = [Engine(one_copy=one_copy) for one_copy in ONE_COPY]
        self.told: list[Held] = [{Tier.HBM: Counter(), Tier.HOST: Counter()} for _ in range(ROWS)]
        self._now_s = 0.0  # of the publishers: a batch of a new process is younger
        for row, one_copy in enumerate(ONE_COPY):
            self.directory.add_source(row, MODEL, one_copy=one_copy)
        self.streams = [self._stream(row, put=put) for row in range(ROWS)]

    def _stream(self, row: int, *, put: bool) -> Stream:
        take: Callable[[int, Batch, float], object] = self.directory.put if put else self.directory.apply

        def apply(batch: Batch) -> None:
            take(row, batch, 1.0)

        return Stream(f"row {row}", apply, partial(self.directory.clear, row), first_seq=0, clock=lambda: 1.0)

    def step(self, kind: str, row: int, family: int, block: int, count: int, delivered: bool) -> None:
        engine, stream = self.engines[row], self.streams[row]
        if kind == "replay":
            stream.forget()
            for seq, batch in enumerate(engine.log):
                stream.take(seq, batch)
            self._delivered(row)
            return
        if kind == "restart":
            engine.restart()
            kind, family, block, count, delivered = "store", family, 0, count, True
        event = engine.do(kind, family, block, count)
        if event is None:
            return
        self._now_s += 1.0
        engine.log.append(Batch(ts_s=self._now_s, events=[event]))
        if delivered:
            stream.heard(len(engine.log) - 1, engine.log[-1])
            self._delivered(row)

    def _delivered(self, row: int) -> None:
        self.told[row] = {tier: Counter(copies) for tier, copies in self.engines[row].held.items()}

    def check(self) -> None:
        for row in range(ROWS):
            believed = {
                tier: {block for block in BLOCK_OF.values() if row in self.directory.holders(block).get(tier, ())}
                for tier in (Tier.HBM, Tier.HOST)
            }
            for tier, copies in self.told[row].items():
                truth = {BLOCK_OF[key] for key, count in copies.items() if count > 0}
                if self.streams[row].sequence.state is State.DEGRADED:
                    assert believed[tier] <= truth
                else:
                    assert believed[tier] == truth
            for hashes in CHAINS:
                match = self.directory.match(hashes)
                anywhere = believed[Tier.HBM] | believed[Tier.HOST]
                for blocks, counts in (
                    (believed[Tier.HBM], match.hbm_blocks),
                    (believed[Tier.HOST], match.host_blocks),
                    (anywhere, match.host_reach),
                    (anywhere, match.disk_reach),
                ):
                    missing = [block not in blocks for block in hashes]
                    assert counts[row] == (missing.index(True) if True in missing else DEPTH)


@settings(max_examples=50, deadline=None)
@given(STEPS, st.booleans(), st.integers(1, 12))
def test_the_directory_is_what_the_engines_hold_for_every_source_that_is_not_degraded(
    steps: list[Step], put: bool, ask_every: int
) -> None:
    """Questions settle what was put off, so they come only now and then."""
    fleet = Fleet(put=put)
    for number, step in enumerate(steps):
        fleet.step(*step)
        if number % ask_every == 0:
            fleet.check()
    fleet.check()


@settings(max_examples=20, deadline=None)
@given(STEPS, st.booleans(), st.integers(1, 3), st.integers(1, 9))
def test_what_is_forgotten_in_slices_is_believed_no_more_from_the_start(
    steps: list[Step], put: bool, at_once: int, sweep_every: int
) -> None:
    fleet, other = Fleet(put=put, at_once=at_once), Fleet(put=put)
    for number, step in enumerate(steps):
        fleet.step(*step)
        other.step(*step)
        if number % sweep_every == 0:
            fleet.directory.sweep()
        if number % 8 == 0:
            fleet.check()
    fleet.check()
    while fleet.directory.sweep():
        pass
    fleet.check()
    ours, theirs = fleet.directory.stats(), other.directory.stats()
    assert (ours.blocks, ours.engine_hashes, ours.totals) == (theirs.blocks, theirs.engine_hashes, theirs.totals)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_after_a_replay_every_source_is_live_and_equal_again(steps: list[Step]) -> None:
    fleet = Fleet(put=True)
    for step in steps:
        fleet.step(*step)
    for row in range(ROWS):
        fleet.step("replay", row, 0, 0, 1, True)
        assert fleet.streams[row].sequence.state in (State.LIVE, State.NEVER_CONNECTED)
    fleet.check()


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_what_is_put_off_counts_as_what_is_done_at_once(steps: list[Step]) -> None:
    fleets = [Fleet(put=put) for put in (True, False)]
    for step in steps:
        for fleet in fleets:
            fleet.step(*step)
    ours, theirs = (fleet.directory.stats() for fleet in fleets)
    assert ours.totals == theirs.totals
    assert (ours.blocks, ours.engine_hashes) == (theirs.blocks, theirs.engine_hashes)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(1, 5)), max_size=12), st.integers(1, 40))
def test_an_index_at_its_cap_never_exceeds_it_and_still_answers_truly(
    stores: list[tuple[int, int, int]], cap: int
) -> None:
    directory = Directory(BLOCK, 2, cap=cap)
    told: list[set[int]] = [set(), set()]
    for row in (0, 1):
        directory.add_source(row, MODEL)
    for number, (row, family, blocks) in enumerate(stores):
        tokens = [family * 500 + token for token in range(blocks * BLOCK)]
        keys = [row * 10**6 + family * 100 + block for block in range(blocks)]
        event = Stored(hashes=keys, parent=None, tokens=array("I", tokens), block_tokens=BLOCK, tier=Tier.HBM)
        directory.put(row, Batch(events=[event]), float(number))
        told[row].update(chain_of(tokens))
        stats = directory.stats()
        assert stats.engine_hashes <= cap
        assert len(directory.blocks()) <= cap
        for asked in (0, 1):
            held = directory.match(chain_of(tokens)).hbm_blocks[asked]
            assert set(chain_of(tokens)[:held]) <= told[asked]
        assert directory.match(chain_of(tokens)).hbm_blocks[row] >= min(blocks, cap)


def test_a_chain_given_in_parts_is_the_chain_given_whole() -> None:
    whole = [token for block in range(DEPTH) for token in tokens_of(1, block)]
    assert chain(chain_of(whole[: 2 * BLOCK])[-1], whole[2 * BLOCK :], BLOCK) == CHAINS[1][2:]
