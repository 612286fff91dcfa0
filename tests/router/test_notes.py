"""Candidates in receipts, written down when a request has ended."""

from __future__ import annotations

from router.placing import Placement
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
