"""How a request ends for the books: once, with an outcome and how long it took."""

from __future__ import annotations

from collections.abc import Callable

from estimators.request import RequestFacts
from router.actions import Cause, Outcome, Refuse
from router.receipts import Receipt
from router.receipts.writer import Detail
from router.resume.reasons import WhyNot

Keep = Callable[[Receipt, RequestFacts | None, Detail | None], None]


class Endings:
    """Closes receipts. on_receipt : given each of them, finished

    keep : given each after that, with its request and what its last decision noted, where it was placed
    """

    def __init__(self, on_receipt: Callable[[Receipt], None], keep: Keep | None = None) -> None:
        self._on_receipt = on_receipt
        self._keep = keep

    def close(
        self,
        receipt: Receipt,
        outcome: Outcome,
        *,
        arrived_at_s: float,
        now_s: float,
        request: RequestFacts | None = None,
        detail: Detail | None = None,
    ) -> None:
        """The request of `receipt` ended with `outcome`. request, detail : where it was placed"""
        assert receipt.outcome is None, f"request {receipt.request_id} ended twice"
        receipt.outcome = outcome.value
        receipt.ended_s = now_s - arrived_at_s
        self._on_receipt(receipt)
        if self._keep is not None:
            self._keep(receipt, request, detail)

    def refuse(self, receipt: Receipt, refusal: Refuse, *, arrived_at_s: float, now_s: float) -> Refuse:
        """It ended with an answer of the router's own."""
        if receipt.resumes:  # its client sees a stream that broke, and no answer of the router's
            receipt.cause, receipt.not_resumed = Cause.BROKEN.value, WhyNot.NO_REPLICA.value
            self.close(receipt, Outcome.FAILED, arrived_at_s=arrived_at_s, now_s=now_s)
            return refusal
        receipt.status = refusal.status
        receipt.cause = None if refusal.why is None else refusal.why.value
        outcome = Outcome.of_own_answer(refusal.status, refusal.why)
        self.close(receipt, outcome, arrived_at_s=arrived_at_s, now_s=now_s)
        return refusal
