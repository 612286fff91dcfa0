from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimator, Surroundings
from estimators.first_token import Discipline
from estimators.hardware import CARDS
from estimators.hit_probability import HitProbability
from estimators.links import LinkTable
from estimators.paths import COLUMN, PATHS, Path, main_source
from estimators.prefetch import PrefetchSpace
from estimators.prefill_features import prefill_features
from estimators.queueing import beside_one
from estimators.roofline import rates_of
from estimators.routes import Held, Routes, best_peers
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from estimators.spread import ResidualSpread
from estimators.tiers import Tier
from estimators.view import FleetView
from tests.builders import a_fleet, a_request, an_estimator, estimate, held, quiet

LOCAL, REMOTE, RECOMPUTE = (COLUMN[path] for path in (Path.LOCAL, Path.REMOTE, Path.RECOMPUTE))


def test_the_grid_equals_the_scalar_roofline_for_each_replica_and_path() -> None:
    """Independent route: one replica and path at a time through the scalar functions."""
    view = a_fleet("A100", "H20")
    estimates = estimate(view, held([100, 300], 500), an_estimator(network_bytes_per_s=25e9, engine_decides=False))
    for row, card in enumerate(("A100", "H20")):
        rates = rates_of(QWEN3_8B, CARDS[card])
        for column, cached in ((LOCAL, (1600, 4800)[row]), (REMOTE, 8000), (RECOMPUTE, 0)):
            scalar_s = rates.prefill_s(new_tokens=8448 - cached, cached_tokens=cached)
            assert estimates.compute_s[column, row] == pytest.approx(scalar_s, rel=1e-12)
            assert estimates.reused_tokens[column, row] == cached


def test_an_engine_that_decides_by_itself_has_exactly_one_path_on_each_replica() -> None:
    view = a_fleet("A100", "A100", "A100")
    estimator = an_estimator(network_bytes_per_s=25e9, minimum_fetch_tokens=512, rows=3)
    estimates = estimate(view, held([0, 490, 510], 510), estimator)
    assert [estimates.path_at(row) for row in range(3)] == [Path.REMOTE, Path.LOCAL, Path.LOCAL]
    assert estimates.possible.sum(axis=0).tolist() == [1, 1, 1]


def test_without_a_store_there_is_no_column_for_it() -> None:
    estimates = estimate(a_fleet(), held([0, 10], store_blocks=500))
    assert estimates.possible.shape == (2, 2)
    assert [estimates.path_at(row) for row in range(2)] == [Path.RECOMPUTE, Path.LOCAL]


def test_a_replica_that_is_not_ready_has_no_possible_path() -> None:
    view = a_fleet()
    view.ready[0] = False
    assert not estimate(view, held([500, 0])).possible[0].any()


def test_at_least_one_token_is_always_computed() -> None:
    """A directory that claims more than the prompt must not make work vanish."""
    estimates = estimate(a_fleet(), held([10_000, 0], 10_000), an_estimator(network_bytes_per_s=25e9))
    assert estimates.reused_tokens.max() == 8447
    assert np.all(estimates.compute_s > 0)


def test_only_the_missing_part_is_fetched() -> None:
    estimator = an_estimator(network_bytes_per_s=25e9)
    all_of_it, half_of_it = estimate(a_fleet(), held([0, 256], 512), estimator).fetch_s[REMOTE] - 0.010
    assert half_of_it == pytest.approx(all_of_it / 2)


def test_a_booked_fetch_delays_the_next_one_over_the_shared_link() -> None:
    estimator = an_estimator(network_bytes_per_s=25e9)
    before = estimate(a_fleet(), held([0, 0], 512), estimator).fetch_s[REMOTE, 1]
    estimator.routes.table.promise([0], 2.5e9, now_s=0.0)
    after = estimate(a_fleet(), held([0, 0], 512), estimator).fetch_s[REMOTE, 1]
    size = 512 * 16 * QWEN3_8B.kv_bytes_per_token
    assert after - before == pytest.approx(size / 25e9)  # the two share the link until the smaller is through


def test_a_serial_fetch_starts_after_the_queue_and_finds_the_link_as_it_is_then() -> None:
    view = a_fleet(discipline=Discipline.SERIAL)
    view.head_ends_s[0] = view.head_compute_s[0] = 0.5
    estimator = an_estimator(network_bytes_per_s=25e9)
    estimator.routes.table.promise([0], 10e9, now_s=0.0)  # busy for 0.4 s: over when the request's turn comes
    estimates = estimate(view, held([0, 0], 512), estimator)
    alone_s = 0.010 + 2 * 512 * 16 * QWEN3_8B.kv_bytes_per_token / 25e9
    assert estimates.fetch_s[REMOTE, 0] == pytest.approx(alone_s)
    assert estimates.ready_s[REMOTE, 0] == pytest.approx(0.5 + alone_s)


@pytest.mark.parametrize("discipline", list(Discipline))
def test_the_earliest_start_plus_compute_is_the_first_token(discipline: Discipline) -> None:
    """What the ledger books must be what the estimate promised, whichever of queue and fetch decides."""
    for backlog_s in (0.0, 0.05, 2.0):
        view = a_fleet(discipline=discipline)
        view.limit_s[:] = 0.1
        view.head_ends_s[0] = view.head_compute_s[0] = backlog_s
        estimates = estimate(view, held([0, 0], 512), an_estimator(network_bytes_per_s=2e9))
        start_s = max(float(estimates.queue_s[0]), float(estimates.ready_s[REMOTE, 0]))
        first_s = start_s + float(estimates.compute_s[REMOTE, 0])
        assert first_s == pytest.approx(float(estimates.first_token_s[REMOTE, 0]))


@pytest.mark.parametrize("other", list(Discipline))
def test_each_replica_is_estimated_by_its_own_discipline(other: Discipline) -> None:
    """A mixed fleet equals, row by row, fleets that all do the same."""
    mixed = a_fleet(discipline=Discipline.OVERLAPPED)
    mixed.disciplines[1] = other
    mixed.limit_s[:] = 0.1
    mixed.head_ends_s[:] = mixed.head_compute_s[:] = 0.2
    estimates = estimate(mixed, held([0, 0], 512), an_estimator(network_bytes_per_s=2e9))
    for row, discipline in enumerate((Discipline.OVERLAPPED, other)):
        alike = a_fleet(discipline=discipline)
        alike.limit_s[:] = 0.1
        alike.head_ends_s[:] = alike.head_compute_s[:] = 0.2
        alone = estimate(alike, held([0, 0], 512), an_estimator(network_bytes_per_s=2e9))
        assert estimates.first_token_s[:, row] == pytest.approx(alone.first_token_s[:, row])


def test_the_work_of_a_path_is_that_of_its_features_times_the_corrections_of_its_replica() -> None:
    """The route that learning takes: feature by feature, one replica at a time."""
    view = a_fleet("A100", "H20")
    view.coefficients[1] = [1.3, 2.0, 0.4, 0.1, 0.7]
    view.decode_batch[1], view.decode_read_tokens[1] = 20, 100_000
    estimator = an_estimator(network_bytes_per_s=25e9)
    estimates = estimate(view, held([100, 527], 500), estimator)
    for (column, row), prefill_s in np.ndenumerate(estimates.prefill_s):
        cached = float(estimates.reused_tokens[column, row])
        linear_s, attention_s = estimator.work_s(row, 8448 - cached, cached, view)
        features = prefill_features(
            linear_s=linear_s + float(view.head_s[row]),
            attention_s=attention_s,
            new_tokens=8448 - cached,
            beside=beside_one(view, row, 0.0),
            step_tokens=estimator.step_tokens,
        )
        assert prefill_s == pytest.approx(float(features @ view.coefficients[row]), rel=1e-12)


@pytest.mark.parametrize("discipline", list(Discipline))
def test_every_discipline_agrees_on_an_idle_replica_within_its_fetch(discipline: Discipline) -> None:
    view = a_fleet(discipline=discipline)
    view.limit_s[:] = 10.0
    estimates = estimate(view, held([0, 0], 512), an_estimator(network_bytes_per_s=25e9))
    fetch_s, recompute_s = estimates.fetch_s[REMOTE, 0], estimates.first_token_s[RECOMPUTE, 0]
    all_there_s = float(estimates.prefill_s[REMOTE, 0])
    first_s = float(estimates.first_token_s[REMOTE, 0])
    assert all_there_s - 1e-12 <= first_s
    # An engine that computes from the other end does not stop within a step.
    step_s = recompute_s * 2048 / 8448 if discipline is Discipline.TWO_ENDS else 0.0
    assert first_s <= min(fetch_s + all_there_s, recompute_s) + step_s + 1e-12 or first_s == pytest.approx(recompute_s)


def test_running_decodes_slow_a_prefill_and_lengthen_the_pace() -> None:
    idle, busy = a_fleet(), a_fleet()
    busy.decode_batch[:], busy.decode_read_tokens[:] = 16, 160_000
    quiet_one, loud_one = estimate(idle, held([0, 0])), estimate(busy, held([0, 0]))
    assert np.all(loud_one.compute_s[RECOMPUTE] > quiet_one.compute_s[RECOMPUTE])
    assert np.all(loud_one.pace_s > quiet_one.pace_s)
    assert np.all(loud_one.decode_price_s > quiet_one.decode_price_s)


def test_waiting_prompts_that_fill_the_memory_make_a_request_wait_for_it() -> None:
    free, full = a_fleet(), a_fleet()
    for view in (free, full):
        view.has_capacity(0, 100_000)
        view.decode_batch[0], view.decode_context_tokens[0] = 8, 90_000
    full.decode_context_tokens[0] = 99_000
    free_s, full_s = (float(estimate(view, held([0, 0])).queue_s[0]) for view in (free, full))
    assert free_s < 0.1
    assert full_s > 10 * free_s


def with_tiers(**held_blocks: list[int]) -> Held:
    columns = {name: np.array(blocks, dtype=np.int32) for name, blocks in held_blocks.items()}
    return Held(local_blocks=columns["hbm"], store_blocks=0, host_blocks=columns["host"], disk_blocks=columns["disk"])


def a_fleet_with_tiers_and_peers(**changes: object) -> Estimator:
    """Host memory at 25 GB/s, a disk at 5 GB/s behind it, 10 GB/s between peers."""
    table = LinkTable(bytes_per_s=[25e9, 25e9, 5e9, 5e9, 10e9, 10e9])
    routes = Routes(table=table, host=[[0], [1]], disk=[[2, 0], [3, 1]], egress=[4, 5])
    return Estimator(costs=costs_of(QWEN3_8B), layers=36, rows=2, routes=routes, **changes)  # type: ignore[arg-type]


def test_own_tiers_deliver_side_by_side_and_the_deepest_that_has_something_names_the_path() -> None:
    where = with_tiers(hbm=[100, 100], host=[200, 100], disk=[200, 400])
    estimates = estimate(a_fleet(), where, a_fleet_with_tiers_and_peers())
    assert [estimates.path_at(row) for row in (0, 1)] == [Path.HOST, Path.DISK]
    token_bytes = QWEN3_8B.kv_bytes_per_token
    host_s = 100 * 16 * token_bytes / 25e9
    disk_s = 300 * 16 * token_bytes * (1 / 5e9 + 1 / 25e9)
    assert estimates.fetch_s[COLUMN[Path.HOST], 0] == pytest.approx(host_s)
    assert estimates.fetch_s[COLUMN[Path.DISK], 1] == pytest.approx(disk_s)
    assert estimates.reused_tokens[COLUMN[Path.DISK], 1] == 6400


def test_a_peer_is_read_only_by_an_engine_that_can_be_told_to() -> None:
    where = with_tiers(hbm=[500, 0], host=[500, 0], disk=[500, 0])
    by_itself = estimate(a_fleet(), where, a_fleet_with_tiers_and_peers())
    told = estimate(a_fleet(), where, a_fleet_with_tiers_and_peers(engine_decides=False))
    assert not by_itself.possible[COLUMN[Path.PEER]].any()
    assert told.possible[COLUMN[Path.PEER]].tolist() == [False, True]
    assert told.peers is not None
    assert told.peers[1] == 0
    size = 500 * 16 * QWEN3_8B.kv_bytes_per_token
    assert told.fetch_s[COLUMN[Path.PEER], 1] == pytest.approx(size / 10e9)


def test_the_best_peer_has_the_longest_prefix_and_of_equals_the_idlest_link() -> None:
    egress = np.array([0, 1, 2])
    assert best_peers(np.array([5, 9, 9], dtype=np.int32), egress, np.array([0.0, 1e9, 0.0])).tolist() == [2, 2, 1]
    assert best_peers(np.array([5, 9, 9], dtype=np.int32), egress, np.array([0.0, 0.0, 1e9])).tolist() == [1, 2, 1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_on_idle_links_the_best_peer_is_found_without_asking_for_them_and_is_never_oneself(drawn: list[int]) -> None:
    blocks, egress = np.array(drawn, dtype=np.int32), np.arange(len(drawn))
    best = best_peers(blocks, egress, None).tolist()
    assert best == best_peers(blocks, egress, np.zeros(len(drawn))).tolist()
    for row, peer in enumerate(best):
        others = [count for other, count in enumerate(drawn) if other != row]
        assert drawn[peer] == max(others, default=drawn[0])
        assert peer != row or not others


@pytest.mark.parametrize("discipline", list(Discipline))
def test_what_the_store_alone_has_is_the_same_whatever_was_in_hbm(discipline: Discipline) -> None:
    view = a_fleet(discipline=discipline)
    view.limit_s[:] = 0.1
    view.head_ends_s[:] = view.head_compute_s[:] = 0.2
    estimates = estimate(view, held([0, 300], 512), an_estimator(network_bytes_per_s=2e9))
    assert estimates.stored_s[0] == pytest.approx(estimates.stored_s[1], rel=1e-12)
    assert estimates.stored_s[0] == pytest.approx(estimates.first_token_s[REMOTE, 0], rel=1e-12)


def test_a_fetch_that_finds_no_room_is_not_made() -> None:
    size = 512 * 16 * QWEN3_8B.kv_bytes_per_token
    view, where = a_fleet(), held([0, 100], 512)
    estimator = an_estimator(network_bytes_per_s=25e9)
    estimator.space = PrefetchSpace([size - 1.0, size - 1.0])
    estimates = estimate(view, where, estimator)
    assert [estimates.path_at(row) for row in (0, 1)] == [Path.RECOMPUTE, Path.REMOTE]


def doubt(view: FleetView) -> Doubt:
    return Doubt(HitProbability(view.names), ResidualSpread(view.names), Conformal(LEVELS))


def test_the_mean_lies_between_hit_and_miss_by_the_probability_of_a_hit() -> None:
    view = a_fleet()
    estimates = estimate(view, held([500, 0]), an_estimator(doubt=doubt(view)))
    hit, recompute_s = estimates.hit_probability[LOCAL, 0], estimates.first_token_s[RECOMPUTE, 0]
    assert 0.5 < hit < 1.0
    mean_s = hit * estimates.first_token_s[LOCAL, 0] + (1 - hit) * recompute_s
    assert estimates.expected_s[LOCAL, 0] == pytest.approx(mean_s)
    assert estimates.hit_probability[RECOMPUTE].tolist() == [1.0, 1.0]
    assert estimates.hit_probability[LOCAL, 1] == 1.0  # nothing is reused there


def test_blocks_lost_from_hbm_may_still_come_from_the_store() -> None:
    view = a_fleet()
    with_store = an_estimator(network_bytes_per_s=25e9, doubt=doubt(view))
    without = an_estimator(doubt=doubt(view))
    safe, bare = estimate(view, held([500, 500], 500), with_store), estimate(view, held([500, 500]), without)
    assert safe.first_token_s[LOCAL] == pytest.approx(bare.first_token_s[LOCAL])
    assert np.all(safe.expected_s[LOCAL] < bare.expected_s[LOCAL])
    whole_s = estimate(view, held([0, 0], 500), an_estimator(network_bytes_per_s=25e9)).first_token_s[REMOTE, 0]
    assert safe.stored_s[0] == pytest.approx(whole_s)


def test_a_likely_hit_with_a_slow_miss_has_a_fine_mean_and_a_terrible_p99() -> None:
    view = a_fleet()
    known = doubt(view)
    for _ in range(400):  # nine in ten are there
        for came in (1,) * 9 + (0,):
            known.hits.reported(0, Tier.HBM, expected_blocks=1, reported_blocks=came, age_s=np.nan, now_s=0.0)
        known.spread.observe(0, observed_s=1.0, predicted_s=1.0, now_s=0.0)
    estimates = estimate(view, held([500, 0]), an_estimator(doubt=known))
    hit_s, miss_s = estimates.first_token_s[LOCAL, 0], estimates.first_token_s[RECOMPUTE, 0]
    raw, issued = estimates.quantiles_s(Path.LOCAL, 0)
    assert estimates.expected_s[LOCAL, 0] < hit_s + 0.25 * (miss_s - hit_s)
    assert raw[1] > 0.8 * miss_s
    assert np.all(np.diff(issued) >= 0)


def test_quantiles_of_the_grid_are_those_of_each_candidate() -> None:
    view = a_fleet()
    estimates = estimate(view, held([100, 300], 500), an_estimator(network_bytes_per_s=25e9, doubt=doubt(view)))
    for column, row in np.argwhere(estimates.possible):
        _raw, issued = estimates.quantiles_s(PATHS[column], int(row))
        assert estimates.quantile_grid_s[:, column, row] == pytest.approx(issued, rel=1e-4)
    assert np.isinf(estimates.quantile_grid_s[:, ~estimates.possible]).all()


def test_estimating_changes_nothing() -> None:
    view, estimator = a_fleet(), an_estimator(network_bytes_per_s=25e9)
    context = Surroundings(
        arrival_rps=2.0, mean_compute_s=0.5, mean_context_tokens=900, output_tokens=100, others_output_tokens=100
    )
    first = estimator.estimate(a_request(), held([3, 9], 20), view, context, 1.0)
    second = estimator.estimate(a_request(), held([3, 9], 20), view, context, 1.0)
    assert np.array_equal(first.first_token_s, second.first_token_s)
    assert np.array_equal(first.queue_price_s, second.queue_price_s)


def test_an_empty_prompt_is_priced_as_one_token() -> None:
    estimates = an_estimator().estimate(a_request(prompt_tokens=0), held([0, 0]), a_fleet(), quiet(), 0.0)
    assert np.isfinite(estimates.first_token_s).all()
    assert estimates.compute_s[RECOMPUTE] == pytest.approx(a_fleet().weights_s)


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [(0, 0, Path.RECOMPUTE), (16, 0, Path.RECOMPUTE), (60, 0, Path.LOCAL), (10, 60, Path.REMOTE), (50, 0, Path.LOCAL)],
)
def test_the_main_source_is_where_most_of_the_prompt_came_from(local: int, remote: int, expected: Path) -> None:
    assert main_source(local_tokens=local, remote_tokens=remote, prompt_tokens=100) is expected


def test_paths_and_columns_agree() -> None:
    assert [PATHS[COLUMN[path]] for path in Path] == list(Path)


def test_money_is_gpu_seconds_at_the_replicas_price_and_unknown_where_that_is() -> None:
    view = a_fleet("A100", "H20")
    view.usd_per_hour[0] = 1.8
    view.decode_batch[0] = 9
    estimates = estimate(view, held([500, 500]))
    own_step_s = 8448 * view.context_s_per_token[0]
    decode_s = 256 * (view.weights_s[0] / 10 + own_step_s)  # a tenth of reading the weights, and all of its own KV
    assert estimates.gpu_s[LOCAL, 0] == pytest.approx(estimates.compute_s[LOCAL, 0] + decode_s)
    assert estimates.money_usd[LOCAL, 0] == pytest.approx(1.8 / 3600 * estimates.gpu_s[LOCAL, 0])
    assert np.isnan(estimates.money_usd[:, 1]).all()
    assert np.all(estimates.money_usd[LOCAL, 0] < estimates.money_usd[RECOMPUTE, 0])


@pytest.mark.parametrize("engine_decides", [True, False])
@pytest.mark.parametrize("rows", [2, 12])
def test_a_replica_without_memory_for_what_a_fetch_brings_computes_instead(rows: int, engine_decides: bool) -> None:
    """A fetch on arrival holds memory from then on; where there is none the engine does not fetch at all."""
    view = a_fleet(*["A100"] * rows)
    for row in range(rows):
        view.has_capacity(row, 100_000)
    view.decode_context_tokens[0] = 95_000
    estimator = an_estimator(network_bytes_per_s=25e9, rows=rows, engine_decides=engine_decides)
    possible = estimate(view, held([0] * rows, 512), estimator).possible
    assert possible[:, 0].tolist() == [False, True, False]
    assert possible[REMOTE, 1:].all()


@pytest.mark.parametrize("discipline", [Discipline.SERIAL, Discipline.BLOCKING])
def test_a_fetch_in_turn_waits_for_memory_instead(discipline: Discipline) -> None:
    view = a_fleet("A100", "A100", discipline=discipline)
    view.has_capacity(0, 100_000)
    view.decode_context_tokens[0] = 95_000
    estimates = estimate(view, held([0, 0], 512), an_estimator(network_bytes_per_s=25e9))
    assert estimates.possible[REMOTE, 0]
    assert estimates.queue_s[0] > 0.0
