"""Pipelines: the closed form against a schedule played step by step."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.pipelines import break_even_factor, pipelined_s, serial_s

stages = st.lists(st.floats(0.001, 10), min_size=1, max_size=5)
batches_of = st.integers(1, 12)


def played(stages_s: list[float], batches: int) -> float:
    """Each stage starts a micro-batch when the stage before has passed it on and its own last one is done."""
    free_s = [0.0] * len(stages_s)
    for _ in range(batches):
        ready_s = 0.0
        for stage, time_s in enumerate(stages_s):
            free_s[stage] = ready_s = max(ready_s, free_s[stage]) + time_s
    return free_s[-1]


@given(stages, batches_of)
def test_the_closed_form_is_the_schedule(stages_s: list[float], batches: int) -> None:
    assert pipelined_s(stages_s, batches=batches) == pytest.approx(played(stages_s, batches), rel=1e-9)


@given(stages, batches_of)
def test_a_pipeline_lies_between_its_busiest_stage_and_the_serial_order(stages_s: list[float], batches: int) -> None:
    piped_s = pipelined_s(stages_s, batches=batches)
    assert batches * max(stages_s) <= piped_s * (1 + 1e-12)
    assert piped_s <= serial_s(stages_s, batches=batches) * (1 + 1e-12)


def test_one_stage_or_one_batch_gains_nothing() -> None:
    assert pipelined_s([3.0], batches=4) == serial_s([3.0], batches=4) == 12.0
    assert pipelined_s([2.0, 3.0], batches=1) == serial_s([2.0, 3.0], batches=1) == 5.0


@given(stages, batches_of, st.data())
def test_at_the_break_even_factor_the_schedule_takes_the_serial_time(
    stages_s: list[float], batches: int, data: st.DataObject
) -> None:
    slowed = data.draw(st.sets(st.integers(0, len(stages_s) - 1), min_size=1))
    factor = break_even_factor(stages_s, slowed, batches=batches)
    assert factor >= 1 - 1e-9
    stretched = [time_s * (factor if at in slowed else 1.0) for at, time_s in enumerate(stages_s)]
    assert played(stretched, batches) == pytest.approx(serial_s(stages_s, batches=batches), rel=1e-9)


def test_the_textbooks_overlap_is_lost_at_half_slower_exchanges_or_threefold_experts() -> None:
    halves_s = [0.1678, 0.0781, 0.1678]
    assert break_even_factor(halves_s, (0, 2), batches=2) == pytest.approx(1.49, abs=0.005)
    assert break_even_factor(halves_s, (1,), batches=2) == pytest.approx(3.15, abs=0.01)


def test_stages_that_take_no_time_may_be_slowed_without_end() -> None:
    assert break_even_factor([0.0, 1.0], (0,), batches=3) == inf


@pytest.mark.parametrize(
    ("stages_s", "batches"), [([], 1), ([1.0], 0), ([-1.0], 1), ([float("nan")], 1), ([float("inf")], 1)]
)
def test_impossible_pipelines_are_refused(stages_s: list[float], batches: int) -> None:
    for question in (serial_s, pipelined_s):
        with pytest.raises(ValueError, match=r"stages_s|batches"):
            question(stages_s, batches=batches)


def test_a_stage_that_is_not_there_cannot_be_slowed() -> None:
    for slowed in ((), (2,), (-1,)):
        with pytest.raises(ValueError, match="no stage"):
            break_even_factor([1.0, 2.0], slowed, batches=2)
