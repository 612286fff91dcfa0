"""Example 9.8 of the textbook as a question, and its eight cards in one organisation."""

from __future__ import annotations

import msgspec

from estimators.planning.deployments import CardKind, Deployment, Facts, Organisation, RequestKind, deployment
from estimators.planning.known import PLANNED_CARDS
from estimators.planning.plan import Question, Targets
from estimators.shapes import QWEN3_8B

EXAMPLE = RequestKind(input_tokens=8192, output_tokens=1025)


def question(*kinds: RequestKind, price: float | None = 1.0, **targets: float) -> Question:
    """Example 9.8: four A100 and four H20 that share 25 GB/s, 3.5 requests/s, ready after 10 s, cleared by 60 s."""
    cards = tuple(
        CardKind(name, msgspec.structs.replace(PLANNED_CARDS[name], usd_per_hour=price), 4) for name in ("A100", "H20")
    )
    facts = Facts(
        shape=QWEN3_8B, kinds=kinds or (EXAMPLE,), cards=cards, batch=32, network_bytes_per_s=25e9, store=True
    )
    asked = Targets(**{"drained_by_s": 60.0, **targets})
    return Question(facts=facts, arrival_rps=3.5, ready_s=10.0, targets=asked)


def all_cards(asked: Question, organisation: Organisation, prefill: tuple[int, int] | None = None) -> Deployment:
    found = deployment(asked.facts, organisation, prefill=prefill)
    assert found is not None
    return found
