"""Candidates in receipts, written down when a request has ended."""

from __future__ import annotations

import numpy as np
import pytest

from router.actions import Send
from router.notes import Notes
from router.placing import Placement
from router.receipts import Receipt
from tests.builders import held
from tests.router.dispatch_bench import Bench


def ended(bench: Bench, **changes: object) -> None:
    bench.finish(bench.send(0.0, **changes), 5.0)


def test_what_happens_after_a_decision_does_not_change_what_its_receipt_says() -> None:
    now, later = (Bench("A100", "A100", where=held([100, 0]), network_bytes_per_s=25e9) for _ in range(2))
    sent = later.send(0.0)
    for number in range(10):
        later.send(0.1 * number, request_id=f"s-{number}")
        later.report(number % 2, running=3, waiting=2, sent_s=1.0)
    later.finish(sent, 5.0)
    ended(now)
    assert now.receipts[0].candidates == later.receipts[0].candidates


def test_the_chosen_candidate_is_one_of_all_and_the_same_when_it_is_noted_alone() -> None:
    whole, alone = Bench("A100", "H20"), Bench("A100", "H20", every_candidate=False)
    for bench in (whole, alone):
        ended(bench)
    assert len(whole.receipts[0].candidates) == 2
    assert len(alone.receipts[0].candidates) == 1
    assert whole.receipts[0].choice == alone.receipts[0].choice


def test_a_client_that_asks_gets_the_summary_with_the_choice() -> None:
    bench = Bench("A100", "H20")
    sent = bench.send(0.0, explain=True)
    assert isinstance(sent.placement, Placement)
    assert sent.explain is not None
    assert '"candidates":2' in sent.explain
    assert sent.placement.notes is not None
    assert sent.placement.receipt.choice is sent.placement.notes.chosen


@pytest.mark.parametrize("replicas", [2, 12])
def test_what_a_short_queue_costs_others_is_told_once_no_replica_is_free(replicas: int) -> None:
    bench = Bench(*["A100"] * replicas)
    for number in range(replicas + 1):
        bench.finish(bench.send(0.0, request_id=f"first-{number}"), 5.0)
    waiting = [bench.send(10.0, request_id=f"r-{number}") for number in range(replicas + 1)]
    last = bench.send(10.0, request_id="last", prompt_tokens=20_000)  # longer than most
    for sent in (*waiting, last):
        bench.finish(sent, 20.0)
    idle, busy = bench.receipts[replicas + 1], bench.receipts[-1]
    assert [one.levelling_price_s for one in idle.candidates] == [None] * replicas
    short, *_rest, long = sorted(busy.candidates, key=lambda one: one.queue_s)
    assert short.queue_s < long.queue_s
    assert long.levelling_price_s == 0.0
    assert short.levelling_price_s is not None
    assert short.levelling_price_s > 0.0


def noted(bench: Bench, sent: Send, first_token_s: float | None = None) -> tuple[Notes, Receipt]:
    """What was noted of one placement, and its receipt as it would be at the end."""
    assert isinstance(sent.placement, Placement)
    assert sent.placement.notes is not None
    receipt = sent.placement.receipt
    receipt.first_token_s = first_token_s
    return sent.placement.notes, receipt


def eight(**changes: object) -> Bench:
    """Eight replicas of which each has a bit more of the prompt than the one before."""
    return Bench(*["A100"] * 8, where=held([40 * row for row in range(8)]), doubts=True, **changes)  # type: ignore[arg-type]


def test_the_quantiles_of_every_candidate_are_those_a_policy_would_have_been_shown() -> None:
    bench = eight()
    for number in range(40):  # until corrections are learned
        bench.dispatcher.first_token(sent := bench.send(float(number)), number + 3.0)
        bench.finish(sent, number + 4.0)
    notes, receipt = noted(bench, bench.send(50.0))
    shown = notes._estimates.quantile_grid_s  # at the moment of the choice
    notes.complete(receipt, best=None)
    columns, rows = np.nonzero(notes._estimates.possible)
    written = [[one.first_token_p90_s, one.first_token_p99_s] for one in receipt.candidates]
    assert np.array(written) == pytest.approx(shown[:, columns, rows].T, rel=1e-4)


def test_all_candidates_say_what_they_rest_on() -> None:
    bench = eight()
    for at_s in (0.0, 5.0):
        bench.finish(bench.send(at_s), at_s + 4.0, cached_tokens=280 * 16)
    notes, receipt = noted(bench, bench.send(10.0))
    notes.complete(receipt, best=None)
    by_replica = {one.replica: one.evidence for one in receipt.candidates}
    assert by_replica["a100-0"] is None  # it has nothing of the prompt
    assert by_replica["a100-7"] == "reported"
    assert {by_replica[f"a100-{row}"] for row in range(1, 7)} == {"none"}
    assert all(one.ready_s == 0.0 for one in receipt.candidates)


def test_the_chosen_and_the_best_others_are_named_and_how_many_there_were() -> None:
    bench = eight()
    notes, receipt = noted(bench, bench.send(0.0))
    notes.complete(receipt, best=None)
    everyone = sorted(receipt.candidates, key=lambda one: one.expected_s)
    notes.complete(receipt, best=3)
    assert [one.replica for one in receipt.candidates] == [one.replica for one in everyone[:4]]
    assert receipt.choice is notes.chosen
    assert receipt.possible == 8


def test_regret_is_the_first_token_less_what_the_best_other_was_expected_to_take() -> None:
    bench = Bench("A100", "A100", where=held([100, 50]))
    notes, receipt = noted(bench, bench.send(0.0), first_token_s=2.0)
    notes.complete(receipt, best=None)
    (other,) = [one for one in receipt.candidates if one is not receipt.choice]
    assert receipt.regret_s == pytest.approx(2.0 - other.expected_s)


def test_regret_is_unknown_without_another_candidate_or_a_first_token() -> None:
    for bench, first_token_s in ((Bench("A100"), 2.0), (Bench("A100", "A100"), None)):
        notes, receipt = noted(bench, bench.send(0.0), first_token_s)
        notes.complete(receipt, best=None)
        assert receipt.regret_s is None


def test_regret_allows_for_the_usual_error_of_a_replicas_estimates() -> None:
    """First tokens that take twice as long as expected everywhere leave nothing to regret."""
    bench = Bench("A100", "A100", doubts=True)
    for number in range(200):
        assert bench.estimator.doubt is not None
        bench.estimator.doubt.spread.observe(number % 2, observed_s=2.0, predicted_s=1.0, now_s=float(number))
    sent = bench.send(200.0)
    notes, receipt = noted(bench, sent)
    receipt.first_token_s = 2.0 * notes.chosen.expected_s
    notes.complete(receipt, best=None)
    assert receipt.regret_s == pytest.approx(0.0, abs=0.15 * receipt.first_token_s)
