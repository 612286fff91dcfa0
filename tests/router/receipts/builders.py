"""For tests: receipts that name only what a test is about."""

from __future__ import annotations

from typing import Any

from router.receipts import Candidate, Receipt


def a_candidate(**changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "replica": "a",
        "path": "local",
        "queue_s": 0.2,
        "fetch_s": 0.0,
        "compute_s": 0.1,
        "first_token_s": 0.3,
        "expected_s": 0.34,
        "hit_probability": 0.9,
        "local_tokens": 64,
        "fetched_tokens": 0,
        "pace_s": 0.01,
        "queue_price_s": 0.4,
        "decode_price_s": 0.1,
    }
    return Candidate(**{**values, **changes})


def a_receipt(index: int = 0, **changes: Any) -> Receipt:
    values: dict[str, Any] = {
        "request_id": f"r-{index}",
        "arrived_at": 1.0,
        "endpoint": "/v1/completions",
        "model": "m",
        "prompt_tokens": 100,
        "prompt_exact": True,
        "streamed": True,
        "policy": "e2e",
        "candidates": [a_candidate()],
        "chosen": 0,
        "reason": "lowest_estimate",
        "outcome": "ok",
        "first_token_s": 0.35,
        "placed_s": 0.0,
        "ended_s": 1.0,
    }
    return Receipt(**{**values, **changes})
