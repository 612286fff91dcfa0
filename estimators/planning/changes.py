"""What would change the choice of a deployment.

Model     the question of `plan` with one thing changed, answered again in full, beside what becomes of the old answer
Valid     one change at a time; they do not add up
Blind to  which of them is likely
Source    AI Infra textbook, section 9.7.3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from estimators.planning.deployments import Deployment, RequestKind, deployment
from estimators.planning.plan import Assessment, Question, assess, ranked


@dataclass(frozen=True, slots=True)
class Variation:
    """The question with one thing changed. same : the old answer now; best : the new answer, None where nothing is"""

    what: str
    same: Assessment
    best: Assessment | None


def variations(question: Question, chosen: Deployment) -> list[Variation]:
    """What becomes of `chosen`, and which answer would be given, when one thing changes."""
    found = []
    for what, change in CHANGES.items():
        changed = change(question)
        if changed is None:
            continue
        again = _again(changed, chosen)
        best = next(iter(ranked(changed)), None)
        if again is not None:
            found.append(Variation(what, assess(changed, again), best))
    return found


def _again(question: Question, chosen: Deployment) -> Deployment | None:
    """The same cards in the same roles under another question."""
    prefill = chosen.prefill if chosen.organisation.splits else None
    return deployment(question.facts, chosen.organisation, counts=chosen.counts, prefill=prefill)


def faster(question: Question, factor: float) -> Question:
    """All cards that much (> 0) faster."""
    cards = tuple(replace(kind, card=kind.card.faster(factor)) for kind in question.facts.cards)
    return replace(question, facts=replace(question.facts, cards=cards))


def wider(question: Question, factor: float) -> Question | None:
    """All links that much (> 0) wider; None where there is none."""
    facts = question.facts
    network, peer = facts.network_bytes_per_s, facts.peer_bytes_per_s
    if network is None and peer is None:
        return None
    changed = replace(
        facts,
        network_bytes_per_s=None if network is None else network * factor,
        peer_bytes_per_s=None if peer is None else peer * factor,
    )
    return replace(question, facts=changed)


def with_kinds(question: Question, change: Callable[[RequestKind], RequestKind]) -> Question:
    """Every kind of request changed."""
    kinds = tuple(change(kind) for kind in question.facts.kinds)
    return replace(question, facts=replace(question.facts, kinds=kinds))


def _longer_answers(kind: RequestKind) -> RequestKind:
    return replace(kind, output_tokens=2 * kind.output_tokens)


def _shorter_answers(kind: RequestKind) -> RequestKind:
    return replace(kind, output_tokens=max(1, kind.output_tokens // 2))


def _mostly_cached(kind: RequestKind) -> RequestKind:
    """Three quarters of the input in the computing replica's own memory, or what is there already."""
    cached = max(kind.cached_tokens, min(3 * kind.input_tokens // 4, kind.input_tokens - 1))
    return replace(kind, cached_tokens=cached, stored_tokens=min(kind.stored_tokens, kind.input_tokens - cached))


CHANGES: dict[str, Callable[[Question], Question | None]] = {
    "a quarter more requests": lambda question: replace(question, arrival_rps=1.25 * question.arrival_rps),
    "a quarter fewer requests": lambda question: replace(question, arrival_rps=0.75 * question.arrival_rps),
    "answers twice as long": lambda question: with_kinds(question, _longer_answers),
    "answers half as long": lambda question: with_kinds(question, _shorter_answers),
    "three quarters of each prompt cached": lambda question: with_kinds(question, _mostly_cached),
    "cards at 90 % of the assumed speed": lambda question: faster(question, 0.9),
    "links half as wide": lambda question: wider(question, 0.5),
}
