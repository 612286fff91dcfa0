from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.moving import Switch, catch_up, copied_bytes, source_bytes, switch

BYTES = st.floats(1e6, 1e12)


@given(state=BYTES, growth=st.floats(0.0, 1e9), gain=st.floats(1e6, 1e11))
def test_a_copy_is_level_when_it_has_all_the_source_has(state: float, growth: float, gain: float) -> None:
    done = catch_up(state_bytes=state, growth_bytes_per_s=growth, copy_bytes_per_s=growth + gain)
    at_s = done.seconds
    assert (growth + gain) * at_s == pytest.approx(state + done.grown_bytes, rel=1e-6)
    whole = source_bytes(state_bytes=state, growth_bytes_per_s=growth, at_s=at_s)
    assert whole == pytest.approx(state + done.grown_bytes)
    before = copied_bytes(state_bytes=state, growth_bytes_per_s=growth, copy_bytes_per_s=growth + gain, at_s=0.5 * at_s)
    assert before < source_bytes(state_bytes=state, growth_bytes_per_s=growth, at_s=0.5 * at_s)
    after = copied_bytes(state_bytes=state, growth_bytes_per_s=growth, copy_bytes_per_s=growth + gain, at_s=2 * at_s)
    assert after == source_bytes(state_bytes=state, growth_bytes_per_s=growth, at_s=2 * at_s)


def test_rounds_of_copying_what_came_meanwhile_add_up_to_the_same() -> None:
    """The second route: copy all, then what came meanwhile, then what came during that, and so on."""
    left, seconds = 40e9, 0.0
    for _ in range(200):
        took_s = left / 6e9
        seconds += took_s
        left = took_s * 1.5e9
    done = catch_up(state_bytes=40e9, growth_bytes_per_s=1.5e9, copy_bytes_per_s=6e9)
    assert done.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("copy", [1.0, 0.5])
def test_a_copy_as_slow_as_the_growth_never_catches_up(copy: float) -> None:
    assert catch_up(state_bytes=1.0, growth_bytes_per_s=1.0, copy_bytes_per_s=copy).seconds == inf
    assert catch_up(state_bytes=0.0, growth_bytes_per_s=1.0, copy_bytes_per_s=copy).seconds == 0.0


@given(transfer=st.floats(0, 100), build=st.floats(0, 100), prepare=st.floats(0, 100), early=st.floats(0, 1))
def test_preparing_early_saves_time_and_no_more_than_the_shorter_side(
    transfer: float, build: float, prepare: float, early: float
) -> None:
    change = Switch(transfer, build, prepare)
    assert change.overlapped_s(0.0) == pytest.approx(change.serial_s)
    assert change.overlapped_s(1.0) == pytest.approx(max(transfer + build, prepare))
    assert change.overlapped_s(1.0) - 1e-9 <= change.overlapped_s(early) <= change.serial_s + 1e-9


def test_a_faster_link_can_save_no_more_than_the_transfer() -> None:
    def total_s(rate: float) -> float:
        return switch(
            network_bytes=16.4e9,
            network_bytes_per_s=rate,
            built_bytes=4.7e9,
            memory_bytes_per_s=1e12,
            prepare_s=9.0,
        ).serial_s

    assert total_s(6.25e9) == pytest.approx(11.6, abs=0.06)
    assert total_s(25e9) == pytest.approx(9.7, abs=0.06)
    assert total_s(1e18) == pytest.approx(9.0 + 4.7e9 / 1e12)
