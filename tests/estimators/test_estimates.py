from __future__ import annotations

import numpy as np
import pytest

from estimators.estimates import Surroundings
from estimators.first_token import Discipline
from estimators.hardware import CARDS
from estimators.paths import COLUMN, PATHS, Path, main_source
from estimators.roofline import rates_of
from estimators.shapes import QWEN3_8B
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
            assert estimates.compute_s[row, column] == pytest.approx(scalar_s, rel=1e-12)
            assert estimates.reused_tokens[row, column] == cached


def test_an_engine_that_decides_by_itself_has_exactly_one_path_on_each_replica() -> None:
    view = a_fleet("A100", "A100", "A100")
    estimator = an_estimator(network_bytes_per_s=25e9, minimum_fetch_tokens=512, rows=3)
    estimates = estimate(view, held([0, 490, 510], 510), estimator)
    assert [estimates.path_at(row) for row in range(3)] == [Path.REMOTE, Path.LOCAL, Path.LOCAL]
    assert estimates.possible.sum(axis=1).tolist() == [1, 1, 1]


def test_without_a_store_nothing_is_remote() -> None:
    estimates = estimate(a_fleet(), held([0, 10], store_blocks=500))
    assert not estimates.possible[:, REMOTE].any()
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
    all_of_it, half_of_it = estimate(a_fleet(), held([0, 256], 512), estimator).fetch_s[:, REMOTE] - 0.010
    assert half_of_it == pytest.approx(all_of_it / 2)


def test_a_booked_fetch_delays_the_next_one_over_the_shared_link() -> None:
    estimator = an_estimator(network_bytes_per_s=25e9)
    before = estimate(a_fleet(), held([0, 0], 512), estimator).fetch_s[1, REMOTE]
    estimator.stages[0][0].promise(2.5e9, 0.0)
    after = estimate(a_fleet(), held([0, 0], 512), estimator).fetch_s[1, REMOTE]
    assert after > before + 0.08


def test_a_serial_fetch_starts_after_the_queue_and_finds_the_link_as_it_is_then() -> None:
    view = a_fleet()
    view.head_ends_s[0] = view.head_compute_s[0] = 0.5
    estimator = an_estimator(network_bytes_per_s=25e9, discipline=Discipline.SERIAL)
    estimator.stages[0][0].promise(10e9, 0.0)  # busy for 0.4 s: over when the request's turn comes
    estimates = estimate(view, held([0, 0], 512), estimator)
    alone_s = 0.010 + 2 * 512 * 16 * QWEN3_8B.kv_bytes_per_token / 25e9
    assert estimates.fetch_s[0, REMOTE] == pytest.approx(alone_s)
    assert estimates.ready_s[0, REMOTE] == pytest.approx(0.5 + alone_s)


@pytest.mark.parametrize("discipline", list(Discipline))
def test_the_earliest_start_plus_compute_is_the_first_token(discipline: Discipline) -> None:
    """What the ledger books must be what the estimate promised, whichever of queue and fetch decides."""
    for backlog_s in (0.0, 0.05, 2.0):
        view = a_fleet()
        view.head_ends_s[0] = view.head_compute_s[0] = backlog_s
        estimator = an_estimator(network_bytes_per_s=2e9, discipline=discipline)
        estimates = estimate(view, held([0, 0], 512), estimator)
        start_s = max(float(estimates.queue_s[0]), float(estimates.ready_s[0, REMOTE]))
        first_s = start_s + float(estimates.compute_s[0, REMOTE])
        assert first_s == pytest.approx(float(estimates.first_token_s[0, REMOTE]))


def test_features_at_one_replica_are_those_of_the_grid() -> None:
    view, estimator = a_fleet("A100", "H20"), an_estimator(network_bytes_per_s=25e9, engine_decides=False)
    estimates = estimate(view, held([100, 300], 500), estimator)
    at = estimator.features_at(1, new_tokens=8448 - 4800, cached_tokens=4800, view=view)
    assert at == pytest.approx(estimates.features[1, LOCAL])


@pytest.mark.parametrize("discipline", list(Discipline))
def test_every_discipline_agrees_on_an_idle_replica_within_its_fetch(discipline: Discipline) -> None:
    estimates = estimate(a_fleet(), held([0, 0], 512), an_estimator(network_bytes_per_s=25e9, discipline=discipline))
    fetch_s, compute_s = estimates.fetch_s[0, REMOTE], estimates.compute_s[0, REMOTE]
    assert max(fetch_s, compute_s) <= estimates.first_token_s[0, REMOTE] <= fetch_s + compute_s + 1e-12


def test_running_decodes_slow_a_prefill_and_lengthen_the_pace() -> None:
    idle, busy = a_fleet(), a_fleet()
    busy.decode_batch[:], busy.decode_context_tokens[:] = 16, 160_000
    quiet_one, loud_one = estimate(idle, held([0, 0])), estimate(busy, held([0, 0]))
    steps = np.ceil(8448 / 2048)
    share_s = 160_000 * idle.context_s_per_token[0]
    assert loud_one.compute_s[0, RECOMPUTE] == pytest.approx(quiet_one.compute_s[0, RECOMPUTE] + steps * share_s)
    assert np.all(loud_one.pace_s > quiet_one.pace_s)
    assert np.all(loud_one.decode_price_s > quiet_one.decode_price_s)


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
    assert np.all(estimates.compute_s == a_fleet().weights_s[:, None])


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [(0, 0, Path.RECOMPUTE), (16, 0, Path.RECOMPUTE), (60, 0, Path.LOCAL), (10, 60, Path.REMOTE), (50, 0, Path.LOCAL)],
)
def test_the_main_source_is_where_most_of_the_prompt_came_from(local: int, remote: int, expected: Path) -> None:
    assert main_source(local_tokens=local, remote_tokens=remote, prompt_tokens=100) is expected


def test_paths_and_columns_agree() -> None:
    assert [PATHS[COLUMN[path]] for path in Path] == list(Path)
