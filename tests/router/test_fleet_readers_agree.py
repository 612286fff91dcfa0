"""Router and simulator read the fleet file each with a reader of its own; they must read the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from estimators.roofline import rates_of
from router.fleet import Fleet
from sim_backends import fleet as simulated

DEMO = Path(__file__).parents[2] / "loadtest" / "demo" / "fleet.yaml"


def test_both_readers_take_the_demo_fleet_alike() -> None:
    ours = msgspec.yaml.decode(DEMO.read_bytes(), type=Fleet)
    theirs = simulated.read(DEMO)
    assert ours.model is not None
    assert ours.store is not None
    assert theirs.store is not None
    assert ours.speed == theirs.speed
    assert ours.block_tokens == theirs.block_tokens
    assert ours.model.kv_bytes_per_token == theirs.model.kv_bytes_per_token
    assert ours.model.weights_bytes == theirs.model.weight_bytes
    assert ours.fetch.minimum_tokens == (theirs.fetch or simulated.Fetch()).minimum_tokens
    assert (ours.store.network, ours.store.host) == (theirs.store.network, theirs.store.host)
    for mine, other in zip(ours.replicas, theirs.replicas, strict=True):
        assert (mine.name, mine.card) == (other.name, other.card)
        assert mine.card is not None
        assert ours.cards[mine.card].peak_tflops == theirs.cards[other.card].peak_tflops


def test_a_decode_step_reads_the_same_bytes_in_both() -> None:
    """The weights of one step, from two independent counts of the same shape."""
    ours = msgspec.yaml.decode(DEMO.read_bytes(), type=Fleet)
    theirs = simulated.read(DEMO)
    assert ours.model is not None
    counted = theirs.model.value_bytes * (theirs.model.linear_parameters + theirs.model.head_parameters)
    assert ours.model.step_weights_bytes == counted
    card = ours.card("A100")
    assert rates_of(ours.model, card).weights_s == pytest.approx(counted / card.bytes_per_s)
