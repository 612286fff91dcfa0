"""What an engine offers to a driver that binds late: prompt tokens declared present, and a word between two steps."""

from __future__ import annotations

import pytest

from sim_backends.engine import Engine
from sim_backends.requests import EngineRequest, Output
from tests.sim_backends.builders import a_request, a_world, an_engine, first_tokens, run_out


def cached_and_first_s(engine: Engine, request: EngineRequest, at_s: float = 0.0) -> tuple[int, float]:
    engine.submit(request, at_s)
    first = next(output for output in run_out(engine) if output.request_id == request.request_id)
    return first.cached_tokens, first.at_s - at_s


def test_given_tokens_are_not_computed_and_cost_what_a_hit_would() -> None:
    hit, told = an_engine(), an_engine()
    cached_and_first_s(hit, a_request(1024, output=1))
    found = cached_and_first_s(hit, a_request(1500, output=1), at_s=100.0)  # begins with the same ids
    given = cached_and_first_s(told, a_request(1500, output=1, given_tokens=1024))
    assert given[0] == found[0] == 1024
    assert given[1] == pytest.approx(found[1], rel=1e-9)
    assert told.counters.computed == 1500 - 1024


def test_more_in_the_cache_than_given_counts() -> None:
    engine = an_engine()
    cached_and_first_s(engine, a_request(1024, output=1))
    assert cached_and_first_s(engine, a_request(1500, output=1, given_tokens=512), at_s=100.0)[0] == 1024


def test_given_tokens_hold_their_blocks_and_can_be_found_afterwards() -> None:
    engine = an_engine(kv_blocks=100)
    assert cached_and_first_s(engine, a_request(1504, output=1, given_tokens=1024))[0] == 1024
    assert cached_and_first_s(engine, a_request(1504, output=1), at_s=100.0)[0] == 1488  # its last block is computed


def test_a_request_with_given_tokens_fetches_nothing() -> None:
    world = a_world("A100", "A100")
    world.submit(0, a_request(4096, output=1), 0.0)
    run_out(world)
    world.submit(1, a_request(4096, output=1, given_tokens=16), 100.0)
    assert [output.cached_tokens for output in run_out(world)] == [16]


@pytest.mark.parametrize("given", [-1, 64, 65])
def test_given_tokens_leave_at_least_one_to_compute(given: int) -> None:
    with pytest.raises(ValueError, match="given_tokens"):
        a_request(64, given_tokens=given)


def test_what_is_submitted_between_two_steps_is_in_the_next_one() -> None:
    """The first request goes on decoding; without the word between steps the second one would wait for a decode."""
    engine, told = an_engine(), an_engine()

    def submit_second(outputs: list[Output]) -> None:
        if outputs[0].index == 0 and outputs[0].request_id == "first":
            told.submit(a_request(list(range(50_000, 50_512)), output=1, request_id="second"), outputs[0].at_s)

    told.between_steps = submit_second
    for each in (engine, told):
        each.submit(a_request(512, output=100, request_id="first"), 0.0)
        each.advance(0.0)  # its step begins
    engine.submit(a_request(list(range(50_000, 50_512)), output=1, request_id="second"), 0.0)  # waits in the queue
    assert first_tokens(run_out(told))["second"] == pytest.approx(first_tokens(run_out(engine))["second"], rel=1e-9)
