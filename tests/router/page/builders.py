"""For tests of the page: a fleet as `/fleet` shows it and requests that ended; they name only what a test is about."""

from __future__ import annotations

from typing import Any

from router.page import Live
from router.receipts import Candidate, Receipt
from tests.router.receipts.builders import a_candidate, a_receipt


def a_replica(name: str = "a", **changes: Any) -> dict[str, Any]:
    """One that is up and calibrated, with fields that the page does not show among them."""
    values: dict[str, Any] = {
        "name": name,
        "url": f"http://{name}:8000",
        "card": "A100",
        "role": "both",
        "up": True,
        "drained": False,
        "health": {"state": "closed", "trouble": None, "share": 1.0, "failures": 0},
        "booked": 2,
        "decoding": 1,
        "prefill_ahead_s": 0.5,
        "foreign_waiting": None,
        "signal_age_s": 0.4,
        "calibration": "calibrated",
        "kv_used_share": 0.25,
        "cache_is_guessed": False,
        "coefficients": [1.0, 2.0],
    }
    return {**values, **changes}


def a_source(name: str = "a", state: str = "live", **changes: Any) -> dict[str, Any]:
    return {"name": name, "carrier": "zmq", "state": state, "age_s": 0.2, "connected": True, **changes}


def a_fleet_view(*replicas: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What /fleet shows of these; each has a live event source unless they are given."""
    values: dict[str, Any] = {
        "policy": "e2e",
        "in_flight": 3,
        "queued": {"": 1, "gold": 2},
        "replicas": list(replicas),
        "event_sources": [a_source(replica["name"]) for replica in replicas],
        "experiment": None,
    }
    return {**values, **changes}


class Noted:
    """What a decision noted: candidates beside the chosen one, named when somebody asks."""

    def __init__(self, *others: Candidate) -> None:
        self.others = others

    def complete(self, receipt: Receipt, *, best: int | None) -> None:
        receipt.candidates = [*self.others, *receipt.candidates]
        receipt.chosen, receipt.possible = len(self.others), len(receipt.candidates)


def end(live: Live, index: int = 0, *others: Candidate, at: float = 1000.0, **changes: Any) -> Receipt:
    """A request that arrived at `at` (Unix time) and ended at once, unless `changes` say otherwise."""
    receipt = a_receipt(index, **{"arrived_at": at, "ended_s": 0.0, **changes})
    live.ended(receipt, Noted(*others) if receipt.candidates else None)
    return receipt


def placed_nowhere(live: Live, index: int = 0, **changes: Any) -> Receipt:
    """A request that the router answered by itself."""
    nothing: dict[str, Any] = {
        "candidates": [],
        "chosen": None,
        "reason": None,
        "first_token_s": None,
        "placed_s": None,
    }
    return end(live, index, **{**nothing, "outcome": "refused", "status": 503, "cause": "no_replica", **changes})


__all__ = ["Noted", "a_candidate", "a_fleet_view", "a_replica", "a_source", "end", "placed_nowhere"]
