from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.first_token import Discipline, Rest, service
from estimators.planning.preload import (
    buffer_bytes,
    layer_times,
    layers_over,
    layers_to_preload,
    tokens_that_hide,
    whole_then_compute_s,
)

LAYERS = st.integers(1, 80)
LAYER_S = st.floats(1e-5, 1e-1)


@given(layers=LAYERS, read=LAYER_S, compute=LAYER_S, share=st.floats(0, 1))
def test_a_pipeline_ends_with_its_slower_side(layers: int, read: float, compute: float, share: float) -> None:
    """The closed form: the last of the layers still to be read, then its own computation, or computing throughout."""
    preloaded = round(share * layers)
    times = layer_times(layers=layers, read_layer_s=read, compute_layer_s=compute, preloaded=preloaded)
    to_read = layers - preloaded
    expected = layers * compute
    if to_read:
        expected = max(expected, to_read * read + compute, read + to_read * compute)
    assert times.total_s == pytest.approx(expected)


@given(layers=LAYERS, read=LAYER_S, compute=LAYER_S)
def test_the_online_estimate_of_a_layered_fetch_agrees(layers: int, read: float, compute: float) -> None:
    served = service(
        Discipline.LAYERWISE,
        queue_s=0.0,
        fetch_s=layers * read,
        first_byte_s=0.0,
        rest=Rest(layers * compute),
        layers=layers,
    )
    times = layer_times(layers=layers, read_layer_s=read, compute_layer_s=compute)
    assert times.total_s == pytest.approx(float(served.first_token_s))


def test_no_layer_is_computed_before_it_is_there_or_before_the_one_below() -> None:
    times = layer_times(layers=12, read_layer_s=3e-3, compute_layer_s=2e-3, preloaded=4)
    assert np.all(times.compute_starts_s[1:] >= times.compute_ends_s[:-1] - 1e-12)
    assert np.all(times.compute_starts_s[4:] >= times.read_ends_s[4:] - 1e-12)
    assert np.all(np.isnan(times.read_starts_s[:4]))
    assert times.read_starts_s[4] == 0.0


@given(layers=LAYERS, read=LAYER_S, compute=LAYER_S)
def test_overlap_is_never_slower_than_reading_first_and_never_faster_than_either(
    layers: int, read: float, compute: float
) -> None:
    total_s = layer_times(layers=layers, read_layer_s=read, compute_layer_s=compute).total_s
    assert total_s <= whole_then_compute_s(layers=layers, read_layer_s=read, compute_layer_s=compute) * (1 + 1e-9)
    assert total_s >= max(layers * read, layers * compute) * (1 - 1e-9)


@given(layers=LAYERS, read=LAYER_S, compute=LAYER_S)
def test_the_layers_to_preload_are_the_buffer_or_one_more(layers: int, read: float, compute: float) -> None:
    layer_bytes = 1e6
    size = buffer_bytes(bytes_per_s=layer_bytes / read, read_s=layers * read, compute_s=layers * compute)
    assert size == pytest.approx(layer_bytes * max(0.0, layers * (1 - compute / read)), abs=1.0)
    by_bytes = ceil(size / layer_bytes - 1e-6)
    needed = layers_to_preload(layers=layers, read_layer_s=read, compute_layer_s=compute)
    assert by_bytes <= needed <= by_bytes + 1
    if layers > 1 and needed:
        short = layer_times(layers=layers, read_layer_s=read, compute_layer_s=compute, preloaded=needed - 1)
        assert short.waited_s > 0


def test_bytes_over_whole_layers_are_rounded_up() -> None:
    assert layers_over(437e6, layer_bytes=32 * 2**20) == 14
    assert layers_over(0.0, layer_bytes=1.0) == 0
    assert layers_over(10.0, layer_bytes=5.0) == 2


@given(read_s=st.floats(0.01, 50.0))
def test_the_tokens_that_hide_a_read_are_the_first_that_do(read_s: float) -> None:
    def compute_s(tokens: int) -> float:
        return 1e-3 * tokens + 1e-7 * tokens**2

    tokens = tokens_that_hide(read_s, compute_s)
    assert compute_s(tokens) >= read_s
    assert tokens == 1 or compute_s(tokens - 1) < read_s


def test_a_read_that_nothing_hides_is_said_so() -> None:
    with pytest.raises(ValueError, match="longer than computing 100 tokens"):
        tokens_that_hide(1.0, lambda tokens: 1e-3 * tokens, most=100)


def test_more_layers_than_there_are_cannot_be_there_before() -> None:
    with pytest.raises(ValueError, match="preloaded"):
        layer_times(layers=3, read_layer_s=1.0, compute_layer_s=1.0, preloaded=4)
