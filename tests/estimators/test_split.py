"""The best split against trying every number of blocks, on prompts of tokens and pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.first_token import Rest
from estimators.split import Split, best_prefix, best_two_ends

TOKEN_S, BLOCK = 1e-4, 16


def compute_s(from_token: float, to_token: float, pair_s: float) -> float:
    return TOKEN_S * (to_token - from_token) + pair_s * (to_token**2 - from_token**2) / 2


class Case:
    """A prompt: tokens in HBM, blocks that can be fetched, tokens that are new; and its links."""

    def __init__(self, here: int, blocks: int, new: int, pair_s: float, queue_s: float, times_s: tuple[float, float]):
        self.here, self.blocks, self.new, self.pair_s, self.queue_s = here, blocks, new, pair_s, queue_s
        self.first_byte_s, self.fetch_s = times_s
        self.fetched = here + blocks * BLOCK
        self.end = self.fetched + new

    @property
    def rest(self) -> Rest:
        bend_s = self.pair_s * (self.blocks * BLOCK) ** 2 / 2
        return Rest(self.work_s(self.fetched, self.end), self.work_s(self.here, self.end), bend_s)

    def work_s(self, from_token: float, to_token: float) -> float:
        return compute_s(from_token, to_token, self.pair_s)

    def ready_s(self, blocks: int) -> float:
        return self.first_byte_s + (self.fetch_s - self.first_byte_s) * blocks / self.blocks if blocks else 0.0

    def prefix_s(self, blocks: int) -> float:
        start_s = max(self.queue_s, self.ready_s(blocks))
        return start_s + self.work_s(self.here + blocks * BLOCK, self.end)

    def two_ends_s(self, blocks: int) -> float:
        meet = self.here + (self.blocks - blocks) * BLOCK
        met_s = max(self.queue_s + self.work_s(self.here, meet), self.ready_s(blocks))
        return met_s + self.work_s(self.fetched, self.end)

    def arguments(self) -> dict[str, float]:
        return {
            "queue_s": self.queue_s,
            "fetch_s": self.fetch_s,
            "first_byte_s": self.first_byte_s,
            "blocks": self.blocks,
        }


cases = st.builds(
    Case,
    here=st.integers(0, 4000),
    blocks=st.integers(1, 300),
    new=st.integers(1, 3000),
    pair_s=st.sampled_from([0.0, 5e-9, 1e-7]),
    queue_s=st.floats(0.0, 2.0),
    times_s=st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 3.0)).map(lambda t: (t[0], t[0] + t[1])),
)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_no_prefix_is_better_than_the_one_found(case: Case) -> None:
    every_s = [case.prefix_s(blocks) for blocks in range(case.blocks + 1)]
    found = best_prefix(**case.arguments(), rest=case.rest)
    assert float(found.first_token_s) == pytest.approx(min(every_s), rel=1e-9)
    assert every_s[int(found.blocks)] == pytest.approx(min(every_s), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_no_meeting_point_is_better_than_the_one_found(case: Case) -> None:
    every_s = [case.two_ends_s(blocks) for blocks in range(case.blocks + 1)]
    found = best_two_ends(**case.arguments(), rest=case.rest)
    assert float(found.first_token_s) == pytest.approx(min(every_s), rel=1e-9)
    assert every_s[int(found.blocks)] == pytest.approx(min(every_s), rel=1e-9)


def split(case: Case) -> Split:
    return best_prefix(**case.arguments(), rest=case.rest)


def test_a_long_queue_hides_the_whole_fetch() -> None:
    assert int(split(Case(0, 200, 500, 5e-9, queue_s=9.0, times_s=(0.01, 2.0))).blocks) == 200


def test_a_short_queue_hides_a_part_and_a_slow_link_makes_it_worth_no_more() -> None:
    """1 s of queue, 4 s of fetch, 0.3 s of compute: a quarter comes for nothing, the rest is computed sooner."""
    assert int(split(Case(0, 200, 500, 5e-9, queue_s=1.0, times_s=(0.0, 4.0))).blocks) == 50


def test_nothing_is_fetched_over_a_link_slower_than_the_card() -> None:
    assert int(split(Case(0, 200, 500, 5e-9, queue_s=0.0, times_s=(0.01, 4.0))).blocks) == 0


def test_without_blocks_there_is_nothing_to_split() -> None:
    rest = Rest(0.2, 0.2)
    for best in (best_prefix, best_two_ends):
        found = best(queue_s=0.3, fetch_s=0.0, first_byte_s=0.0, rest=rest, blocks=0)
        assert int(found.blocks) == 0
        assert float(found.first_token_s) == pytest.approx(0.5)


@pytest.mark.parametrize("best", [best_prefix, best_two_ends])
def test_a_fleet_is_split_row_by_row(best: object) -> None:
    rng = np.random.default_rng(4)
    drawn = [
        Case(0, int(rng.integers(1, 200)), 400, 5e-9, float(rng.uniform(0, 1)), (0.01, float(rng.uniform(0.1, 2))))
        for _ in range(20)
    ]
    assert callable(best)
    columns = {name: np.array([case.arguments()[name] for case in drawn]) for name in drawn[0].arguments()}
    rests = [case.rest for case in drawn]
    rest = Rest(
        np.array([float(one.all_reused_s) for one in rests]),
        np.array([float(one.none_reused_s or 0.0) for one in rests]),
        np.array([float(one.bend_s) for one in rests]),
    )
    together = best(**columns, rest=rest)
    alone = [best(**case.arguments(), rest=case.rest) for case in drawn]
    assert together.blocks.tolist() == [int(one.blocks) for one in alone]
    assert together.first_token_s == pytest.approx([float(one.first_token_s) for one in alone])
