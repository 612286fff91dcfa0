from __future__ import annotations

from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.written_store import WrittenStore

CHAIN = list(range(1, 65))


def a_store(capacity_blocks: int = 1000, keep_s: float = 100.0) -> WrittenStore:
    return WrittenStore(capacity_blocks=capacity_blocks, keep_s=keep_s)


def test_what_was_written_through_is_held_and_nothing_else() -> None:
    store = a_store()
    store.written(CHAIN[:40], 1.0)
    found = store.held(CHAIN, 3.0)
    assert (found.blocks, found.age_s, found.approximate) == (40, 2.0, True)
    assert store.held(CHAIN[:7], 3.0).blocks == 7
    assert store.held(list(range(1001, 1065)), 3.0).blocks == 0
    assert isnan(store.held([], 3.0).age_s)


def test_a_belief_ends_with_its_time_and_a_read_renews_it() -> None:
    store = a_store(keep_s=10.0)
    store.written(CHAIN, 0.0)
    store.read(CHAIN, 16, 8.0)
    assert store.held(CHAIN, 10.0).blocks == 64
    assert store.held(CHAIN, 10.5).blocks == 16
    assert store.held(CHAIN, 18.5).blocks == 0


def test_blocks_that_stand_for_several_leave_room_for_fewer() -> None:
    store = a_store(capacity_blocks=64)
    store.written(CHAIN, 0.0, each=4)
    assert store.held(CHAIN, 1.0).blocks == 16
    store.written(list(range(1001, 1065)), 1.0)
    assert (len(store), store.held(CHAIN, 2.0).blocks) == (16, 0)


def test_beyond_its_capacity_the_end_of_the_oldest_prompt_goes_first() -> None:
    store = a_store(capacity_blocks=64)
    store.written(CHAIN[:40], 0.0)
    other = list(range(1001, 1031))
    store.written(other, 1.0)
    assert store.held(other, 1.0).blocks == 30
    assert store.held(CHAIN, 1.0).blocks == 34
    assert (len(store), store.evicted) == (64, 6)


def test_a_prompt_larger_than_the_store_leaves_its_beginning() -> None:
    store = a_store(capacity_blocks=10)
    store.written(CHAIN, 0.0)
    assert store.held(CHAIN, 0.0).blocks == 10


def test_a_block_that_was_not_there_ends_every_prompt_through_it_until_it_is_written_again() -> None:
    store = a_store()
    sibling = [*CHAIN[:32], *range(2001, 2033)]
    store.written(CHAIN, 0.0)
    store.written(sibling, 0.0)
    store.missed(CHAIN, 20)
    assert store.held(CHAIN, 1.0).blocks == 20
    assert store.held(sibling, 1.0).blocks == 20
    store.written(CHAIN[:25], 2.0)
    assert store.held(sibling, 2.0).blocks == 25
    store.written(sibling, 3.0)
    assert store.held(sibling, 3.0).blocks == 64


def test_a_miss_of_what_was_never_believed_changes_nothing() -> None:
    store = a_store()
    store.written(CHAIN[:8], 0.0)
    store.missed(CHAIN, 8)
    store.missed(CHAIN[:8], 8)
    assert store.held(CHAIN, 0.0).blocks == 8
    assert store.misses == 1


def test_a_restarted_store_holds_nothing() -> None:
    store = a_store()
    store.written(CHAIN, 0.0)
    store.clear()
    assert store.held(CHAIN, 0.0).blocks == 0


PROMPTS = ["abcdefg", "abcdxyz", "abqr", "zz", "abcdefghij"]
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "miss"]), st.sampled_from(PROMPTS), st.integers(0, 10)), max_size=25
)


@given(STEPS, st.integers(1, 14), st.integers(1, 30))
def test_halving_finds_what_walking_finds(steps: list[tuple[str, str, int]], capacity_blocks: int, keep_s: int) -> None:
    """Reference: prefixes as text in a list by last use, walked one by one from the start."""
    store, by_use = a_store(capacity_blocks, float(keep_s)), list[tuple[str, int]]()
    for now_s, (what, prompt, count) in enumerate(steps):
        chain = [hash(prompt[: end + 1]) for end in range(len(prompt))]
        prefixes = [prompt[: end + 1] for end in range(len(prompt))]
        if what == "miss":
            store.missed(chain, count)
            by_use = [(prefix, at_s) for prefix, at_s in by_use if prefix not in prefixes[count:]]
            continue
        used = prefixes if what == "write" else prefixes[:count]
        store.written(chain, now_s) if what == "write" else store.read(chain, count, now_s)
        kept = used[:capacity_blocks]
        by_use = [(prefix, at_s) for prefix, at_s in by_use if prefix not in kept]
        by_use = [*by_use, *((prefix, now_s) for prefix in reversed(kept))][-capacity_blocks:]
    now_s, known = len(steps), dict(by_use)
    for prompt in PROMPTS:
        walked = 0
        while walked < len(prompt) and now_s - known.get(prompt[: walked + 1], -(10**6)) <= keep_s:
            walked += 1
        assert store.held([hash(prompt[: end + 1]) for end in range(len(prompt))], now_s).blocks == walked


@pytest.mark.parametrize("wrong", [{"capacity_blocks": 0}, {"keep_s": 0.0}, {"keep_s": float("nan")}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        WrittenStore(**{"capacity_blocks": 1, "keep_s": 1.0, **wrong})  # type: ignore[arg-type]
