from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.prefill_features import FEATURES, Beside, prefill_features, prior_coefficients

LINEAR_S, PAIR_S, WEIGHTS_S, CONTEXT_S, STEP_TOKENS = 9e-5, 4e-9, 9e-3, 9e-8, 2048


def beside(decodes: float = 0.0, context_tokens: float = 0.0) -> Beside:
    return Beside(
        decodes=decodes,
        linear_s=decodes * LINEAR_S,
        attention_s=context_tokens * PAIR_S,
        memory_s=WEIGHTS_S + context_tokens * CONTEXT_S,
        weights_s=WEIGHTS_S,
    )


def features(new_tokens: float, cached_tokens: float = 0.0, near: Beside | None = None) -> dict[str, float]:
    values = prefill_features(
        linear_s=new_tokens * LINEAR_S,
        attention_s=(new_tokens * cached_tokens + new_tokens**2 / 2) * PAIR_S,
        new_tokens=new_tokens,
        beside=near or beside(),
        step_tokens=STEP_TOKENS,
    )
    return dict(zip(FEATURES, values.tolist(), strict=True))


def step_by_step_s(new_tokens: int, near: Beside, step_tokens: int = STEP_TOKENS) -> float:
    """The roofline of each step on its own, as an engine would run them; attention left out."""
    room, total_s = step_tokens - int(near.decodes), 0.0
    for start in range(0, new_tokens, room):
        tokens = min(room, new_tokens - start)
        compute_s = float(tokens * LINEAR_S + near.linear_s + near.attention_s)
        total_s += max(compute_s, float(near.memory_s))
    return total_s


@given(new_tokens=st.integers(1, 30_000), decodes=st.integers(0, 200), mean_context=st.integers(0, 2000))
def test_the_prior_gives_the_sum_of_the_steps_rooflines(new_tokens: int, decodes: int, mean_context: int) -> None:
    """Full steps are bound by compute at these sizes, as the model has it."""
    near = beside(decodes, decodes * mean_context)
    assert float(near.memory_s) < STEP_TOKENS * LINEAR_S
    values = prefill_features(
        linear_s=new_tokens * LINEAR_S, attention_s=0.0, new_tokens=new_tokens, beside=near, step_tokens=STEP_TOKENS
    )
    assert float(values @ prior_coefficients()) == pytest.approx(step_by_step_s(new_tokens, near), rel=1e-9)


def test_an_idle_replica_needs_the_work_and_never_less_than_one_pass_over_the_weights() -> None:
    assert features(4096)["linear"] == pytest.approx(4096 * LINEAR_S)
    assert features(4096)["memory"] == 0.0
    tiny = features(10)
    assert tiny["linear"] + tiny["attention"] + tiny["memory"] == pytest.approx(WEIGHTS_S)


def test_running_decodes_take_room_so_that_a_prompt_of_one_step_needs_two() -> None:
    assert features(2048)["steps"] == pytest.approx(WEIGHTS_S)
    assert features(2048, near=beside(1, 100))["steps"] == pytest.approx(2 * WEIGHTS_S)


def test_the_context_of_decodes_costs_reading_in_a_small_step_and_only_arithmetic_in_a_full_one() -> None:
    many = beside(20, 200_000)
    full, small = features(2000, near=many), features(20, near=many)
    assert full["memory"] == 0.0
    assert full["attention"] - features(2000)["attention"] == pytest.approx(200_000 * PAIR_S)
    assert small["linear"] + small["attention"] + small["memory"] == pytest.approx(WEIGHTS_S + 200_000 * CONTEXT_S)


def test_more_decodes_than_a_step_holds_still_leave_one_token_of_it() -> None:
    assert features(3, near=beside(5000, 0))["steps"] == pytest.approx(3 * WEIGHTS_S)


def test_a_grid_of_candidates_gives_what_each_of_them_gives_alone() -> None:
    new = np.array([[1.0, 700.0, 5000.0], [2.0, 2048.0, 9000.0]])
    near = Beside(*(np.array([getattr(beside(d, 500 * d), name) for d in (0, 3, 40)]) for name in Beside.__slots__))
    together = prefill_features(
        linear_s=new * LINEAR_S,
        attention_s=new**2 / 2 * PAIR_S,
        new_tokens=new,
        beside=near,
        step_tokens=STEP_TOKENS,
    )
    assert together.shape == (len(FEATURES), 2, 3)
    for path, row in np.ndindex(2, 3):
        alone = features(float(new[path, row]), near=beside((0, 3, 40)[row], 500 * (0, 3, 40)[row]))
        assert together[:, path, row].tolist() == pytest.approx(list(alone.values()))
