"""What outcomes teach, told directly: bookings in, estimates and the learned columns of the view out."""

from __future__ import annotations

import numpy as np
import pytest

from estimators.paths import Path
from estimators.prefill_features import prior_coefficients
from router.actions import Ended
from router.learning import CALIBRATED_SAMPLES, MODELS_APART, PrefixCounters, computed_by
from tests.builders import a_request, held
from tests.router.learning_bench import LearningBench

# Prefill


def test_first_tokens_correct_the_replica_they_came_from() -> None:
    bench = LearningBench("A100", "A100")
    bench.taught(2.0, row=1)
    assert bench.compute_s(1) == pytest.approx(2.0, rel=0.05)
    assert np.array_equal(bench.view.coefficients[0], prior_coefficients())
    assert bench.view.samples.tolist() == [0, 30]


@pytest.mark.parametrize(("samples", "state"), [(0, "uncalibrated"), (CALIBRATED_SAMPLES, "calibrated")])
def test_times_are_calibrated_once_they_rest_on_observations(samples: int, state: str) -> None:
    assert LearningBench().learning.calibration_state(samples) == state


def test_a_first_token_that_somebody_elses_queue_delayed_teaches_nothing() -> None:
    bench = LearningBench()
    bench.view.foreign_waiting[0] = 3.0
    bench.taught(4.0)
    assert bench.view.samples[0] == 0


def test_a_first_token_from_a_replica_whose_memory_is_full_teaches_nothing() -> None:
    bench = LearningBench()
    bench.view.kv_used_share[0] = 0.99
    bench.taught(4.0)
    assert bench.view.samples[0] == 0
    bench.view.kv_used_share[0] = np.nan  # unknown is taken for free
    bench.taught(4.0, start_s=1e5)
    assert bench.view.samples[0] == 30


def test_failed_and_cancelled_requests_teach_no_times_and_no_lengths() -> None:
    bench = LearningBench()
    for index in range(30):
        booking = bench.place(100.0 * index)
        bench.first_token(booking, 100.0 * index + 4.0)
        bench.end(booking, 100.0 * index + 5.0)
    assert bench.view.samples[0] == 0
    assert bench.output_tokens() == pytest.approx(256, rel=0.02)


@pytest.mark.parametrize(
    ("exact", "reported_prompt", "reported_reuse", "computed"),
    [
        (True, None, None, (256.0, 8192.0)),  # the booking's own expectation
        (True, None, 4096, (4352.0, 4096.0)),
        (True, 9999, 0, (8448.0, 0.0)),  # counted tokens are not corrected
        (True, None, 10**9, (1.0, 8447.0)),
        (False, 3000, 1000, (2000.0, 1000.0)),
        (False, 3000, None, None),
        (False, None, 1000, None),
    ],
)
def test_what_was_computed_is_the_engines_word_else_an_exact_prompts_expectation(
    exact: bool, reported_prompt: int | None, reported_reuse: int | None, computed: tuple[float, float] | None
) -> None:
    booking = LearningBench().place(path=Path.LOCAL, where=held([512]), prompt_exact=exact)
    found = computed_by(booking, Ended(200, prompt_tokens=reported_prompt, cached_tokens=reported_reuse))
    assert (None if found is None else (found.new_tokens, found.reused_tokens)) == computed


# Pace, and answers that are not streamed


def test_the_pace_is_that_of_the_tokens_after_the_first() -> None:
    bench = LearningBench()
    for index in range(60):
        booking = bench.place(100.0 * index, prompt_tokens=16)
        bench.first_token(booking, 100.0 * index + 0.05)
        step_s = float(
            bench.view.weights_s[0] + bench.view.decode_context_tokens[0] * bench.view.context_s_per_token[0]
        )
        bench.answer(booking, 100.0 * index + 0.05 + 99 * 3.0 * step_s)
    assert bench.view.pace_scale[0] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_answer_of_one_token_has_no_pace(tokens: int) -> None:
    bench = LearningBench()
    booking = bench.place(0.0)
    bench.first_token(booking, 1.0)
    bench.answer(booking, 60.0, output_tokens=tokens)
    assert bench.view.pace_scale[0] == 1.0


def silent_answers(bench: LearningBench, slower: float, *, count: int, output_tokens: int) -> None:
    """Answers that are not streamed, alone on a replica that is `slower` than its roofline at everything."""
    ideal = LearningBench()
    ideal_s = ideal.compute_s()
    step_s = float(ideal.view.weights_s[0] + (8448 + 128) * ideal.view.context_s_per_token[0])
    for index in range(count):
        now_s = 1000.0 * index
        booking = bench.place(now_s, streams=False)
        took_s = slower * (ideal_s + (output_tokens - 1) * step_s)
        bench.ledger.settle(now_s + took_s)
        bench.answer(booking, now_s + took_s, output_tokens=output_tokens)


def test_whole_answers_move_prefill_and_pace_towards_a_slower_replica() -> None:
    bench = LearningBench()
    silent_answers(bench, 2.0, count=1, output_tokens=100)
    after_one = float(bench.view.coefficients[0, 0]), float(bench.view.pace_scale[0])
    assert all(1.0 < scale < 1.1 for scale in after_one)
    silent_answers(bench, 2.0, count=60, output_tokens=100)
    step_s = float(bench.view.weights_s[0] + (8448 + 128) * bench.view.context_s_per_token[0])
    expected_s = bench.compute_s() + 99 * float(bench.view.pace_scale[0]) * step_s
    ideal_s = LearningBench().compute_s() + 99 * step_s
    assert expected_s == pytest.approx(2.0 * ideal_s, rel=0.1)


def test_a_whole_answer_of_one_token_is_all_prefill() -> None:
    bench = LearningBench()
    silent_answers(bench, 2.0, count=5, output_tokens=1)
    assert bench.view.coefficients[0, 0] > 1.1
    assert bench.view.pace_scale[0] == 1.0


def test_whole_answers_move_little_where_first_tokens_were_seen() -> None:
    bench = LearningBench()
    bench.taught(LearningBench().compute_s(), count=60)
    before_s, unseen = bench.compute_s(), LearningBench()
    for one in (bench, unseen):
        silent_answers(one, 2.0, count=1, output_tokens=1)
    moved, freely = bench.compute_s() / before_s - 1.0, unseen.compute_s() / LearningBench().compute_s() - 1.0
    assert 0.0 < moved < freely / 5


# Lengths


def test_an_answer_cut_off_by_its_limit_is_known_to_be_longer_than_what_came() -> None:
    cut, ended = LearningBench(), LearningBench()
    for index in range(200):
        for bench, limit in ((cut, 50), (ended, 4000)):
            booking = bench.place(10.0 * index, max_tokens=limit)
            bench.first_token(booking, 10.0 * index + 1.0)
            bench.answer(booking, 10.0 * index + 2.0, output_tokens=50)
    assert ended.output_tokens() == pytest.approx(50, rel=0.2)
    assert cut.output_tokens() > 2 * ended.output_tokens()
    assert cut.output_tokens(max_tokens=50) <= 50


def test_lengths_are_learned_for_each_conversation_apart() -> None:
    bench = LearningBench()
    for index in range(30):
        for session, tokens in (("long", 900), ("short", 20)):
            booking = bench.place(10.0 * index, session=session, streams=False)
            bench.answer(booking, 10.0 * index + 2.0, output_tokens=tokens)
    assert bench.output_tokens(session="long") > 700
    assert bench.output_tokens(session="short") < 100


def test_what_a_running_answer_has_yet_to_bring_is_within_the_clients_limit() -> None:
    learning = LearningBench().learning
    assert learning.remaining_tokens(a_request(max_tokens=7)) <= 7
    assert learning.remaining_tokens(a_request()) == pytest.approx(256, rel=0.02)


def test_a_text_prompts_characters_are_learned_from_the_engines_count() -> None:
    bench = LearningBench()
    for index in range(200):
        booking = bench.place(10.0 * index, prompt_exact=False, prompt_characters=6000)
        bench.answer(booking, 10.0 * index + 1.0, prompt_tokens=3000)
    assert bench.characters.tokens_in(4000) == pytest.approx(2000, rel=0.05)


# Traffic


def test_a_rate_is_that_at_one_replica() -> None:
    bench = LearningBench()
    for index in range(400):
        bench.learning.arrived(a_request(), 0.1 * index)
    one, four = (bench.learning.surroundings(a_request(), replicas, 40.0).arrival_rps for replicas in (1, 4))
    assert one == pytest.approx(10.0, rel=0.1)
    assert four == pytest.approx(one / 4)


def test_models_are_learned_apart_up_to_a_bound_that_clients_cannot_exceed() -> None:
    bench = LearningBench()
    for index in range(3 * MODELS_APART):
        bench.learning.arrived(a_request(model=f"m-{index}"), float(index))
    assert len(bench.learning._traffic) <= MODELS_APART + 1


# Memory and counters


def test_occupancy_follows_memory_in_use_over_the_context_booked() -> None:
    bench = LearningBench()
    bench.view.has_capacity(0, 100_000.0)
    for index in range(4):
        bench.first_token(bench.place(float(index)), index + 0.9)
    in_service = bench.place(10.0)
    booked = float(bench.view.decode_context_tokens[0]) + in_service.request.prompt_tokens
    for _ in range(100):
        bench.learning.kv_used(0, 0.6 * booked / 100_000)
    assert bench.view.occupancy[0] == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(("share", "bound"), [(0.0, 0.1), (1.0, 1.5)])
def test_occupancy_stays_within_what_is_plausible(share: float, bound: float) -> None:
    bench = LearningBench()
    bench.view.has_capacity(0, 100_000.0)
    bench.first_token(bench.place(0.0), 0.9)
    for _ in range(200):
        bench.learning.kv_used(0, share)
    assert bench.view.occupancy[0] == pytest.approx(bound, abs=0.01)


@pytest.mark.parametrize("capacity_tokens", [None, 1e7])
def test_memory_in_use_teaches_nothing_without_a_capacity_or_with_hardly_anything_booked(
    capacity_tokens: float | None,
) -> None:
    bench = LearningBench()
    if capacity_tokens is not None:
        bench.view.has_capacity(0, capacity_tokens)
    bench.first_token(bench.place(0.0), 0.9)
    bench.learning.kv_used(0, 0.5)
    assert bench.view.occupancy[0] == 1.0


def counted(bench: LearningBench, hit_share: float, *, restart: bool = False) -> None:
    """Ten requests that should have hit, between two reports of the replica's counters."""
    bench.learning.counted(0, PrefixCounters(queries=1e6, hits=5e5), 0.0)
    for index in range(10):
        booking = bench.place(float(index), path=Path.LOCAL, where=held([512] * bench.view.rows))
        bench.first_token(booking, index + 0.1)
        bench.answer(booking, index + 0.5)
    start = PrefixCounters(0.0, 0.0) if restart else PrefixCounters(1e6, 5e5)
    after = PrefixCounters(start.queries + 10 * 8448, start.hits + hit_share * 10 * 8192)
    bench.learning.counted(0, after, 11.0)


def test_growth_of_the_counters_tells_hits_from_misses() -> None:
    hit, missed, before = LearningBench(), LearningBench(), LearningBench().survival()
    counted(hit, 1.0)
    counted(missed, 0.0)
    assert missed.survival() < before - 0.2
    assert hit.survival() > missed.survival() + 0.4


def test_counters_that_went_back_are_those_of_a_new_process_and_teach_nothing() -> None:
    by_counters, without = LearningBench(), LearningBench()
    counted(by_counters, 0.0, restart=True)
    for index in range(10):
        booking = without.place(float(index), path=Path.LOCAL, where=held([512]))
        without.first_token(booking, index + 0.1)
        without.answer(booking, index + 0.5)
    assert by_counters.survival() == without.survival()


def test_counters_mean_nothing_to_who_doubts_nothing() -> None:
    bench = LearningBench(doubts=False)
    counted(bench, 0.0)
    assert bench.estimate(a_request(), 20.0, held([512])).hit_probability.min() == 1.0


def test_a_replica_that_restarted_is_believed_as_at_the_start_again() -> None:
    bench, fresh = LearningBench("A100", "A100"), LearningBench("A100", "A100")
    counted(bench, 0.0)
    assert bench.survival() < bench.survival(1)
    bench.learning.restarted(0)
    assert bench.survival() == pytest.approx(bench.survival(1))
    assert fresh.survival() > bench.survival()  # what the fleet as a whole saw stays


def test_the_evidence_of_a_booking_is_that_of_its_weakest_tier() -> None:
    bench = LearningBench()
    where = held([100], 512)
    for index in range(20):
        booking = bench.place(10.0 * index, path=Path.REMOTE, where=where)
        bench.first_token(booking, 10.0 * index + 0.2)
        bench.answer(booking, 10.0 * index + 1.0, cached_tokens=1000)  # breaks in HBM: nothing about the store
    both = bench.place(300.0, path=Path.REMOTE, where=where)
    local = bench.place(300.0, path=Path.LOCAL, where=where)
    assert bench.learning.evidence_of(local, 300.0) == "reported"
    assert bench.learning.evidence_of(both, 300.0) == "none"
    assert bench.learning.evidence_of(bench.place(300.0), 300.0) is None
