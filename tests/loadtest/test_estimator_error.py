from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from estimators.estimates import Estimates, Estimator
from estimators.request import RequestFacts
from estimators.routes import Held
from estimators.view import FleetView
from loadtest.replay.estimator_error import WrongEstimator
from loadtest.replay.fleets import of_file
from router.assemble import assemble
from router.config import RouterConfig
from tests.builders import quiet

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
REQUEST = RequestFacts(request_id="r", model="m", prompt_tokens=4096, block_tokens=512)
HELD = Held(local_blocks=np.array([0, 2, 4, 0], dtype=np.int32), store_blocks=6)
CONTEXT = quiet(output_tokens=200.0, arrival_rps=1.0, mean_compute_s=0.5)


def an_estimator() -> tuple[Estimator, FleetView]:
    core = assemble(RouterConfig(), of_file(DEMO / "fleet.yaml").router, on_receipt=lambda _receipt: None)
    core.dispatcher.view.ready[:] = True
    return core.dispatcher._placer._estimator, core.dispatcher.view


def asked(share: float, seed: int = 1, times: int = 1) -> list[Estimates]:
    inner, view = an_estimator()
    wrong = WrongEstimator(inner, share=share, chance=np.random.default_rng(seed))
    return [wrong.estimate(REQUEST, HELD, view, CONTEXT, 0.0) for _ in range(times)]


def test_no_error_leaves_the_estimates_as_they_are() -> None:
    inner, view = an_estimator()
    right = inner.estimate(REQUEST, HELD, view, CONTEXT, 0.0)
    assert asked(0.0)[0].first_token_s.tolist() == right.first_token_s.tolist()


def test_each_replica_is_wrong_by_one_factor_for_all_its_times_and_paths() -> None:
    inner, view = an_estimator()
    right, wrong = inner.estimate(REQUEST, HELD, view, CONTEXT, 0.0), asked(0.3)[0]
    factors = wrong.first_token_s / right.first_token_s
    assert len(set(factors[0])) == 4
    for row in range(4):
        assert factors[:, row] == pytest.approx(factors[0, row])
        assert wrong.compute_s[:, row] == pytest.approx(right.compute_s[:, row] * factors[0, row])
        assert wrong.fetch_s[:, row] == pytest.approx(right.fetch_s[:, row] * factors[0, row])


def test_errors_have_mean_one_and_the_stated_spread() -> None:
    exact_s = asked(0.0)[0].compute_s[0]
    factors = np.array([one.compute_s[0] / exact_s for one in asked(0.2, times=4000)]).ravel()
    assert factors.mean() == pytest.approx(1.0, abs=0.01)  # 16,000 draws: two standard errors are 0.003
    assert factors.std() == pytest.approx(0.2, abs=0.01)


def test_the_same_seed_is_wrong_in_the_same_way() -> None:
    first, second, other = (asked(0.2, seed)[0].first_token_s.tolist() for seed in (1, 1, 2))
    assert first == second != other


def test_what_is_not_estimated_is_the_inner_ones() -> None:
    inner, _view = an_estimator()
    wrong = WrongEstimator(inner, share=0.2, chance=np.random.default_rng(0))
    assert wrong.routes is inner.routes
    assert wrong.step_tokens == inner.step_tokens


def test_a_negative_error_is_refused() -> None:
    inner, _view = an_estimator()
    with pytest.raises(ValueError, match="share"):
        WrongEstimator(inner, share=-0.1, chance=np.random.default_rng(0))
