from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from estimators.first_token import Discipline, first_token_s, layerwise_s, overlapped_s, serial_s


def test_a_fetch_that_overlaps_the_queue_costs_90_ms_and_one_that_waits_150() -> None:
    assert float(overlapped_s(0.080, 0.060, 0.010)) == pytest.approx(0.090)
    assert float(serial_s(0.080, 0.060, 0.010)) == pytest.approx(0.150)


def test_layer_by_layer_reading_of_36_layers_takes_49_2_ms() -> None:
    """AI Infra textbook, section 9.5.2: 48.3 ms of reading beside 30.9 ms of computing, layer by layer."""
    read_s, compute_s, layers = 0.0483184, 0.0309, 36
    assert float(layerwise_s(0.0, read_s / layers, read_s, compute_s, layers=layers)) == pytest.approx(0.0492, abs=1e-4)


def stepped_layerwise_s(queue_s: float, fetch_s: float, compute_s: float, layers: int) -> float:
    """Independent route: walk the layers one by one; layer k can start when it is read and layer k - 1 is done."""
    done_s = queue_s
    for layer in range(1, layers + 1):
        done_s = max(done_s, fetch_s * layer / layers) + compute_s / layers
    return done_s


@pytest.mark.parametrize("queue_s", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("fetch_s", [0.01, 0.05, 0.4])
@pytest.mark.parametrize("compute_s", [0.004, 0.05, 0.3])
def test_layerwise_form_equals_walking_the_layers(queue_s: float, fetch_s: float, compute_s: float) -> None:
    layers = 36
    walked_s = stepped_layerwise_s(queue_s, fetch_s, compute_s, layers)
    form_s = float(layerwise_s(queue_s, fetch_s / layers, fetch_s, compute_s, layers=layers))
    assert form_s == pytest.approx(walked_s, rel=1e-9)


@pytest.mark.parametrize("discipline", list(Discipline))
def test_without_a_fetch_every_discipline_is_queue_plus_compute(discipline: Discipline) -> None:
    queue_s, compute_s = np.array([0.0, 0.3]), np.array([0.1, 0.2])
    first_s = first_token_s(
        discipline, queue_s=queue_s, fetch_s=np.zeros(2), fetch_start_s=0.01, compute_s=compute_s, layers=36
    )
    assert first_s == pytest.approx(queue_s + compute_s)


@pytest.mark.parametrize("discipline", list(Discipline))
def test_more_queue_fetch_or_compute_never_brings_the_first_token_earlier(discipline: Discipline) -> None:
    rng = np.random.default_rng(5)
    base = rng.uniform(0, 0.5, size=(3, 200))
    more = base + rng.uniform(0, 0.5, size=(3, 200))

    def first(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        queue_s, fetch_s, compute_s = times
        return first_token_s(
            discipline, queue_s=queue_s, fetch_s=fetch_s, fetch_start_s=0.0, compute_s=compute_s, layers=36
        )

    assert np.all(first(more) >= first(base) - 1e-12)


def test_overlapped_lies_between_compute_alone_and_serial() -> None:
    rng = np.random.default_rng(6)
    queue_s, fetch_s, compute_s = rng.uniform(0, 1, size=(3, 500))
    over_s = overlapped_s(queue_s, fetch_s, compute_s)
    assert np.all(over_s >= compute_s)
    assert np.all(over_s <= serial_s(queue_s, fetch_s, compute_s))
