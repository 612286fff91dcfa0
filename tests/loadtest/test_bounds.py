"""The bounds against hand cases, against all schedules of tiny cases, and below whatever the engines really do."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadtest.replay import fleets
from loadtest.replay.bounds import (
    Floats,
    best_possible_s,
    ideal_cached_tokens,
    least_work_s,
    mean_bound,
    prefill_alone_s,
    shortest_remaining_first_s,
)
from loadtest.replay.central import ORDERS, central
from loadtest.replay.run import Conditions, Replay
from loadtest.traffic import TrafficRow, prompt_tokens, read_traffic
from router.config import PolicyConfig
from sim_backends.fleet import Fleet
from sim_backends.requests import EngineRequest
from sim_backends.world import World, build
from tests.loadtest.bounds_cases import BLOCK, a_fleet, a_row, fleet_text, random_rows, unlike

DEMO_TRAFFIC = Path(__file__).parents[2] / "loadtest" / "demo" / "traffic.jsonl.gz"


def run_out(world: World, starts_s: dict[str, float]) -> dict[str, float]:
    """Time from arrival to first token of each request, once nothing is left to do."""
    first_s: dict[str, float] = {}
    while (due_s := world.next_due_s()) is not None:
        for output in world.advance(due_s):
            if output.index == 0:
                first_s[output.request_id] = output.at_s - starts_s[output.request_id]
    return first_s


def placed(fleet: Fleet, rows: list[TrafficRow], where: list[int], *, use_store: bool) -> Floats:
    """First tokens when request i goes to replica where[i] on arrival; blocks of BLOCK tokens by id."""
    world = build(fleet, use_store=use_store)
    for index, (row, replica) in enumerate(zip(rows, where, strict=True)):
        full = row.input_length // BLOCK
        request = EngineRequest(
            request_id=str(index),
            block_ids=row.hash_ids[:full],
            prompt_tokens=row.input_length,
            max_tokens=4096,
            output_tokens=row.output_length,
        )
        world.submit(replica, request, row.at_s)
    first_s = run_out(world, {str(index): row.at_s for index, row in enumerate(rows)})
    return np.array([first_s[str(index)] for index in range(len(rows))])


# The perfect cache.


def test_a_perfect_cache_has_what_earlier_prompts_began_with_in_whole_blocks() -> None:
    rows = [
        a_row(tokens=200, ids=[1, 2, 3, 4]),
        a_row(tokens=300, ids=[1, 2, 9, 4, 5]),  # 4 comes after something else
        a_row(tokens=256, ids=[1, 2, 3, 4]),  # the last id is known for 200 - 192 tokens only: less than a block
        a_row(tokens=256, ids=[1, 2, 3, 4]),  # all of it is known now, but one token is always computed
    ]
    assert ideal_cached_tokens(rows, block_tokens=BLOCK, tokens_per_id=BLOCK).tolist() == [0, 128, 192, 192]


def test_smaller_cache_blocks_find_part_of_a_cut_id() -> None:
    rows = [a_row(tokens=200, ids=[1, 2, 3, 4]), a_row(tokens=256, ids=[1, 2, 3, 4])]
    assert ideal_cached_tokens(rows, block_tokens=8, tokens_per_id=BLOCK).tolist() == [0, 200]


def test_prompts_without_ids_share_nothing() -> None:
    rows = [a_row(tokens=200, ids=[]), a_row(tokens=200, ids=[])]
    assert ideal_cached_tokens(rows, block_tokens=BLOCK, tokens_per_id=BLOCK).tolist() == [0, 0]


@pytest.mark.parametrize("block_tokens", [16, 512])
def test_one_engine_that_forgets_nothing_finds_what_the_perfect_cache_has(block_tokens: int) -> None:
    """Real token lists, one request after the other on one replica."""
    rows = [
        TrafficRow(at_s=100.0 * turn, input_length=tokens, output_length=1, hash_ids=ids)
        for turn, (tokens, ids) in enumerate(
            [(1400, [1, 2, 3]), (1500, [1, 2, 3]), (1536, [1, 2, 4]), (1400, [1, 2, 3])]
        )
    ]
    world = build(a_fleet("A100", block_tokens=block_tokens), use_store=False)
    cached: list[int] = []
    for index, row in enumerate(rows):
        world.submit(0, EngineRequest(str(index), prompt_tokens(row), max_tokens=1), row.at_s)
        while (due_s := world.next_due_s()) is not None:
            cached += [output.cached_tokens for output in world.advance(due_s)]
    assert ideal_cached_tokens(rows, block_tokens=block_tokens).tolist() == cached


@pytest.mark.parametrize("seed", range(8))
def test_block_ids_on_one_engine_are_reused_as_the_perfect_cache_says(seed: int) -> None:
    """As a replay names them: conversations that grow, cut anywhere, some of them sent again word for word."""
    rows = random_rows(seed, requests=40, longest=3000, gap_s=1.0)
    rows = [msgspec.structs.replace(row, at_s=100.0 * turn) for turn, row in enumerate([*rows, *rows[::3]])]
    world = build(a_fleet("A100"), use_store=False)
    cached: list[int] = []
    for index, row in enumerate(rows):
        full = row.hash_ids[: row.input_length // BLOCK]
        request = EngineRequest(str(index), block_ids=full, prompt_tokens=row.input_length, max_tokens=1)
        world.submit(0, request, row.at_s)
        while (due_s := world.next_due_s()) is not None:
            cached += [output.cached_tokens for output in world.advance(due_s)]
    assert ideal_cached_tokens(rows, block_tokens=BLOCK, tokens_per_id=BLOCK).tolist() == cached


# Alone on an idle fleet.


@pytest.mark.parametrize(("prompt", "known"), [(50, 0), (2048, 0), (5000, 0), (5000, 4096), (2049, 1024)])
def test_the_best_possible_is_what_an_idle_engine_does(prompt: int, known: int) -> None:
    """With blocks computed long before, on the faster of two cards."""
    rows = [a_row(0.0, tokens=max(known, 1)), a_row(100.0, tokens=prompt)]
    fleet = a_fleet("H20", "A100")
    first_s = placed(fleet, rows, [1, 1], use_store=False)
    best_s = best_possible_s(fleet, rows, tokens_per_id=BLOCK)
    assert best_s[1] == pytest.approx(first_s[1], rel=1e-9)


def test_the_best_possible_is_in_seconds_of_normal_cards_whatever_the_speed() -> None:
    rows = [a_row(tokens=3000)]
    slow, fast = (best_possible_s(a_fleet("A100", speed=speed), rows, tokens_per_id=BLOCK) for speed in (1.0, 8.0))
    assert slow.tolist() == fast.tolist()


def test_twelve_thousand_requests_are_bounded_one_by_one_as_together() -> None:
    """Values do not depend on what else is asked: no state is carried from one request to the next."""
    prompts = np.array([100, 9000, 2500])
    cached = np.array([0, 4096, 2432])
    together = prefill_alone_s(a_fleet("A100"), prompt_tokens=prompts, cached_tokens=cached)["A100"]
    for index in range(3):
        one = slice(index, index + 1)
        alone = prefill_alone_s(a_fleet("A100"), prompt_tokens=prompts[one], cached_tokens=cached[one])["A100"]
        assert alone[0] == together[index]


def test_lengths_that_leave_nothing_to_compute_are_refused() -> None:
    with pytest.raises(ValueError, match="less than the prompt"):
        prefill_alone_s(a_fleet("A100"), prompt_tokens=np.array([64]), cached_tokens=np.array([64]))


@pytest.mark.parametrize("tokens", [1, 64, 2000, 2048, 30_000])
def test_the_least_work_is_less_than_the_time_alone_and_close_to_it_for_full_steps(tokens: int) -> None:
    lengths: dict[str, Any] = {"prompt_tokens": np.array([tokens]), "cached_tokens": np.array([0])}
    for card in ("A100", "H20"):
        work_s = least_work_s(a_fleet(card), **lengths)[card][0]
        alone_s = prefill_alone_s(a_fleet(card), **lengths)[card][0]
        assert work_s <= alone_s * (1 + 1e-12)
        if tokens >= 2000:
            assert work_s > 0.97 * alone_s


# Shortest remaining first.


def test_the_shorter_request_interrupts_the_longer_one() -> None:
    """A long request of 10 s at 0, a short one of 2 s at 1: the short one takes 2 s, the long one 12 s."""
    in_system_s = shortest_remaining_first_s(np.array([0.0, 1.0]), np.array([10.0, 2.0]))
    assert in_system_s.tolist() == [12.0, 2.0]


def test_a_request_nearly_done_is_not_interrupted() -> None:
    in_system_s = shortest_remaining_first_s(np.array([0.0, 9.0]), np.array([10.0, 2.0]))
    assert in_system_s.tolist() == [10.0, 3.0]


def test_the_server_rests_while_nothing_is_there() -> None:
    in_system_s = shortest_remaining_first_s(np.array([0.0, 5.0, 5.0]), np.array([1.0, 3.0, 1.0]))
    assert in_system_s.tolist() == [1.0, 4.0, 1.0]


@pytest.mark.parametrize("arrivals", [[1.0, 0.0], [0.0, np.nan]])
def test_arrivals_out_of_order_or_unknown_are_refused(arrivals: list[float]) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        shortest_remaining_first_s(np.array(arrivals), np.array([1.0, 1.0]))


def least_total(arrivals: list[int], work: list[int], servers: int) -> int:
    """Smallest sum of times in system over all schedules that change only at whole seconds.

    In each second each of `servers` does one second of some request, no request on two servers at once.
    """
    everyone = range(len(work))

    @cache
    def rest(now: int, left: tuple[int, ...]) -> int:
        if not any(left):
            return 0
        here = [i for i in everyone if left[i] and arrivals[i] <= now]
        in_system = len(here)  # each of them is in the system for this second
        busy = min(servers, in_system)
        choices = {frozenset(chosen) for chosen in product(here, repeat=busy) if len(set(chosen)) == busy}
        return in_system + min(
            rest(now + 1, tuple(n - (i in chosen) for i, n in enumerate(left))) for chosen in choices
        )

    return rest(0, tuple(work))


def tiny_case(seed: int) -> tuple[list[int], list[int]]:
    chance = random.Random(f"{seed}/tiny")
    count = chance.randrange(2, 5)
    return sorted(chance.randrange(6) for _ in range(count)), [chance.randrange(1, 5) for _ in range(count)]


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_of_one_server_is_better(seed: int) -> None:
    arrivals, work = tiny_case(seed)
    in_system_s = shortest_remaining_first_s(np.array(arrivals, dtype=float), np.array(work, dtype=float))
    assert float(in_system_s.sum()) == least_total(arrivals, work, servers=1)


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_of_two_servers_is_better_than_one_of_twice_the_speed(seed: int) -> None:
    arrivals, work = tiny_case(seed)
    pooled_s = shortest_remaining_first_s(np.array(arrivals, dtype=float), np.array(work, dtype=float) / 2)
    assert float(pooled_s.sum()) <= least_total(arrivals, work, servers=2) + 1e-9


# The bound of the mean on a fleet.


def test_one_request_on_a_pool_of_equal_cards_takes_its_work_over_their_number() -> None:
    rows = [a_row(tokens=4096)]
    bound = mean_bound(a_fleet("A100", "A100", "A100"), rows, tokens_per_id=BLOCK)
    work_s = least_work_s(a_fleet("A100"), prompt_tokens=np.array([4096]), cached_tokens=np.array([0]))["A100"][0]
    assert bound.pooled_s == pytest.approx(work_s / 3, rel=1e-9)
    assert bound.bound_s == bound.alone_s == best_possible_s(a_fleet("A100"), rows, tokens_per_id=BLOCK)[0]


def test_under_overload_the_pool_and_not_the_request_alone_is_the_bound() -> None:
    bound = mean_bound(a_fleet("A100", "H20"), [a_row(tokens=4096, ids=[]) for _ in range(20)], tokens_per_id=BLOCK)
    assert bound.bound_s == bound.pooled_s > 2 * bound.alone_s


def test_a_card_counts_with_the_largest_speed_it_shows_for_any_request() -> None:
    """A short and a long prompt that never meet: together they are bounded no higher than each for itself."""
    short, long = a_row(0.0, tokens=10, ids=[]), a_row(1000.0, tokens=60_000, ids=[])
    fleet = a_fleet("A100", "H20")
    together = mean_bound(fleet, [short, long], tokens_per_id=BLOCK)
    each = [mean_bound(fleet, [row], tokens_per_id=BLOCK).pooled_s for row in (short, long)]
    assert together.pooled_s < float(np.mean(each))


def test_warm_up_rows_fill_the_cache_and_are_not_counted() -> None:
    rows = [a_row(0.0, tokens=4096), a_row(0.0, tokens=4160)]
    bound = mean_bound(a_fleet("A100"), rows, tokens_per_id=BLOCK, first=1)
    assert bound.alone_s == best_possible_s(a_fleet("A100"), rows, tokens_per_id=BLOCK)[1]
    with pytest.raises(ValueError, match="2 rows"):
        mean_bound(a_fleet("A100"), rows, tokens_per_id=BLOCK, first=2)


FLEETS = {"one": ("A100",), "equal": ("A100", "A100"), "mixed": ("A100", "H20", "H20")}
# Longest prompt and mean gap between arrivals: many short prompts in one step, middle ones, long ones of many steps.
LOADS = [(256, 0.004), (2000, 0.05), (12_000, 0.4)]


@pytest.mark.parametrize("fleet_name", FLEETS)
@pytest.mark.parametrize(("longest", "gap_s"), LOADS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_beats_the_bounds(fleet_name: str, longest: int, gap_s: float, seed: int) -> None:
    """Random and round-robin placement, with and without a store, and both central orders: mean and every request."""
    fleet = a_fleet(*FLEETS[fleet_name])
    rows = random_rows(seed, requests=40, longest=longest, gap_s=gap_s, output=3)
    replicas = len(fleet.replicas)
    anywhere = random.Random(f"{seed}/where").choices(range(replicas), k=len(rows))
    in_turn = [index % replicas for index in range(len(rows))]
    runs = [placed(fleet, rows, where, use_store=use) for where, use in product((anywhere, in_turn), (True, False))]
    runs += [central(fleet, rows, order=order, tokens_per_id=BLOCK).first_token_s for order in ORDERS]
    bound = mean_bound(fleet, rows, tokens_per_id=BLOCK)
    best_s = best_possible_s(fleet, rows, tokens_per_id=BLOCK)
    for first_s in runs:
        assert float(np.mean(first_s)) >= bound.bound_s * (1 - 1e-9)
        assert (first_s >= best_s * (1 - 1e-9)).all()


def test_short_prompts_that_share_steps_beat_their_times_alone_but_not_the_bound() -> None:
    """Why the pool counts a token's share of a full step and not the steps a request would take alone."""
    rows = [a_row(tokens=16, ids=[number]) for number in range(30)]
    fleet = a_fleet("A100")
    mean_s = float(np.mean(placed(fleet, rows, [0] * len(rows), use_store=False)))
    alone_s = best_possible_s(fleet, rows, tokens_per_id=BLOCK)
    assert mean_s < float(np.mean(shortest_remaining_first_s(np.zeros(len(rows)), alone_s)))
    assert mean_s >= mean_bound(fleet, rows, tokens_per_id=BLOCK).bound_s


def test_the_bound_is_nearly_reached_where_its_relaxations_cost_nothing() -> None:
    """One card, long prompts that are all there at the start, no decodes: shortest first is the best order."""
    rows = [unlike(0.0, tokens, tokens) for tokens in (8192, 4096, 6144, 2048, 10_240)]
    result = central(a_fleet("A100"), rows, order="central_sjf", tokens_per_id=BLOCK)
    bound = mean_bound(a_fleet("A100"), rows, tokens_per_id=BLOCK)
    assert bound.bound_s <= float(result.first_token_s.mean()) < 1.001 * bound.bound_s


@pytest.mark.parametrize("policy", ["round_robin", "least_request", "prefix_hash", "ttft", "e2e"])
def test_no_policy_of_the_router_beats_the_bounds(policy: str) -> None:
    """The demo's traffic, four times as dense, behind the router's own dispatcher on two unlike cards."""
    both = fleets.of_text(fleet_text("A100", "H20", block_tokens=512), "test")
    rows = [msgspec.structs.replace(row, at_s=row.at_s / 4) for row in read_traffic(DEMO_TRAFFIC)[:80]]
    conditions = Conditions(policy=PolicyConfig(name=policy))
    first_s = Replay(both, conditions, block_tokens=512).run(rows).first_token_s
    assert float(np.mean(first_s)) >= mean_bound(both.engines, rows).bound_s * (1 - 1e-9)
    assert (first_s >= best_possible_s(both.engines, rows) * (1 - 1e-9)).all()


def test_ranks_count_as_cards() -> None:
    rows = [a_row(tokens=4096, ids=[]) for _ in range(9)]
    fleet = a_fleet("A100")
    ranks = msgspec.structs.replace(fleet, replicas=[msgspec.structs.replace(fleet.replicas[0], ranks=3)])
    bounds = [mean_bound(each, rows, tokens_per_id=BLOCK) for each in (ranks, a_fleet("A100", "A100", "A100"))]
    assert bounds[0] == bounds[1]


def slowed(fleet: Fleet, *slow: float) -> Fleet:
    """The fleet with each replica so many times slower than its card."""
    replicas = [msgspec.structs.replace(one, slow=by) for one, by in zip(fleet.replicas, slow, strict=True)]
    return msgspec.structs.replace(fleet, replicas=replicas)


def test_a_fleet_of_slow_replicas_alone_has_that_much_higher_bounds() -> None:
    rows = [unlike(0.0, 4096, number) for number in range(6)]
    healthy = a_fleet("A100", "A100")
    sick = slowed(healthy, 3.0, 3.0)
    assert best_possible_s(sick, rows).tolist() == pytest.approx((3.0 * best_possible_s(healthy, rows)).tolist())
    assert mean_bound(sick, rows).pooled_s == pytest.approx(3.0 * mean_bound(healthy, rows).pooled_s)


def test_one_slow_replica_takes_its_share_from_the_pool_and_nothing_from_the_best_possible() -> None:
    rows = [unlike(0.0, 4096, 1)]
    healthy = a_fleet("A100", "A100")
    sick = slowed(healthy, 4.0, 1.0)
    assert best_possible_s(sick, rows).tolist() == best_possible_s(healthy, rows).tolist()
    assert mean_bound(sick, rows).pooled_s == pytest.approx(2.0 / 1.25 * mean_bound(healthy, rows).pooled_s)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_beats_the_bounds_of_a_fleet_with_a_slow_replica(seed: int) -> None:
    """One that is slower than the other kind of card; the best possible of each request is met on an idle fleet."""
    fleet = slowed(a_fleet("A100", "A100", "H20"), 5.0, 1.0, 1.0)
    rows = random_rows(seed, requests=40, longest=6000, gap_s=0.1, output=3)
    bound = mean_bound(fleet, rows, tokens_per_id=BLOCK)
    best_s = best_possible_s(fleet, rows, tokens_per_id=BLOCK)
    runs = [placed(fleet, rows, [index % 3 for index in range(len(rows))], use_store=True)]
    runs += [central(fleet, rows, order=order, tokens_per_id=BLOCK).first_token_s for order in ORDERS]
    for first_s in runs:
        assert float(np.mean(first_s)) >= bound.bound_s * (1 - 1e-9)
        assert (first_s >= best_s * (1 - 1e-9)).all()
    alone_s = placed(fleet, [msgspec.structs.replace(rows[0], at_s=0.0)], [1], use_store=False)
    assert alone_s[0] == pytest.approx(best_s[0], rel=1e-9)


def test_a_fleet_of_several_models_has_no_bound() -> None:
    fleet = a_fleet("A100", "A100")
    other = msgspec.structs.replace(fleet.model, name="other", layers=20)
    mixed = [fleet.replicas[0], msgspec.structs.replace(fleet.replicas[1], model="other")]
    with pytest.raises(ValueError, match="one model"):
        mean_bound(msgspec.structs.replace(fleet, models={"other": other}, replicas=mixed), [a_row(tokens=100)])
