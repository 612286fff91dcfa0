"""Holds a planned deployment against the simulated engines, and says where the plan's formula and the play part.

Model     three plays: all requests at once (what is carried), Poisson arrivals (first token, pace), and the same
          arrivals with the start before them: its backlog is gone when no more wait for a first token than without it.
          How engines are made of the plan's cards, and who gets which request: `plan_play`. What is left of a
          difference is chunks of prefill beside decodes, attention slower than matrix products, time per step, queues
Valid     deployments that are not `unplayable`
Blind to  how far a difference would be on real cards: nobody has held the simulated engines against one
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import inf, isfinite, isnan, nan

import msgspec
import numpy as np
from rich.table import Table

from estimators.planning.deployments import Deployment, Facts, Organisation, RequestKind, batch_on, deployment
from estimators.planning.plan import Assessment, Question
from loadtest.replay.measure import quantile
from loadtest.replay.plan_play import Asked, Play, Played
from router.cli.plan import deployment_text
from router.errors import ConfigError

WARM_UP = 0.25  # of the requests
FILLS = 6  # times all places in batches, so that a middle is left between filling and emptying
FEWEST = 20  # requests that a play must expect
MOST = 200_000  # and may have: some minutes
APART = 0.1  # relative: below it formula and play are said to agree


Watch = Callable[[str, int, int], None]  # which play it is, how many of its requests have ended, of how many


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment by formula and as played; NaN (null in JSON) is unknown, inf (null too) never.

    seconds : of arrivals; parts : where formula and play part, as sentences
    """

    organisation: str
    deployment: str
    seconds: float
    requests: int
    formula: dict[str, float]
    played: dict[str, float]
    parts: list[str]


ROWS = {
    "carries_rps": "carries, requests/s",
    "idle_first_token_s": "first token alone, s",
    "first_token_s": "first token, mean, s",
    "first_token_p90_s": "first token, p90, s",
    "good_share": "in time",
    "pace_s": "a token, s",
    "drained_at_s": "start cleared, s",
}


def unplayable(facts: Facts, chosen: Deployment) -> str | None:
    """Why the engines cannot play it; None where they can."""
    if chosen.organisation.uses_store:
        return "writes to a store cost the simulated engines nothing"
    return None if facts.cards_each == 1 else "the simulated engines are on one card each"


def check(
    question: Question, one: Assessment, *, seconds: float, seed: int, watch: Watch = lambda play, ended, of: None
) -> Check:
    """Play `one`. seconds : of arrivals, > 0

    Raises
    ------
    ConfigError : the simulated engines cannot play this model, or too few or too many requests come in that time.
    """
    facts, chosen = question.facts, one.deployment
    _check_length(question.arrival_rps, seconds)
    saturated = _played(question, chosen, _at_once(facts, chosen, seed), seed, watch, "all at once")
    rows = list(_arrivals(question, seconds, seed))
    steady = _played(question, chosen, rows, seed, watch, "as they arrive")
    started = steady
    if question.ready_s:
        started = _played(question, chosen, rows, seed, watch, "with the start before", ready_s=question.ready_s)
    warm = int(len(rows) * WARM_UP)
    first_s = steady.first_token_s[warm:]
    carries_rps = _middle_rate(saturated)
    played = {
        "carries_rps": carries_rps,
        "idle_first_token_s": _alone_s(question, chosen, seed),
        "first_token_s": float(np.mean(first_s)),
        "first_token_p90_s": quantile(first_s, 0.9),
        "good_share": float(np.mean(first_s <= question.targets.first_token_s)),
        "pace_s": steady.pace_s(warm),
        "drained_at_s": _drained_at_s(started, steady, question.ready_s) if carries_rps > question.arrival_rps else inf,
    }
    formula = {
        "carries_rps": chosen.per_s,
        "idle_first_token_s": one.idle_first_token_s,
        "first_token_s": one.first_token_s,
        "first_token_p90_s": one.first_token_p90_s,
        "good_share": one.good_share,
        "pace_s": one.pace_s,
        "drained_at_s": one.drained_at_s,
    }
    return Check(
        organisation=chosen.organisation.value,
        deployment=deployment_text(facts, chosen),
        seconds=seconds,
        requests=len(rows),
        formula=formula,
        played=played,
        parts=list(_parts(facts, chosen, formula, played, seconds)),
    )


def _check_length(arrival_rps: float, seconds: float) -> None:
    if arrival_rps * seconds < FEWEST:
        wanted = FEWEST / arrival_rps
        raise ConfigError(f"--seconds {seconds:g} is too short to judge: {FEWEST} requests come in {wanted:,.0f} s")
    if arrival_rps * seconds > MOST:
        raise ConfigError(
            f"--seconds {seconds:g} brings {arrival_rps * seconds:,.0f} requests; {MOST:,} are played at most, and come"
            f" in {MOST / arrival_rps:,.0f} s"
        )


def _parts(
    facts: Facts, chosen: Deployment, formula: dict[str, float], played: dict[str, float], seconds: float
) -> Iterator[str]:
    """Each number that is further apart than a tenth, and why where that is known."""
    apart = [name for name in ROWS if _is_apart(formula[name], played[name])]
    open_end = isnan(played["drained_at_s"])
    if not apart:
        yield f"Formula and play agree within a tenth in every{' other' if open_end else ''} number."
    if open_end:
        yield (
            f"The backlog of the start was not gone within the {seconds:g} s that were played; by formula it is after"
            f" {_text(formula['drained_at_s'])} s. A longer --seconds may show when."
        )
    for name in apart:
        yield f"They part in {ROWS[name]}: {_text(formula[name])} by formula, {_text(played[name])} as played."
    yield from _reasons(facts, chosen, formula, played, set(apart))


def _reasons(
    facts: Facts, chosen: Deployment, formula: dict[str, float], played: dict[str, float], apart: set[str]
) -> Iterator[str]:
    """What is known of why they part."""
    whole = not chosen.organisation.splits
    if "idle_first_token_s" in apart:
        yield (
            "A request alone differs already: the engines' attention is slower than their matrix products, and"
            " element-wise work and the overhead of each step come on top."
        )
    elif {"first_token_s", "first_token_p90_s"} & apart:
        yield "A request alone agrees, so it is the queues."
    if whole and "carries_rps" in apart:
        low, high = (_rate_as(facts, chosen, one) for one in (Organisation.REPLICAS, Organisation.CHUNKED))
        yield (
            "The engines run chunks of prefill beside decodes: whole replicas leave that out"
            f" ({low:.3g} requests/s), ideal chunks take it to be free ({high:.3g})."
        )
    if whole and "pace_s" in apart and played["pace_s"] > formula["pace_s"]:
        yield "A decode step that carries a chunk of a prompt lasts as long as the chunk."
    if "drained_at_s" in apart and played["drained_at_s"] < formula["drained_at_s"]:
        yield "Free places in decode batches took up part of the backlog; the formula counts it until it is answered."


def _rate_as(facts: Facts, chosen: Deployment, organisation: Organisation) -> float:
    found = deployment(facts, organisation, counts=chosen.counts)
    assert found is not None, "whole replicas need no split"
    return found.per_s


def _is_apart(formula: float, played: float) -> bool:
    if isnan(formula) or isnan(played):
        return False
    if formula == inf or played == inf:
        return formula != played
    return abs(played - formula) > APART * max(abs(formula), 1e-12)


def _text(value: float) -> str:
    return "never" if value == inf else f"{value:.3g}"


def check_table(facts: Facts, one: Check) -> Table:
    """Formula beside play."""
    table = Table(title=f"{one.organisation}, {one.deployment}: {one.requests} requests played", title_justify="left")
    table.add_column("")
    for column in ("formula", "played", "played / formula"):
        table.add_column(column, justify="right")
    for name, words in ROWS.items():
        formula, played = one.formula[name], one.played[name]
        ratio = f"{played / formula:.2f}" if formula and isfinite(formula) and isfinite(played) else "-"
        unknown = f"not in {one.seconds:g} s" if name == "drained_at_s" else "-"
        shown = ["-" if isnan(formula) else _text(formula), unknown if isnan(played) else _text(played)]
        table.add_row(words, *shown, ratio)
    return table


# The plays


def _arrivals(question: Question, seconds: float, seed: int) -> Iterator[Asked]:
    """Poisson arrivals, kinds drawn by their shares."""
    chance = random.Random(f"{seed}/plan/arrivals")
    at_s, number = chance.expovariate(question.arrival_rps), 0
    while at_s < seconds:
        yield Asked(number, at_s, _drawn(question.facts, chance))
        number += 1
        at_s += chance.expovariate(question.arrival_rps)


def _at_once(facts: Facts, chosen: Deployment, seed: int) -> list[Asked]:
    """So many at one moment that batches are full for most of the play."""
    chance = random.Random(f"{seed}/plan/at-once")
    places = sum(
        many * batch_on(facts, kind.card) for many, kind in zip(chosen.decode, facts.cards, strict=True) if many
    )
    if FILLS * places > MOST:
        raise ConfigError(
            f"--simulate: to fill {places:,} places in batches takes {FILLS * places:,} requests, {MOST:,} at most are"
            " played; a smaller `batch` or fewer cards can be"
        )
    return [Asked(number, 0.0, _drawn(facts, chance)) for number in range(FILLS * max(places, 1))]


def _drawn(facts: Facts, chance: random.Random) -> RequestKind:
    return chance.choices(facts.kinds, weights=facts.shares)[0]


def _middle_rate(played: Played) -> float:
    """Requests a second while there is a line: the mean of those begun and ended, since either alone comes in bunches.

    Between the quarter that got its first token first and the last seventh, when places empty.
    """
    begun, ended = np.sort(played.arrived_s + played.first_token_s), np.sort(played.ended_s)
    from_s, to_s = np.quantile(begun, [0.25, 0.85])
    counts = [np.searchsorted(one, to_s) - np.searchsorted(one, from_s) for one in (begun, ended)]
    return float(np.mean(counts) / (to_s - from_s)) if to_s > from_s else inf


def _alone_s(question: Question, chosen: Deployment, seed: int) -> float:
    """First token of the mean request with nothing beside it, on the replica that the formula thinks fastest."""
    facts = question.facts
    alone = [Play(facts, chosen, seed=seed, ready_s=0.0).run([Asked(0, 0.0, kind)]) for kind in facts.kinds]
    return sum(share * float(one.first_token_s[0]) for share, one in zip(facts.shares, alone, strict=True))


def _drained_at_s(started: Played, steady: Played, ready_s: float) -> float:
    """When no more than one request more waits for its first token than without the start. NaN: not while any came."""
    if ready_s == 0:
        return 0.0
    at_s = np.arange(ready_s, float(started.arrived_s[-1]), 0.25)
    level = np.flatnonzero(started.waiting(at_s) <= steady.waiting(at_s) + 1.0)
    return float(at_s[level[0]]) if len(level) else nan


def _played(
    question: Question,
    chosen: Deployment,
    rows: Sequence[Asked],
    seed: int,
    watch: Watch,
    name: str,
    *,
    ready_s: float = 0.0,
) -> Played:
    ended = count(1)
    watch(name, 0, len(rows))
    play = Play(question.facts, chosen, seed=seed, ready_s=ready_s)
    return play.run(rows, lambda: watch(name, next(ended), len(rows)))
