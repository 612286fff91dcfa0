"""What a dispatcher hears of replicas and outcomes, and how the next receipts show it."""

from __future__ import annotations

import numpy as np
import pytest

from estimators.first_token import Discipline
from estimators.paths import Path
from estimators.prefill_features import prior_coefficients
from router.learning import CALIBRATED_SAMPLES, PrefixCounters
from router.placing import Placement
from router.receipts import Candidate
from tests.builders import MODEL, held
from tests.router.dispatch_bench import (
    Bench,
    Takes,
    booking_of,
)

# Traffic, pace and lengths


def test_the_price_of_work_is_fed_by_traffic_at_one_replica() -> None:
    bench = Bench("A100", "A100", policy="e2e")
    for index in range(200):
        sent = bench.send(0.1 * index, request_id=f"r-{index}")
        bench.dispatcher.first_token(sent, 0.1 * index + 0.05)
        bench.finish(sent, 0.1 * index + 0.06)
    receipt = bench.receipts[-1]
    assert receipt.arrival_rps == pytest.approx(5.0, rel=0.15)  # ten a second over two replicas
    assert receipt.mean_compute_s is not None
    assert receipt.mean_compute_s > 0
    assert receipt.choice is not None
    assert receipt.choice.queue_price_s > 0


def test_two_models_do_not_share_their_traffic() -> None:
    bench = Bench("A100", "A100")
    bench.dispatcher.replica_up(1, frozenset({"other"}), 0.0)
    for index in range(100):
        bench.finish(bench.send(0.1 * index, request_id=f"r-{index}"), 0.1 * index)
    bench.finish(bench.send(10.0, request_id="o", model="other"), 10.1)
    assert bench.receipts[-1].arrival_rps == 0.0
    assert bench.receipts[-2].arrival_rps == pytest.approx(10.0, rel=0.15)


def test_the_pace_is_learned_from_answers_and_used_in_the_next_estimate() -> None:
    bench = Bench("A100")
    ideal_s = float(bench.view.weights_s[0])
    for index in range(40):
        sent = bench.send(10.0 * index, request_id=f"r-{index}", prompt_tokens=16)
        bench.dispatcher.first_token(sent, 10.0 * index + 0.01)
        bench.finish(sent, 10.0 * index + 0.01 + 99 * 4 * ideal_s)
    first, last = bench.receipts[0].choice, bench.receipts[-1].choice
    assert first is not None
    assert last is not None
    assert last.pace_s == pytest.approx(4 * first.pace_s, rel=0.2)


def test_streams_without_usage_teach_length_and_pace_by_their_events() -> None:
    bench = Bench("A100")
    for index in range(200):
        sent = bench.send(float(index), request_id=f"r-{index}")
        bench.dispatcher.first_token(sent, index + 0.5)
        bench.finish(sent, index + 0.9, output_tokens=None, events=30)
    assert booking_of(bench.send(999.0)).output_tokens == pytest.approx(30, rel=0.3)
    assert bench.view.pace_scale[0] != 1.0


def test_a_text_prompt_teaches_only_when_the_engine_says_what_it_reused() -> None:
    bench = Bench("A100")
    for index in range(20):
        sent = bench.send(10.0 * index, request_id=f"r-{index}", prompt_exact=False, prompt_characters=9000)
        bench.dispatcher.first_token(sent, 10.0 * index + 3.0)
        bench.finish(sent, 10.0 * index + 5.0, prompt_tokens=2000)
    assert np.array_equal(bench.view.coefficients[0], prior_coefficients())
    assert bench.view.samples[0] == 0
    for index in range(40):
        sent = bench.send(500 + 10.0 * index, request_id=f"s-{index}", prompt_exact=False, prompt_characters=9000)
        bench.dispatcher.first_token(sent, 500 + 10.0 * index + 0.4)
        bench.finish(sent, 500 + 10.0 * index + 5.0, prompt_tokens=2000, cached_tokens=0)
    assert bench.chosen(1000.0, prompt_tokens=2000).compute_s == pytest.approx(0.4, rel=0.1)


def test_hits_the_router_did_not_know_of_are_not_taken_for_a_faster_gpu() -> None:
    """The engine reuses 90 % and says so; the replica computes the rest exactly at the roofline."""
    bench = Bench("A100")
    took_s = sum(bench.estimator.work_s(0, 800, 7200, bench.view)) + float(bench.view.head_s[0])
    for index in range(60):
        sent = bench.send(10.0 * index, request_id=f"r-{index}", prompt_tokens=8000)
        bench.dispatcher.first_token(sent, 10.0 * index + took_s)
        bench.finish(sent, 10.0 * index + 5.0, cached_tokens=7200)
    assert bench.view.coefficients[0, 0] == pytest.approx(1.0, abs=0.1)


def test_aliases_and_adapters_of_one_model_share_its_traffic() -> None:
    bench = Bench("A100")
    bench.dispatcher.replica_up(0, frozenset({MODEL, "alias", "lora"}), 0.0)
    for index in range(150):
        name = (MODEL, "alias", "lora")[index % 3]
        sent = bench.send(0.1 * index, request_id=f"r-{index}", model=name, base_model=MODEL)
        bench.finish(sent, 0.1 * index)
    assert bench.receipts[-1].arrival_rps == pytest.approx(10.0, rel=0.15)


def test_first_tokens_teach_how_fast_a_replica_really_is() -> None:
    """The replica takes 1.5 times what the roofline says; after some requests the estimate follows."""
    bench = Bench("A100")
    now_s = 0.0
    for index in range(60):
        sent = bench.send(now_s, request_id=f"r-{index}", prompt_tokens=2000 + 211 * (index % 17))
        roofline_s = booking_of(sent).linear_s + booking_of(sent).attention_s
        bench.dispatcher.first_token(sent, now_s + 1.5 * roofline_s)
        now_s += 1.5 * roofline_s + 1.0
        bench.finish(sent, now_s)
    errors = [
        abs(receipt.choice.first_token_s - receipt.first_token_s) / receipt.first_token_s
        for receipt in bench.receipts[-20:]
        if receipt.choice is not None and receipt.first_token_s is not None
    ]
    assert np.median(errors) < 0.05


def test_output_lengths_are_learned_from_usage() -> None:
    bench = Bench("A100")
    for index in range(300):
        bench.finish(bench.send(float(index), request_id=f"r-{index}"), index + 0.9, output_tokens=20)
    booking = booking_of(bench.send(999.0))
    assert booking.output_tokens == pytest.approx(20, rel=0.2)


# What replicas report


def test_load_of_others_is_what_a_replica_reports_beyond_our_own_bookings() -> None:
    bench = Bench("A100", "A100")
    on_first = sum(bench.send(0.0, request_id=f"r-{i}").row == 0 for i in range(4))
    bench.report(0, running=5.0, waiting=2.0 + on_first, sent_s=0.5)
    assert (bench.view.foreign_waiting[0], bench.view.foreign_decoding[0]) == (2, 5)
    assert bench.view.sampled_at_s[0] == 0.6


def test_our_own_request_that_ended_during_a_poll_is_not_taken_for_foreign() -> None:
    bench = Bench("A100")
    bench.finish(bench.send(0.0), 1.05)
    bench.report(0, running=1.0, waiting=0.0, sent_s=1.0)
    assert bench.view.foreign_waiting[0] + bench.view.foreign_decoding[0] == 0


def test_a_report_that_stops_coming_keeps_its_value_and_shows_its_age() -> None:
    bench = Bench("A100", "A100")
    bench.report(0, running=9.0, waiting=9.0, sent_s=0.5)
    bench.finish(bench.send(60.0), 61.0)
    assert bench.view.foreign_waiting[0] == 9
    assert bench.receipts[0].candidates[0].signal_age_s == pytest.approx(59.4)


def test_a_report_without_numbers_is_unknown_and_not_an_idle_replica() -> None:
    bench = Bench("A100")
    bench.report(0, running=2.0, waiting=None, sent_s=0.0)
    assert np.isnan(bench.view.foreign_waiting[0])
    bench.finish(bench.send(0.2), 1.0)
    assert bench.receipts[0].choice is not None
    assert bench.receipts[0].choice.signal_age_s is None


def test_a_prompt_that_does_not_fit_beside_what_is_booked_waits_for_memory() -> None:
    """Little's law: U tokens in use, given back within one mean rest of an answer, until m more fit under K."""

    def third(capacity_tokens: float | None) -> Candidate:
        bench = Bench("A100")
        if capacity_tokens is not None:
            bench.dispatcher.capacity_reported(0, capacity_tokens)
        for index in range(2):
            bench.dispatcher.first_token(bench.send(10.0 * index, request_id=f"r-{index}"), 10.0 * index + 1.0)
        return bench.chosen(20.0)

    unknown, ample, small = third(None), third(1e6), third(20_000.0)
    assert ample.queue_s == unknown.queue_s < 0.01
    in_use, needed, rest_s = 2 * (8448 + 128), 8448, 256 * small.pace_s
    assert small.queue_s == pytest.approx((in_use + needed - 20_000) * rest_s / in_use, rel=0.02)
    assert small.first_token_s == pytest.approx(small.queue_s + small.compute_s)


def test_a_replica_that_is_out_of_memory_loses_the_request_to_one_that_is_not() -> None:
    bench = Bench("A100", "A100")
    bench.dispatcher.capacity_reported(0, 9_000.0)
    bench.dispatcher.capacity_reported(1, 1e6)
    rows = []
    for index in range(4):
        sent = bench.send(10.0 * index, request_id=f"r-{index}")
        bench.dispatcher.first_token(sent, 10.0 * index + 1.0)
        rows.append(sent.row)
    assert rows.count(0) <= 1


def test_memory_in_use_is_unknown_until_it_is_reported_and_again_when_it_is_not() -> None:
    bench = Bench("A100")
    assert np.isnan(bench.view.kv_used_share[0])
    bench.report(0, running=0.0, waiting=0.0, sent_s=0.0, kv_used_share=0.4)
    assert bench.view.kv_used_share[0] == 0.4
    bench.report(0, running=0.0, waiting=0.0, sent_s=1.0)
    assert np.isnan(bench.view.kv_used_share[0])
    bench.report(0, running=0.0, waiting=0.0, sent_s=2.0, kv_used_share=0.4)
    bench.dispatcher.replica_down(0)
    assert np.isnan(bench.view.kv_used_share[0])


def test_memory_in_use_teaches_how_much_of_what_is_booked_is_shared() -> None:
    bench = Bench("A100")
    bench.dispatcher.capacity_reported(0, 100_000.0)
    for index in range(5):
        bench.dispatcher.first_token(bench.send(float(index), request_id=f"r-{index}"), index + 0.9)
    half = float(bench.view.decode_context_tokens[0]) / 100_000.0 / 2
    for second in range(60):
        bench.report(0, running=5.0, waiting=0.0, sent_s=10.0 + second, kv_used_share=half)
    assert bench.view.occupancy[0] == pytest.approx(0.5, abs=0.01)


def test_counters_of_a_replicas_prefix_cache_are_evidence_about_its_hits() -> None:
    bench = Bench("A100", where=held([512]), doubts=True)
    believed = bench.chosen(0.0).hit_probability
    queries = 0.0
    bench.report(0, running=0.0, waiting=0.0, sent_s=0.0, prefix=PrefixCounters(queries, 0.0))
    for index in range(40):
        sent = bench.send(1.0 + index, request_id=f"r-{index}")
        bench.dispatcher.first_token(sent, 1.2 + index)
        bench.finish(sent, 1.5 + index)
        queries += 8448
        if index % 10 == 9:  # nobody ever hits
            bench.report(0, running=0.0, waiting=0.0, sent_s=1.6 + index, prefix=PrefixCounters(queries, 0.0))
    after = bench.chosen(42.0)
    assert after.evidence == "counters"
    assert after.hit_probability < 0.3 < believed


# What receipts expect


def test_every_candidate_has_quantiles_above_what_it_is_expected_to_take() -> None:
    bench = Bench("A100", "H20", where=held([512, 0]), doubts=True)
    bench.finish(bench.send(0.0), 1.0)
    (receipt,) = bench.receipts
    assert len(receipt.candidates) == 2
    for candidate in receipt.candidates:
        assert candidate.first_token_p90_s is not None
        assert candidate.first_token_p99_s is not None
        assert candidate.expected_s < candidate.first_token_p90_s < candidate.first_token_p99_s


def test_quantiles_of_a_receipt_are_those_its_outcome_is_judged_by() -> None:
    bench = Bench("A100", where=held([512]), doubts=True)
    sent = bench.send(0.0)
    assert isinstance(sent.placement, Placement)
    assert sent.placement.notes is not None
    chosen = sent.placement.notes.chosen
    assert booking_of(sent).forecast.quantiles_s == [chosen.first_token_p90_s, chosen.first_token_p99_s]


def test_first_tokens_later_than_their_quantiles_raise_those_of_the_next_requests() -> None:
    bench = Bench("A100", doubts=True)
    before = bench.chosen(0.0).first_token_p90_s
    for index in range(60):
        sent = bench.send(10.0 * index, request_id=f"r-{index}", prompt_exact=False)  # teaches C nothing
        bench.dispatcher.first_token(sent, 10.0 * index + 8.0)
        bench.finish(sent, 10.0 * index + 9.0)
    after = bench.chosen(700.0).first_token_p90_s
    assert before is not None
    assert after is not None
    assert after > 7.0 > 2 * before


def test_the_mean_first_token_lies_between_a_hit_and_a_recompute() -> None:
    bench = Bench("A100", where=held([512]), doubts=True)
    choice = bench.chosen(0.0)
    recompute_s = Bench("A100").chosen(0.0).first_token_s
    assert 0 < choice.hit_probability < 1
    mixed = choice.hit_probability * choice.first_token_s + (1 - choice.hit_probability) * recompute_s
    assert choice.expected_s == pytest.approx(mixed)


def test_what_an_engine_reports_of_its_reuse_is_the_evidence_of_the_next_receipt() -> None:
    bench = Bench("A100", where=held([512]), doubts=True)
    assert bench.chosen(0.0).evidence == "none"
    believed = []
    for index in range(20):
        sent = bench.send(10.0 * index, request_id=f"r-{index}")
        bench.dispatcher.first_token(sent, 10.0 * index + 0.9)
        bench.finish(sent, 10.0 * index + 5.0, cached_tokens=0)
        choice = bench.receipts[-1].choice
        assert choice is not None
        believed.append(choice.hit_probability)
    after = bench.chosen(200.0)
    assert after.evidence == "reported"
    assert after.hit_probability < 0.25 < 0.7 < believed[0]


def test_nothing_reused_rests_on_no_evidence() -> None:
    assert Bench("A100", doubts=True).chosen(0.0).evidence is None
    assert Bench("A100", where=held([512])).chosen(0.0).evidence is None  # nothing is doubted


def test_a_receipt_names_the_discipline_of_a_fetch_alone() -> None:
    for where, named in ((held([0], 512), "serial"), (held([512], 0), None)):
        bench = Bench("A100", where=where, discipline=Discipline.SERIAL, network_bytes_per_s=25e9)
        assert bench.chosen(0.0).discipline == named


def test_a_receipt_says_from_when_on_a_replica_is_calibrated() -> None:
    bench = Bench("A100", "A100")
    bench.dispatcher._placer._policy = Takes(0, Path.RECOMPUTE)
    for index in range(CALIBRATED_SAMPLES + 2):
        sent = bench.send(10.0 * index, request_id=f"r-{index}")
        bench.dispatcher.first_token(sent, 10.0 * index + 0.9)
        bench.finish(sent, 10.0 * index + 5.0, cached_tokens=0)
    said = [[candidate.calibration for candidate in receipt.candidates] for receipt in bench.receipts]
    assert said[0] == ["uncalibrated", "uncalibrated"]
    assert said[-1] == ["calibrated", "uncalibrated"]
    first = next(number for number, (one, _) in enumerate(said) if one == "calibrated")
    assert CALIBRATED_SAMPLES <= first <= CALIBRATED_SAMPLES + 1


def test_a_replica_that_stopped_reporting_has_later_quantiles_and_the_same_mean() -> None:
    bench = Bench("A100", "A100", policy="p99", doubts=True)
    for row in (0, 1):
        bench.report(row, running=0.0, waiting=0.0, sent_s=0.0)
    fresh = bench.chosen(1.0)
    assert fresh.replica == bench.view.names[0], "of two that are alike the first"
    bench.report(1, running=0.0, waiting=0.0, sent_s=60.0)
    told = bench.chosen(60.2)
    assert told.replica == bench.view.names[1]
    bench.dispatcher.replica_down(1)
    silent = bench.chosen(60.2)
    assert silent.replica == bench.view.names[0]
    assert silent.expected_s == told.expected_s == fresh.expected_s
    assert silent.first_token_p99_s is not None
    assert told.first_token_p99_s is not None
    assert silent.first_token_p99_s > 1.5 * told.first_token_p99_s
    assert told.first_token_p99_s == fresh.first_token_p99_s
