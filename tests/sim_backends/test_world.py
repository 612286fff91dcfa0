from __future__ import annotations

from typing import Any

import pytest

from sim_backends.cache_events import Stored
from sim_backends.links import FairLink
from sim_backends.requests import Output
from sim_backends.world import World
from tests.sim_backends.builders import a_request, a_world, an_engine, first_tokens, prompt, run_out

BLOCK_BYTES = 16 * 144 * 1024
LONG = 8000  # tokens: 500 blocks, of which 499 may be reused
FETCH_BYTES = 499 * BLOCK_BYTES
NETWORK_S = 0.010 + FETCH_BYTES / 25e9
HOST_S = FETCH_BYTES / 25e9


def warmed(discipline: str = "overlapped", **sections: Any) -> World:
    """Two A100s; the store knows the long prompt because the second one has computed it."""
    fetch = {"by": "engine", "discipline": discipline, "minimum_tokens": 512}
    world = a_world("A100", "A100", fetch=fetch, **sections)
    world.submit(1, a_request(prompt(LONG), output=1), 0.0)
    run_out(world)
    return world


def compute_s(cached: int = 0) -> float:
    """Time to the first token of the long prompt on an idle replica with `cached` tokens in HBM."""
    world = a_world("A100", use_store=False)
    if cached:
        world.submit(0, a_request(prompt(cached), output=1), 0.0)
        run_out(world)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    return first_tokens(run_out(world))["x"] - 100.0


def test_an_idle_replica_answers_after_the_fetch_and_the_rest_of_the_compute() -> None:
    """T_first = max(Q, R) + C with Q = 0: R from the two links by hand, C as on a replica that has the prefix."""
    world = warmed()
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    outputs = run_out(world)
    expected_s = NETWORK_S + HOST_S + compute_s(cached=LONG)
    assert first_tokens(outputs)["x"] - 100.0 == pytest.approx(expected_s, rel=1e-9)
    assert outputs[-1].cached_tokens == 499 * 16


@pytest.mark.parametrize("queue_tokens", [500, 16000])
def test_overlapped_is_the_later_of_queue_and_fetch_plus_compute(queue_tokens: int) -> None:
    """The queue is one prompt ahead: shorter than the fetch, then much longer."""
    alone = a_world("A100", use_store=False)
    alone.submit(0, a_request(prompt(queue_tokens, start=50_000), output=1, request_id="q"), 100.0)
    queue_s = first_tokens(run_out(alone))["q"] - 100.0
    world = warmed()
    world.submit(0, a_request(prompt(queue_tokens, start=50_000), output=1, request_id="q"), 100.0)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    fetch_s = NETWORK_S + HOST_S
    assert (queue_s < fetch_s) == (queue_tokens == 500)
    got_s = first_tokens(run_out(world))["x"] - 100.0
    rest_s = compute_s(cached=LONG)
    # When the queue is longer, the 16 tokens left ride in its last step, which has budget to spare, or in the next.
    assert got_s == pytest.approx(max(queue_s, fetch_s) + rest_s, rel=1e-9, abs=rest_s * (queue_s > fetch_s))


def test_serial_adds_queue_fetch_and_compute() -> None:
    world = warmed("serial")
    # A prompt that fills every step it is in, so that the turn of the next one comes after it.
    world.submit(0, a_request(prompt(16384, start=50_000), output=1, request_id="q"), 100.0)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    firsts = first_tokens(run_out(world))
    expected_s = firsts["q"] - 100.0 + NETWORK_S + HOST_S + compute_s(cached=LONG)
    assert firsts["x"] - 100.0 == pytest.approx(expected_s, rel=1e-9)


def test_layerwise_starts_after_one_layer_and_never_ends_before_the_last_byte() -> None:
    """Half the prompt is in the store; its other half is computed while the layers come."""

    def first_s(discipline: str) -> float:
        world = a_world("A100", "A100", fetch={"by": "engine", "discipline": discipline, "minimum_tokens": 512})
        world.submit(1, a_request(prompt(4000), output=1), 0.0)
        run_out(world)
        world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
        return first_tokens(run_out(world))["x"] - 100.0

    bytes_ = 250 * BLOCK_BYTES
    last_byte_s = 0.010 + 2 * bytes_ / 25e9
    assert last_byte_s < first_s("layerwise") < first_s("overlapped") - 0.6 * last_byte_s


def test_a_layerwise_fetch_longer_than_the_compute_holds_the_last_token_back() -> None:
    slow = {"store": {"gb_s": 1, "start_ms": 10}, "pcie": {"gb_s": 25, "start_ms": 0}}
    world = warmed("layerwise", links=slow)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    got_s = first_tokens(run_out(world))["x"] - 100.0
    assert got_s > 0.010 + FETCH_BYTES / 1e9 + HOST_S / 36
    assert got_s < 0.010 + FETCH_BYTES / 1e9 + HOST_S + compute_s(cached=LONG)


def test_a_fetching_request_does_not_hold_up_those_behind_it() -> None:
    world = warmed()
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    world.submit(0, a_request(prompt(200, start=50_000), request_id="y"), 100.0)
    firsts = first_tokens(run_out(world))
    assert firsts["y"] < 100.0 + NETWORK_S < firsts["x"]


def test_a_gain_below_the_minimum_is_computed() -> None:
    world = a_world("A100", "A100")
    world.submit(1, a_request(prompt(500), output=1), 0.0)
    run_out(world)
    world.submit(0, a_request(prompt(500), request_id="x"), 100.0)
    outputs = run_out(world)
    assert (outputs[0].cached_tokens, world.engines[0].counters.external_hits) == (0, 0)


def test_what_hbm_has_is_not_fetched() -> None:
    world = warmed()
    world.submit(0, a_request(prompt(4000), output=1), 50.0)
    run_out(world)
    before = world.engines[0].counters.external_hits
    assert before == 249 * 16
    world.submit(0, a_request(prompt(LONG), output=1), 100.0)
    run_out(world)
    assert world.engines[0].counters.external_hits - before == (499 - 250) * 16


def test_two_replicas_fetching_at_once_share_the_store_link_and_not_pcie() -> None:
    world = a_world("A100", "A100", "A100")
    world.submit(2, a_request(prompt(LONG), output=1), 0.0)
    run_out(world)
    for row in (0, 1):
        world.submit(row, a_request(prompt(LONG), request_id=f"x{row}"), 100.0)
    firsts = first_tokens(run_out(world))
    expected_s = 0.010 + 2 * FETCH_BYTES / 25e9 + HOST_S + compute_s(cached=LONG)
    assert [firsts["x0"] - 100.0, firsts["x1"] - 100.0] == pytest.approx([expected_s] * 2, rel=1e-9)


def test_fetched_blocks_are_announced_and_found_afterwards() -> None:
    world = warmed(record_events=True)
    world.engines[0].take_event_batches()
    world.submit(0, a_request(prompt(LONG), output=1), 100.0)
    run_out(world)
    events = [event for batch in world.engines[0].take_event_batches() for event in batch.events]
    assert isinstance(events[0], Stored)
    assert (len(events[0].digests), events[0].parent) == (499, None)
    world.submit(0, a_request(prompt(LONG), request_id="again"), 200.0)
    run_out(world)
    assert world.engines[0].counters.external_hits == 499 * 16


def test_without_room_a_request_waits_without_a_fetch_and_computes() -> None:
    small = {"memory_share": 0.2114}  # about 750 blocks
    world = warmed(engine=small)
    world.submit(0, a_request(prompt(6000, start=50_000), output=50, max_tokens=50, request_id="q"), 100.0)
    world.advance(100.01)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.01)
    outputs = run_out(world)
    assert next(output.cached_tokens for output in outputs if output.request_id == "x") == 0
    assert world.engines[0].counters.external_hits == 0


def test_an_aborted_fetch_frees_the_link_and_the_blocks() -> None:
    world = warmed()
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    world.advance(100.02)
    assert world.abort(0, "x", 100.02)
    assert run_out(world) == []
    assert [link.active_transfers for link in world.links] == [0, 0, 0]
    assert world.engines[0].cache.free_blocks == world.engines[0].cache.size


def test_a_blocked_head_and_reserved_requests_behind_it_all_end() -> None:
    """Fetches hold blocks that the head of the queue lacks: holders go first, nothing waits for ever."""
    world = warmed(engine={"memory_share": 0.2114, "token_budget": 512})
    outputs: list[Output] = []
    for number in range(12):
        at_s = 100.0 + 0.005 * number
        outputs += world.advance(at_s)
        tokens = prompt(LONG - 16 * number) if number % 2 else prompt(9000, start=20_000 + number)
        world.submit(0, a_request(tokens, request_id=str(number), output=40, max_tokens=40), at_s)
    outputs += run_out(world)
    assert sorted(int(output.request_id) for output in outputs if output.finish_reason) == list(range(12))
    assert world.engines[0].cache.free_blocks == world.engines[0].cache.size


def test_a_holder_passes_a_head_that_does_not_fit_beside_it() -> None:
    """753 blocks. `q` runs in 376; `head` needs 564 and waits; `x` behind it fetches into 313 and holds them. When `q`
    ends 440 are free: `head` still does not fit, and without passing it nothing would ever run again."""
    world = a_world("A100", "A100", engine={"memory_share": 0.2114})
    world.submit(1, a_request(prompt(5000), output=1), 0.0)
    run_out(world)
    world.submit(0, a_request(prompt(6000, start=50_000), request_id="q"), 100.0)
    world.advance(100.01)
    world.submit(0, a_request(prompt(9000, start=20_000), request_id="head"), 100.01)
    world.submit(0, a_request(prompt(5000), request_id="x"), 100.01)
    firsts = first_tokens(run_out(world))
    assert list(firsts) == ["q", "x", "head"]


def test_a_link_comes_before_a_step_that_starts_at_the_same_time() -> None:
    engine = an_engine()
    link = FairLink(rate_bytes_per_s=100.0)
    world = World([engine], [link])
    running: list[int] = []
    link.start(100.0, 0.0, lambda _at_s: running.append(engine.running))
    world.submit(0, a_request(), 1.0)
    world.advance(1.0)
    assert (running, engine.running) == ([0], 1)


def test_outputs_come_in_order_of_time_over_all_replicas() -> None:
    world = a_world("A100", "H20", "H20", engine={"jitter": 0.03})
    for row in range(3):
        world.submit(row, a_request(300, output=50, max_tokens=50), 0.01 * row)
    at = [output.at_s for output in world.advance(60.0)]
    assert len(at) == 150
    assert at == sorted(at)
