"""How a request ends for the books: once, with an outcome and how long it took."""

from __future__ import annotations

from collections.abc import Callable

from router.actions import Outcome, Refuse
from router.receipts import Receipt


class Endings:
    """Closes receipts. on_receipt : given each of them, finished"""

    def __init__(self, on_receipt: Callable[[Receipt], None]) -> None:
        self._on_receipt = on_receipt

    def close(self, receipt: Receipt, outcome: Outcome, *, arrived_at_s: float, now_s: float) -> None:
        """The request of `receipt` ended with `outcome`."""
        assert receipt.outcome is None, f"request {receipt.request_id} ended twice"
        receipt.outcome = outcome.value
        receipt.ended_s = now_s - arrived_at_s
        self._on_receipt(receipt)

    def refuse(self, receipt: Receipt, refusal: Refuse, *, arrived_at_s: float, now_s: float) -> Refuse:
        """It ended with an answer of the router's own."""
        receipt.status = refusal.status
        receipt.cause = None if refusal.why is None else refusal.why.value
        self.close(receipt, Outcome.REFUSED, arrived_at_s=arrived_at_s, now_s=now_s)
        return refusal
