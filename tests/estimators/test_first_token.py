from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from estimators.first_token import (
    Discipline,
    Rest,
    Service,
    in_turn_mask,
    service,
    service_by_row,
)

ALL = pytest.mark.parametrize("discipline", list(Discipline))
PARTS = [discipline for discipline in Discipline if discipline.takes_parts]

# A prompt by hand: 500 tokens in HBM, 4,000 that can be fetched, 600 to compute in any case.
TOKEN_S, PAIR_S = 1e-4, 4e-8
HERE, FETCHED, NEW = 500, 4000, 600


def compute_s(from_token: float, to_token: float) -> float:
    """Work from one token of the prompt to another: each meets all before it, half of one at itself."""
    return TOKEN_S * (to_token - from_token) + PAIR_S * (to_token**2 - from_token**2) / 2


END = HERE + FETCHED + NEW
REST = Rest(compute_s(HERE + FETCHED, END), compute_s(HERE, END), PAIR_S * FETCHED**2 / 2)


def served(
    discipline: Discipline, queue_s: float, fetch_s: float, first_byte_s: float = 0.0, *, limit_s: float = 0.2
) -> Service:
    return service(
        discipline,
        queue_s=queue_s,
        fetch_s=fetch_s,
        first_byte_s=first_byte_s,
        rest=REST,
        layers=36,
        limit_s=limit_s,
    )


def first_s(
    discipline: Discipline, queue_s: float, fetch_s: float, first_byte_s: float = 0.0, *, limit_s: float = 0.2
) -> float:
    return float(served(discipline, queue_s, fetch_s, first_byte_s, limit_s=limit_s).first_token_s)


def a_grid(seed: int, shape: tuple[int, ...] = (4, 50)) -> dict[str, npt.NDArray[np.float64]]:
    """Random cases; a third of them fetch nothing."""
    rng = np.random.default_rng(seed)
    fetch = rng.uniform(0.0, 1.0, shape) * (rng.random(shape) > 0.33)
    return {
        "queue_s": rng.uniform(0.0, 1.0, shape) * (rng.random(shape) > 0.2),
        "fetch_s": fetch,
        "first_byte_s": fetch * rng.uniform(0.0, 0.5, shape),
        "all_s": rng.uniform(0.01, 0.3, shape),
        "spared_s": rng.uniform(0.0, 0.8, shape),
    }


def on(discipline: Discipline, grid: dict[str, npt.NDArray[np.float64]], bend: float = 0.5) -> Service:
    spared = grid["spared_s"]
    return service(
        discipline,
        queue_s=grid["queue_s"],
        fetch_s=grid["fetch_s"],
        first_byte_s=grid["first_byte_s"],
        rest=Rest(grid["all_s"], grid["all_s"] + spared, bend * spared),
        layers=36,
        limit_s=0.1,
    )


# What is left to compute.


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_rest_of_a_prefill_is_exact_for_work_in_tokens_and_pairs(share: float) -> None:
    assert float(REST.at(share)) == pytest.approx(compute_s(HERE + share * FETCHED, END), rel=1e-12)


@pytest.mark.parametrize("discipline", PARTS)
def test_a_discipline_that_takes_parts_must_be_told_what_a_part_is_worth(discipline: Discipline) -> None:
    with pytest.raises(ValueError, match="none_reused_s"):
        service(discipline, queue_s=0.0, fetch_s=1.0, first_byte_s=0.0, rest=Rest(0.1), layers=36)


# Each form.


def whole_s(discipline: Discipline, *, queue_s: float, fetch_s: float, prefill_s: float) -> float:
    got = service(discipline, queue_s=queue_s, fetch_s=fetch_s, first_byte_s=0.0, rest=Rest(prefill_s), layers=36)
    return float(got.first_token_s)


def test_a_fetch_that_overlaps_the_queue_costs_90_ms_and_one_that_waits_150() -> None:
    times_s = [
        whole_s(one, queue_s=0.080, fetch_s=0.060, prefill_s=0.010)
        for one in (Discipline.OVERLAPPED, Discipline.SERIAL)
    ]
    assert times_s == pytest.approx([0.090, 0.150])


def test_layer_by_layer_reading_of_36_layers_takes_49_2_ms() -> None:
    """AI Infra textbook, section 9.5.2: 48.3 ms of reading beside 30.9 ms of computing, layer by layer."""
    got_s = whole_s(Discipline.LAYERWISE, queue_s=0.0, fetch_s=0.0483184, prefill_s=0.0309)
    assert got_s == pytest.approx(0.0492, abs=1e-4)


def walked_layers_s(queue_s: float, fetch_s: float, first_byte_s: float, prefill_s: float, preload: int) -> float:
    """Independent route: walk 36 layers. Those past the preloaded ones are read from the turn on; a layer can start
    when it is read and the one before it is done."""
    layer_s = (fetch_s - first_byte_s) / 36
    read_s, done_s = first_byte_s, queue_s
    for layer in range(1, 37):
        read_s = (read_s if layer <= preload else max(read_s, queue_s)) + layer_s
        done_s = max(done_s, read_s) + prefill_s / 36
    return done_s


@pytest.mark.parametrize("preload", [0, 1, 5, 35, 36])
@pytest.mark.parametrize("queue_s", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("fetch_s", [0.02, 0.05, 0.4])
@pytest.mark.parametrize("prefill_s", [0.004, 0.05, 0.3])
def test_layerwise_with_any_preload_buffer_equals_walking_the_layers(
    queue_s: float, fetch_s: float, prefill_s: float, preload: int
) -> None:
    got = service(
        Discipline.LAYERWISE,
        queue_s=queue_s,
        fetch_s=fetch_s,
        first_byte_s=0.01,
        rest=Rest(prefill_s),
        layers=36,
        preload_layers=preload,
    )
    walked_s = walked_layers_s(queue_s, fetch_s, 0.01, prefill_s, preload)
    assert float(got.first_token_s) == pytest.approx(walked_s, rel=1e-9)


def test_a_preload_buffer_as_large_as_the_gap_hides_the_fetch() -> None:
    """With a long queue, layers that take longer to read than to compute need a head start of 1 - C / F of them, and
    one more layer: then the first token is Q + C. CachedAttention's rule for the size of its read buffer."""
    queue_s, fetch_s, prefill_s = 5.0, 0.36, 0.09
    needed = math.ceil(36 * (1 - prefill_s / fetch_s) + 1)

    def first(preload: int) -> float:
        return float(
            service(
                Discipline.LAYERWISE,
                queue_s=queue_s,
                fetch_s=fetch_s,
                first_byte_s=0.0,
                rest=Rest(prefill_s),
                layers=36,
                preload_layers=preload,
            ).first_token_s
        )

    assert first(needed) == pytest.approx(queue_s + prefill_s)
    assert first(needed - 2) > queue_s + prefill_s + 0.005


def test_layerwise_in_turn_is_layerwise_on_an_idle_replica_that_much_later() -> None:
    idle_s = first_s(Discipline.LAYERWISE, 0.0, 0.3, 0.01)
    assert first_s(Discipline.LAYERWISE_IN_TURN, 0.7, 0.3, 0.01) == pytest.approx(0.7 + idle_s)


def test_best_effort_computes_what_had_not_come_by_the_turn() -> None:
    """Half of the time between first and last byte has passed: half of the fetched tokens are here."""
    got = served(Discipline.BEST_EFFORT, 0.6, 1.0, 0.2)
    assert float(got.fetched_share) == pytest.approx(0.5)
    assert float(got.first_token_s) == pytest.approx(0.6 + compute_s(HERE + FETCHED / 2, END))


def test_best_effort_on_an_idle_replica_computes_everything() -> None:
    assert first_s(Discipline.BEST_EFFORT, 0.0, 1.0) == pytest.approx(compute_s(HERE, END))


def test_a_time_limited_fetch_gets_its_patience_and_no_more() -> None:
    got = served(Discipline.TIME_LIMITED, 0.4, 1.0, 0.2, limit_s=0.2)
    assert float(got.first_token_s) == pytest.approx(0.6 + compute_s(HERE + FETCHED / 2, END))
    assert float(got.ready_s) == pytest.approx(0.6)


def test_a_time_limited_fetch_that_comes_in_time_is_awaited_and_no_longer() -> None:
    assert first_s(Discipline.TIME_LIMITED, 0.9, 1.0, limit_s=0.2) == pytest.approx(
        1.0 + compute_s(HERE + FETCHED, END)
    )


def test_patience_without_end_is_overlapped_and_none_is_best_effort() -> None:
    grid = a_grid(1)
    endless, none = (
        service(
            Discipline.TIME_LIMITED,
            queue_s=grid["queue_s"],
            fetch_s=grid["fetch_s"],
            first_byte_s=grid["first_byte_s"],
            rest=Rest(grid["all_s"], grid["all_s"] + grid["spared_s"], 0.5 * grid["spared_s"]),
            layers=36,
            limit_s=limit_s,
        ).first_token_s
        for limit_s in (100.0, 0.0)
    )
    assert endless == pytest.approx(on(Discipline.OVERLAPPED, grid).first_token_s)
    assert none == pytest.approx(on(Discipline.BEST_EFFORT, grid).first_token_s)


@pytest.mark.parametrize("recompute_s", [0.1, 0.5, 3.0])
def test_two_ends_of_a_fetch_that_starts_at_the_turn_meet_as_two_workers_do(recompute_s: float) -> None:
    """C' F / (C' + F) + C: both work at their own pace on one thing."""
    got = service(
        Discipline.TWO_ENDS, queue_s=0.0, fetch_s=0.8, first_byte_s=0.0, rest=Rest(0.05, 0.05 + recompute_s), layers=36
    )
    assert float(got.first_token_s) == pytest.approx(recompute_s * 0.8 / (recompute_s + 0.8) + 0.05)


def walked_two_ends_s(queue_s: float, fetch_s: float, first_byte_s: float) -> float:
    """Independent route: compute token by token from the turn until the next one has been fetched."""
    at_s = queue_s
    for token in range(FETCHED):
        share_come = (at_s - first_byte_s) / (fetch_s - first_byte_s)
        if token >= FETCHED * (1.0 - min(1.0, max(0.0, share_come))):
            break
        at_s += compute_s(HERE + token, HERE + token + 1)
    return at_s + compute_s(HERE + FETCHED, END)


@pytest.mark.parametrize("queue_s", [0.0, 0.1, 0.4, 2.0])
@pytest.mark.parametrize(("fetch_s", "first_byte_s"), [(0.05, 0.01), (0.5, 0.0), (0.5, 0.3), (1.5, 0.2), (9.0, 8.0)])
def test_two_ends_meet_where_a_walk_over_the_tokens_does(queue_s: float, fetch_s: float, first_byte_s: float) -> None:
    walked_s = walked_two_ends_s(queue_s, fetch_s, first_byte_s)
    got_s = first_s(Discipline.TWO_ENDS, queue_s, fetch_s, first_byte_s)
    assert got_s == pytest.approx(walked_s, abs=2 * compute_s(END - 1, END))


def walked_in_steps_s(queue_s: float, fetch_s: float, first_byte_s: float, step: int) -> float:
    """Independent route: step by step from the turn, each of what is missing then or of `step` tokens."""
    at_s, done = queue_s, 0.0
    while True:
        come = min(1.0, max(0.0, (at_s - first_byte_s) / (fetch_s - first_byte_s)))
        missing = FETCHED * (1.0 - come) - done
        if missing <= 1e-9:
            return at_s + compute_s(HERE + FETCHED, END)
        tokens = min(step, missing)
        at_s += compute_s(HERE + done, HERE + done + tokens)
        done += tokens


@pytest.mark.parametrize("step", [100, 1024, 3000, 9000])
@pytest.mark.parametrize("queue_s", [0.0, 0.1, 0.4, 2.0])
@pytest.mark.parametrize(("fetch_s", "first_byte_s"), [(0.05, 0.01), (0.5, 0.0), (0.5, 0.3), (1.5, 0.2), (9.0, 8.0)])
def test_two_ends_meet_at_the_end_of_a_step(queue_s: float, fetch_s: float, first_byte_s: float, step: int) -> None:
    rest = Rest(REST.all_reused_s, REST.none_reused_s, REST.bend_s, step_share=step / FETCHED)
    got = service(
        Discipline.TWO_ENDS, queue_s=queue_s, fetch_s=fetch_s, first_byte_s=first_byte_s, rest=rest, layers=36
    )
    assert float(got.first_token_s) == pytest.approx(walked_in_steps_s(queue_s, fetch_s, first_byte_s, step), rel=1e-9)


# Laws.


@ALL
def test_without_a_fetch_every_discipline_is_queue_plus_compute(discipline: Discipline) -> None:
    grid = a_grid(2)
    grid["fetch_s"] = np.zeros_like(grid["fetch_s"])
    grid["first_byte_s"] = np.zeros_like(grid["fetch_s"])
    got = on(discipline, grid)
    assert got.first_token_s == pytest.approx(grid["queue_s"] + grid["all_s"])
    assert np.all(got.ready_s <= 0.0)
    assert np.all(got.fetched_share == 1.0)


@ALL
def test_what_is_booked_gives_the_first_token(discipline: Discipline) -> None:
    grid = a_grid(3)
    got = on(discipline, grid)
    assert got.first_token_s == pytest.approx(np.maximum(grid["queue_s"], got.ready_s) + got.work_s)
    assert np.all(got.held_from_s >= grid["queue_s"])
    assert np.all(got.held_from_s <= got.first_token_s)


@ALL
@pytest.mark.parametrize("worse", ["queue_s", "all_s", "spared_s"])
def test_more_queue_or_work_never_brings_the_first_token_earlier(discipline: Discipline, worse: str) -> None:
    """But for one thing: an engine that takes what has come gains from a longer queue where fetching is faster than
    computing, so those are asked about fetches slower than that."""
    grid = a_grid(5)
    more = {**grid, worse: grid[worse] + a_grid(6)[worse]}
    if discipline in (Discipline.BEST_EFFORT, Discipline.TIME_LIMITED) and worse == "queue_s":
        more["spared_s"] = grid["spared_s"] = np.minimum(grid["spared_s"], grid["fetch_s"] - grid["first_byte_s"])
    assert np.all(on(discipline, more, 0.0).first_token_s >= on(discipline, grid, 0.0).first_token_s - 1e-12)


@ALL
def test_a_slower_fetch_never_brings_the_first_token_earlier(discipline: Discipline) -> None:
    grid = a_grid(7)
    slower = {**grid, "fetch_s": grid["fetch_s"] * 1.5, "first_byte_s": grid["first_byte_s"] * 1.5}
    assert np.all(on(discipline, slower).first_token_s >= on(discipline, grid).first_token_s - 1e-12)


def test_two_ends_is_never_later_than_waiting_or_than_best_effort() -> None:
    grid = a_grid(8)
    both = on(Discipline.TWO_ENDS, grid).first_token_s
    assert np.all(both <= on(Discipline.OVERLAPPED, grid).first_token_s + 1e-12)
    assert np.all(both <= on(Discipline.BEST_EFFORT, grid).first_token_s + 1e-12)


def test_overlapped_is_never_later_than_serial_and_layerwise_never_later_than_either() -> None:
    grid = a_grid(9)
    times = [on(one, grid).first_token_s for one in (Discipline.LAYERWISE, Discipline.OVERLAPPED, Discipline.SERIAL)]
    assert np.all(times[0] <= times[1] + 1e-12)
    assert np.all(times[1] <= times[2] + 1e-12)


def test_blocking_is_serial_for_its_own_request_and_holds_the_gpu_from_the_turn() -> None:
    grid = a_grid(10)
    blocking, serial = on(Discipline.BLOCKING, grid), on(Discipline.SERIAL, grid)
    assert blocking.first_token_s == pytest.approx(serial.first_token_s)
    assert blocking.held_from_s == pytest.approx(grid["queue_s"])
    assert blocking.work_s == pytest.approx(serial.work_s + grid["fetch_s"])


def test_layer_by_layer_the_gpu_is_held_from_the_first_layer_on() -> None:
    got = served(Discipline.LAYERWISE, 0.0, 3.6, 0.0)
    assert float(got.held_from_s) == pytest.approx(0.1)
    assert float(got.first_token_s - got.held_from_s) > float(got.work_s) * 5


# A fleet of several disciplines.


def test_each_row_of_a_mixed_fleet_is_served_by_its_own_discipline() -> None:
    rows = len(Discipline)
    grid = a_grid(11, (3, rows))
    rest = Rest(grid["all_s"], grid["all_s"] + grid["spared_s"], 0.5 * grid["spared_s"], step_share=grid["spared_s"])
    limits_s = np.linspace(0.05, 0.4, rows)

    def by_row(disciplines: list[Discipline]) -> Service:
        return service_by_row(
            disciplines,
            queue_s=grid["queue_s"],
            fetch_s=grid["fetch_s"],
            first_byte_s=grid["first_byte_s"],
            rest=rest,
            layers=36,
            limit_s=limits_s,
        )

    mixed = by_row(list(Discipline))
    for row, discipline in enumerate(Discipline):
        alone = by_row([discipline] * rows)
        for name in ("first_token_s", "ready_s", "work_s", "held_from_s", "fetched_share"):
            assert np.array_equal(getattr(mixed, name)[:, row], getattr(alone, name)[:, row]), (discipline, name)


def test_a_mixed_fleet_needs_one_discipline_for_each_row() -> None:
    with pytest.raises(ValueError, match="disciplines"):
        service_by_row(
            [Discipline.SERIAL, Discipline.OVERLAPPED],
            queue_s=np.zeros(3),
            fetch_s=np.zeros(3),
            first_byte_s=np.zeros(3),
            rest=Rest(np.ones(3)),
            layers=36,
        )


def test_fetches_that_start_at_the_turn_are_known_by_their_discipline() -> None:
    in_turn = [one for one, turned in zip(Discipline, in_turn_mask(list(Discipline)), strict=True) if turned]
    assert in_turn == [Discipline.SERIAL, Discipline.BLOCKING, Discipline.LAYERWISE_IN_TURN]


@pytest.mark.parametrize(("layers", "preload"), [(0, None), (36, -1), (36, 37)])
def test_layers_out_of_range_are_refused(layers: int, preload: int | None) -> None:
    with pytest.raises(ValueError, match="layers"):
        service(
            Discipline.LAYERWISE,
            queue_s=0.0,
            fetch_s=1.0,
            first_byte_s=0.0,
            rest=Rest(0.1),
            layers=layers,
            preload_layers=preload,
        )
