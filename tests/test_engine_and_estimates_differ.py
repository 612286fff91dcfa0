"""What must be true between packages that may not import each other: the engine is no copy of the estimate."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from estimators.roofline import rates_of
from router.fleet import Fleet
from sim_backends import fleet as simulated
from sim_backends.requests import EngineRequest, Output
from sim_backends.world import World, build

DEMO = Path(__file__).parents[1] / "loadtest" / "demo" / "fleet.yaml"
OURS = msgspec.structs.replace(msgspec.yaml.decode(DEMO.read_bytes(), type=Fleet), speed=1.0)
THEIRS = msgspec.structs.replace(simulated.read(DEMO), speed=1.0, engine=simulated.Engine(jitter=0.0))


def a_prompt(tokens: int = 8192) -> list[int]:
    return [(7919 * i) % 100_000 for i in range(tokens)]


def played(output_tokens: int, until_s: float) -> tuple[World, list[Output]]:
    world = build(THEIRS, seed=3, record_events=True)
    request = EngineRequest(request_id="r", prompt=a_prompt(), max_tokens=400, output_tokens=output_tokens)
    world.submit(0, request, 0.0)
    return world, world.advance(until_s)


@pytest.mark.parametrize(("row", "card"), [(0, "A100"), (2, "H20")])
def test_the_routers_roofline_is_at_least_15_percent_off_the_engine(row: int, card: str) -> None:
    assert OURS.model is not None
    prior_s = rates_of(OURS.model, OURS.card(card)).prefill_s(new_tokens=8192, cached_tokens=0)
    world = build(THEIRS, seed=3)
    world.submit(row, EngineRequest(request_id="r", prompt=a_prompt(), max_tokens=1), 0.0)
    (output,) = world.advance(1e3)
    assert output.at_s > 1.15 * prior_s


def test_before_its_end_nothing_an_engine_shows_depends_on_how_long_an_answer_will_be() -> None:
    (short, said_short), (long, said_long) = played(100, 2.0), played(300, 2.0)
    assert 1 < len(said_short) < 100
    assert said_short == said_long
    assert short.engines[0].counters == long.engines[0].counters
    assert short.engines[0].take_event_batches() == long.engines[0].take_event_batches()
    assert (short.engines[0].running, short.next_due_s()) == (long.engines[0].running, long.next_due_s())
