from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.by_load.uniform import Uniform
from policies.by_score.active_blocks import ActiveBlocks, blocks_of
from policies.watcher import Placed
from tests.builders import a_request
from tests.policies.desk import Desk, rng, some_fleet

PREFIXES = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=5), min_size=1, max_size=12)


def chain(of: list[int]) -> list[int]:
    return [hash(tuple(of[: length + 1])) for length in range(len(of))]


def test_blocks_that_prompts_share_are_counted_once() -> None:
    desk, active = Desk(Uniform(rng()), some_fleet(2)), ActiveBlocks()
    one = a_request(prompt_tokens=50, chain=[1, 2, 3])  # 3 blocks and a part of one
    active.add(desk.place(0, one))
    assert active.with_request(0, one) == 3 + 1 + 1
    assert active.with_request(0, a_request(prompt_tokens=50, chain=[1, 2, 9])) == 4 + 2
    assert active.with_request(1, one) == 4


def test_an_end_takes_back_what_no_other_request_has() -> None:
    desk, active = Desk(Uniform(rng()), some_fleet(1)), ActiveBlocks()
    first = desk.place(0, a_request(prompt_tokens=50, chain=[1, 2, 3]))
    second = desk.place(0, a_request(prompt_tokens=50, chain=[1, 2, 9]))
    nothing = a_request(prompt_tokens=0)
    for one in (first, second):
        active.add(one)
    assert active.with_request(0, nothing) == 6
    active.remove(first)
    assert active.with_request(0, nothing) == 4
    active.remove(second)
    assert active.with_request(0, nothing) == 0


def test_an_end_whose_beginning_was_never_told_changes_nothing() -> None:
    desk, active = Desk(Uniform(rng()), some_fleet(1)), ActiveBlocks()
    active.remove(desk.place(0, a_request(chain=[1])))
    assert active.with_request(0, a_request(prompt_tokens=0)) == 0


@given(PREFIXES)
def test_the_count_is_that_of_the_union_of_all_prompts(prompts: list[list[int]]) -> None:
    """Against a set of all blocks, as requests come and go."""
    desk, active = Desk(Uniform(rng()), some_fleet(1)), ActiveBlocks()
    sent: list[Placed] = []
    for number, of in enumerate(prompts):
        placed = desk.place(0, a_request(prompt_tokens=16 * len(of) + 1, chain=chain(of)))
        active.add(placed)
        sent.append(placed)
        if number % 3 == 2:
            active.remove(sent.pop(0))
        shared = {block for one in sent for block in one.request.chain}
        own = sum(blocks_of(one.request) - len(one.request.chain) for one in sent)
        assert active.with_request(0, a_request(prompt_tokens=0)) == len(shared) + own
