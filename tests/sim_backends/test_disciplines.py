"""Every fetch discipline against its closed form, without jitter.

Q is the first token of one prompt ahead that fills all its steps; C is measured on a replica that has the rest in
HBM; R and F come from the links by hand: 7,984 tokens of 147,456 bytes, in pieces of 512 tokens where pieces matter.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from sim_backends.world import World
from tests.sim_backends.builders import a_request, a_world, first_tokens, prompt, run_out

TOKEN_BYTES = 147_456
LONG = 8000  # tokens; 499 of its 500 blocks may be reused
REUSABLE = 7984
AHEAD = 4096  # tokens of the prompt ahead: full steps
SLOW = {"store": {"gb_s": 1, "start_ms": 10}, "pcie": {"gb_s": 25, "start_ms": 0}}
FETCH_S = 0.010 + REUSABLE * TOKEN_BYTES / 1e9 + REUSABLE * TOKEN_BYTES / 25e9  # all of it, whole, on the slow link
PIECE_S = 512 * TOKEN_BYTES / 1e9
PIECE_HOST_S = 512 * TOKEN_BYTES / 25e9
PIECES_S = 0.010 + REUSABLE * TOKEN_BYTES / 1e9 + (REUSABLE % 512) * TOKEN_BYTES / 25e9  # all of it, in pieces


def warmed(discipline: str, *, stored: int = LONG, budget: int = 2048, limit_ms: float = 0.0) -> World:
    """Two A100s and a slow store, which has the start of the long prompt."""
    fetch = {"by": "engine", "discipline": discipline, "minimum_tokens": 512, "limit_ms": limit_ms}
    world = a_world("A100", "A100", fetch=fetch, links=SLOW, engine={"token_budget": budget})
    world.submit(1, a_request(prompt(stored), output=1), 0.0)
    run_out(world)
    return world


def first_s(world: World, *, ahead: bool) -> float:
    """T_first of the long prompt on the first replica, idle or with one prompt ahead."""
    if ahead:
        world.submit(0, a_request(prompt(AHEAD, start=50_000), output=1, request_id="q"), 100.0)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    return first_tokens(run_out(world))["x"] - 100.0


@cache
def queue_s(budget: int = 2048) -> float:
    alone = a_world("A100", use_store=False, engine={"token_budget": budget})
    alone.submit(0, a_request(prompt(AHEAD, start=50_000), output=1, request_id="q"), 100.0)
    return first_tokens(run_out(alone))["q"] - 100.0


@cache
def compute_s(cached: int, *, tokens: int = LONG, budget: int = 2048) -> float:
    """C: from the start to the first token of a prompt whose first `cached` tokens are in HBM."""
    world = a_world("A100", use_store=False, engine={"token_budget": budget})
    if cached:
        world.submit(0, a_request(prompt(cached), output=1), 0.0)
        run_out(world)
    world.submit(0, a_request(prompt(tokens), request_id="x"), 100.0)
    return first_tokens(run_out(world))["x"] - 100.0


def arrived(at_s: float) -> int:
    """Tokens of the whole pieces that have come `at_s` after the fetch began."""
    pieces = int((at_s - 0.010 - PIECE_HOST_S) // PIECE_S)
    return min(max(pieces, 0) * 512, REUSABLE)


def test_the_cases_are_the_ones_they_are_meant_to_be() -> None:
    """The queue ends while the fetch is under way, and some pieces have come by then."""
    assert 512 < arrived(queue_s()) < REUSABLE
    assert queue_s() + 0.2 < PIECES_S < FETCH_S


def test_overlapped_starts_when_both_queue_and_fetch_are_over() -> None:
    assert first_s(warmed("overlapped"), ahead=True) == pytest.approx(FETCH_S + compute_s(REUSABLE), rel=1e-9)


def test_serial_adds_queue_and_fetch() -> None:
    expected_s = queue_s() + FETCH_S + compute_s(REUSABLE)
    assert first_s(warmed("serial"), ahead=True) == pytest.approx(expected_s, rel=1e-9)


def test_blocking_adds_queue_and_fetch() -> None:
    expected_s = queue_s() + FETCH_S + compute_s(REUSABLE)
    assert first_s(warmed("blocking"), ahead=True) == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize(("discipline", "held"), [("serial", False), ("blocking", True)])
def test_only_a_blocking_fetch_stops_the_decodes_beside_it(discipline: str, held: bool) -> None:
    world = warmed(discipline)
    world.submit(0, a_request(prompt(64, start=50_000), output=400, max_tokens=400, request_id="y"), 100.0)
    outputs = world.advance(100.5)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.5)
    outputs += run_out(world)
    times_s = [output.at_s for output in outputs if output.request_id == "y"]
    longest_s = max(later - earlier for earlier, later in pairwise(times_s))
    assert len(times_s) == 400
    assert (longest_s > FETCH_S) is held
    assert longest_s < (FETCH_S if held else 0.0) + 0.05


def test_a_request_that_comes_while_the_gpu_is_held_waits_for_it() -> None:
    world = warmed("blocking")
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    world.submit(0, a_request(prompt(64, start=50_000), request_id="y"), 100.5)
    assert first_tokens(run_out(world))["y"] > 100.0 + FETCH_S


def test_an_aborted_fetch_lets_the_gpu_go() -> None:
    world = warmed("blocking")
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    world.submit(0, a_request(prompt(64, start=50_000), request_id="y"), 100.5)
    world.abort(0, "x", 100.6)
    assert first_tokens(run_out(world))["y"] == pytest.approx(100.6, abs=0.05)


def layer_s(tokens: int) -> float:
    """R1: one of 36 layers over both links."""
    return 0.010 + tokens * TOKEN_BYTES / 36 * (1 / 1e9 + 1 / 25e9)


def test_layerwise_hides_all_but_the_first_layer_behind_a_longer_compute() -> None:
    """1,008 tokens are stored, 6,992 are computed: max(R1 + C, R + C/L) is R1 + C."""
    world = warmed("layerwise", stored=1008)
    expected_s = layer_s(1008) + compute_s(1008)
    assert expected_s > 0.010 + 1008 * TOKEN_BYTES * (1 / 1e9 + 1 / 25e9)
    assert first_s(world, ahead=False) == pytest.approx(expected_s, rel=1e-9)


def test_layerwise_in_turn_adds_the_queue_to_the_first_layer() -> None:
    world = warmed("layerwise_in_turn", stored=1008)
    expected_s = queue_s() + layer_s(1008) + compute_s(1008)
    assert first_s(world, ahead=True) == pytest.approx(expected_s, rel=1e-9)


def test_layerwise_with_a_longer_fetch_ends_one_step_after_the_last_byte() -> None:
    """The form says R + C/L. The engine has no part of a step: its last token takes one of its own, so R + C, and reads
    its KV as a decode does: under a millisecond more."""
    world = warmed("layerwise", stored=REUSABLE + 16)
    world.submit(0, a_request(prompt(REUSABLE + 1), request_id="x"), 100.0)
    got_s = first_tokens(run_out(world))["x"] - 100.0
    last_host_s = REUSABLE * TOKEN_BYTES * 35 / 36 / 25e9
    ready_s = 0.010 + REUSABLE * TOKEN_BYTES / 1e9 + last_host_s
    assert got_s == pytest.approx(ready_s + compute_s(REUSABLE, tokens=REUSABLE + 1), abs=1e-3)


def test_best_effort_computes_what_has_not_arrived_by_its_turn() -> None:
    """Q + C of what had arrived by Q."""
    world = warmed("best_effort")
    expected_s = queue_s() + compute_s(arrived(queue_s()))
    assert first_s(world, ahead=True) == pytest.approx(expected_s, rel=1e-9)
    assert world.engines[0].counters.external_hits == arrived(queue_s())
    assert [link.active_transfers for link in world.links] == [0, 0, 0]


def test_best_effort_on_an_idle_replica_computes_everything() -> None:
    world = warmed("best_effort")
    assert first_s(world, ahead=False) == pytest.approx(compute_s(0), rel=1e-9)
    assert world.engines[0].counters.external_hits == 0


def test_time_limited_gives_the_fetch_its_patience_and_no_more() -> None:
    """Q + limit + C of what had arrived by then."""
    taken_s = queue_s() + 0.2
    assert arrived(taken_s) > arrived(queue_s())
    got_s = first_s(warmed("time_limited", limit_ms=200), ahead=True)
    assert got_s == pytest.approx(taken_s + compute_s(arrived(taken_s)), rel=1e-9)


def test_time_limited_starts_when_the_last_piece_comes_in_time() -> None:
    """Q + (R - Q) + C: the limit is not used up."""
    got_s = first_s(warmed("time_limited", limit_ms=5000), ahead=True)
    assert got_s == pytest.approx(PIECES_S + compute_s(REUSABLE), rel=1e-9)


def test_time_limited_without_patience_is_best_effort() -> None:
    assert first_s(warmed("time_limited"), ahead=True) == first_s(warmed("best_effort"), ahead=True)


def test_others_run_while_a_time_limited_request_is_patient() -> None:
    world = warmed("time_limited", limit_ms=500)
    world.submit(0, a_request(prompt(LONG), request_id="x"), 100.0)
    world.submit(0, a_request(prompt(64, start=50_000), request_id="y"), 100.0)
    firsts = first_tokens(run_out(world))
    assert firsts["y"] < 100.1 < 100.5 < firsts["x"]


def test_two_ends_meet_where_compute_and_fetch_take_the_same_time() -> None:
    """C' F / (C' + F) + C_new, for Q = 0. The form takes every token for equally dear; attention makes later ones
    dearer, and a step and a piece may overlap where the two meet: within 6 %."""
    reusable_s = compute_s(0, tokens=REUSABLE, budget=256)
    expected_s = reusable_s * PIECES_S / (reusable_s + PIECES_S) + compute_s(REUSABLE, budget=256)
    got_s = first_s(warmed("two_ends", budget=256), ahead=False)
    assert got_s == pytest.approx(expected_s, rel=0.06)
    assert got_s < 0.8 * min(reusable_s, PIECES_S)


def test_two_ends_gain_from_a_fetch_that_began_in_the_queue() -> None:
    """By Q some tail has come; what is left is shared as on an idle replica, to within one piece where they meet."""
    waited_s = queue_s(budget=256)
    left = REUSABLE - arrived(waited_s)
    fetch_left_s = left * TOKEN_BYTES / 1e9
    compute_left_s = compute_s(0, tokens=left, budget=256)
    shared_s = compute_left_s * fetch_left_s / (compute_left_s + fetch_left_s)
    got_s = first_s(warmed("two_ends", budget=256), ahead=True) - waited_s
    assert got_s == pytest.approx(shared_s + compute_s(REUSABLE, budget=256), abs=PIECE_S)
    assert got_s < 0.8 * first_s(warmed("two_ends", budget=256), ahead=False)


@pytest.mark.parametrize("ahead", [False, True])
def test_every_block_of_a_two_ended_prompt_is_found_afterwards(ahead: bool) -> None:
    world = warmed("two_ends", budget=256)
    first_s(world, ahead=ahead)
    computed = world.engines[0].counters.computed
    world.submit(0, a_request(prompt(LONG), request_id="again"), 200.0)
    run_out(world)
    assert world.engines[0].counters.computed - computed == LONG - REUSABLE
