from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.by_cache.remembered import Remembered

CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=20)


def chain(of: tuple[int, ...]) -> list[int]:
    """Hashes over all before: equal numbers name equal prefixes."""
    return [hash(of[: length + 1]) for length in range(len(of))]


def test_what_was_sent_is_matched_as_far_as_it_begins_alike() -> None:
    sent = Remembered(100)
    sent.add(chain((1, 2, 3)))
    assert [sent.matched(chain(of)) for of in ((1, 2, 3, 4), (1, 2, 9), (2,), ())] == [3, 2, 0, 0]


@given(CHAINS, st.integers(1, 12))
def test_it_never_holds_more_than_it_may_nor_a_block_without_those_before_it(
    chains: list[tuple[int, ...]], most: int
) -> None:
    sent = Remembered(most)
    for of in chains:
        sent.add(chain(of))
        assert len(sent) <= most
        matched = sent.matched(chain(of))
        assert matched == min(len(of), most)  # the newest is there, its end first to go
    for of in chains:
        known = [block in sent._uses for block in chain(of)]
        assert known == sorted(known, reverse=True)


@given(CHAINS, st.integers(1, 12))
def test_uses_add_up_whatever_was_evicted_or_forgotten(chains: list[tuple[int, ...]], most: int) -> None:
    sent = Remembered(most)
    for of in chains:
        sent.add(chain(of))
    for of in chains[::2]:
        sent.forget_use(chain(of))
    assert sent.total_uses == sum(sent._uses.values()) >= 0
    assert sent.uses_of_oldest(len(sent)) == sent.total_uses


def test_the_least_recently_used_are_the_oldest() -> None:
    sent = Remembered(100)
    sent.add([1, 2])
    sent.add([7])
    sent.add([7])
    sent.add([1])
    assert [sent.uses_of_oldest(count) for count in (1, 2, 3)] == [1, 3, 5]


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="most_blocks"):
        Remembered(0)
