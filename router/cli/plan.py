"""What `tfirst plan` reads and shows: a fleet and a workload in, a question for `estimators.planning.plan`, tables out.

The command itself is in `loadtest/replay/plan_cli.py`, since it may play the answer, which only replay can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.table import Table

from estimators.hardware import Positive, Share
from estimators.planning.changes import Variation, variations
from estimators.planning.deployments import CardKind, Deployment, Facts, Organisation, RequestKind
from estimators.planning.plan import (
    MOST_COPIES,
    Assessment,
    Copies,
    Limits,
    Question,
    Targets,
    copies,
    copies_that_hold,
    limits,
    misses_of_copies,
)
from estimators.shape_parts import Count
from router.errors import ConfigError
from router.fleet import Fleet, check_fleet, completed, one_line

GB = 1e9
DEFAULT_BATCH = 256  # vLLM's max_num_seqs on most cards
MOST_BATCH = 8192  # above what any engine runs at once
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]


class RequestSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of `requests`: see `estimators.planning.deployments.RequestKind`."""

    input_tokens: Count
    output_tokens: Count
    cached_tokens: Tokens = 0
    stored_tokens: Tokens = 0
    share: Positive = 1.0


class TargetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `targets`; what is left out is not asked for.

    first_token_s : deadline of the first token, met by `good_share` of the requests
    pace_s : between two tokens of an answer, on average
    drained_by_s : after the start, when its backlog must be gone
    most_busy : share of what a deployment carries that may be asked of it
    """

    first_token_s: Positive | None = None
    good_share: Share = 0.9
    pace_s: Positive | None = None
    drained_by_s: Positive | None = None
    most_busy: Share = 0.95  # at 0.99 a queue of Poisson arrivals is five times as long, at 1 it never ends


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole workload file.

    rate_rps : requests a second; with a trace it may be left out
    requests, trace : kinds of requests, or a trace (relative to this file) whose lengths stand for them
    batch : sequences in a decode step at most; None: as the fleet file's engines, else 256
    start_s : until the service is ready; None: the longest `start_s` of the fleet's replicas
    """

    rate_rps: Positive | None = None
    requests: tuple[RequestSpec, ...] = ()
    trace: str | None = None
    batch: Annotated[int, msgspec.Meta(ge=1, le=MOST_BATCH)] | None = None
    start_s: NotNegative | None = None
    targets: TargetSpec = TargetSpec()


def read_workload(path: Path) -> Workload:
    """The workload in `path`. Raises ConfigError."""
    try:
        workload = msgspec.yaml.decode(path.read_bytes(), type=Workload)
    except OSError as exc:
        raise ConfigError(f"workload file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"workload file {path}: {one_line(exc)}") from exc
    if bool(workload.requests) == (workload.trace is not None):
        raise ConfigError(f"workload file {path}: it names either `requests` or a `trace`")
    if workload.trace is None and workload.rate_rps is None:
        raise ConfigError(f"workload file {path}: `rate_rps` is missing, and there is no trace to take it from")
    return workload


def read_fleet(path: Path) -> Fleet:
    """The fleet in `path`; its replicas need no address, since nobody calls them. Raises ConfigError."""
    try:
        raw = completed(msgspec.yaml.decode(path.read_bytes()), path.parent)
        fleet = msgspec.convert(raw, Fleet)
        named = [
            msgspec.structs.replace(replica, url=replica.url or f"http://replica-{row}.invalid")
            for row, replica in enumerate(fleet.replicas)
        ]
        check_fleet(msgspec.structs.replace(fleet, replicas=named))
    except OSError as exc:
        raise ConfigError(f"fleet file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"fleet file {path}: {one_line(exc)}") from exc
    except ConfigError as exc:
        raise ConfigError(f"fleet file {path}: {exc}") from exc
    return fleet


def kinds_of(workload: Workload) -> tuple[RequestKind, ...]:
    """The kinds a workload names. Raises ConfigError."""
    try:
        return tuple(
            RequestKind(
                input_tokens=spec.input_tokens,
                output_tokens=spec.output_tokens,
                cached_tokens=spec.cached_tokens,
                stored_tokens=spec.stored_tokens,
                share=spec.share,
            )
            for spec in workload.requests
        )
    except ValueError as exc:
        raise ConfigError(f"requests: {exc}") from exc


def question_of(fleet: Fleet, workload: Workload, kinds: Sequence[RequestKind], rate_rps: float) -> Question:
    """Both files as one question. Raises ConfigError when a card or the model is not named, or nothing can fit."""
    if fleet.model is None:
        raise ConfigError("the fleet file has no `model`, so nothing can be worked out")
    cards_each = fleet.model.shards.tensor * fleet.model.shards.pipeline
    start_s = workload.start_s
    if start_s is None:
        start_s = max(replica.start_s for replica in fleet.replicas)
    asked = workload.targets
    try:
        facts = Facts(
            shape=fleet.model,
            kinds=tuple(kinds),
            cards=tuple(CardKind(name, fleet.card(name), many) for name, many in _replicas_on(fleet).items()),
            batch=workload.batch or _engine_batch(fleet),
            network_bytes_per_s=_rate(fleet, fleet.store.network if fleet.store else None),
            peer_bytes_per_s=_rate(fleet, fleet.peers.link if fleet.peers else None),
            store=fleet.store is not None,
        )
        assert facts.cards_each == cards_each, "a replica is as many cards as its shape has shards"
        targets = Targets(
            first_token_s=asked.first_token_s or inf,
            good_share=asked.good_share,
            pace_s=asked.pace_s or inf,
            drained_by_s=asked.drained_by_s or inf,
            most_busy=asked.most_busy,
        )
        return Question(facts=facts, arrival_rps=rate_rps, ready_s=start_s, targets=targets)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc


def _replicas_on(fleet: Fleet) -> Counter[str]:
    """Replicas of each card, in the order cards first come."""
    counts: Counter[str] = Counter()
    for replica in fleet.replicas:
        if replica.card is None:
            raise ConfigError(f"replica {replica.name!r} names no `card`, so nothing is known of its speed")
        counts[replica.card] += replica.ranks
    return counts


def _engine_batch(fleet: Fleet) -> int:
    batch = fleet.engine.get("max_running", DEFAULT_BATCH)
    return min(batch, MOST_BATCH) if isinstance(batch, int) and batch >= 1 else DEFAULT_BATCH


def _rate(fleet: Fleet, link: str | None) -> float | None:
    return None if link is None else fleet.links[link].gb_s * GB * fleet.speed


# The report


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run of the command found.

    found : all deployments, best first
    whole : all cards in each organisation
    many : copies of the first choice's cards, where it does not hold; holding : of them, to meet all targets; None: no
        number of copies does
    """

    question: Question
    found: Sequence[Assessment]
    whole: Sequence[Assessment]
    bounds: Limits
    changes: Sequence[Variation]
    many: Copies
    holding: int | None

    @property
    def first(self) -> Assessment:
        return self.found[0]


def report_of(question: Question, found: Sequence[Assessment]) -> Report:
    """What is said about `found`, all deployments in order. Raises ConfigError where there is none."""
    if not found:
        raise ConfigError("these cards can serve nothing of this workload")
    first = found[0]
    whole = [one for one in found if one.deployment.counts == question.facts.counts]
    return Report(
        question=question,
        found=found,
        whole=sorted(whole, key=lambda one: list(Organisation).index(one.deployment.organisation)),
        bounds=limits(question, first.deployment),
        changes=variations(question, first.deployment),
        many=copies(question, first),
        holding=copies_that_hold(question, first),
    )


def deployment_text(facts: Facts, one: Deployment) -> str:
    """As a person says it: P 4 A100 + 1 H20, D 3 H20."""

    def cards(counts: Sequence[int]) -> str:
        return " + ".join(f"{many} {kind.name}" for many, kind in zip(counts, facts.cards, strict=True) if many)

    if not one.organisation.splits:
        return cards(one.prefill)
    return f"P {cards(one.prefill) or 'none'}, D {cards(one.decode) or 'none'}"


def tables(report: Report, *, top: int, width: int) -> Iterator[Table]:
    """What fills a screen of `width` columns: all cards in each way, the best choices, what would change the answer."""
    facts, shown = report.question.facts, WIDE if width >= ROOM_FOR_ALL else NARROW
    yield _assessments("All cards, in each way", facts, report.whole, shown)
    rows = report.found[:top]
    yield _assessments(f"Best {len(rows)} of {len(report.found)} choices of cards and roles", facts, rows, shown)
    yield _changes(report)


def _assessments(title: str, facts: Facts, rows: Iterable[Assessment], shown: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("served as")
    for column in shown:
        table.add_column(column, justify="left" if column in ("limited by", "holds") else "right")
    for one in rows:
        cells = _cells(one)
        name = f"{one.deployment.organisation.value}: {deployment_text(facts, one.deployment)}"
        table.add_row(name, *(cells[column] for column in shown))
    return table


WIDE = ("1/s", "T_first, s", "in time", "ms/token", "start, s", "USD/1000", "limited by", "holds")
NARROW = ("1/s", "T_first, s", "start, s", "USD/1000", "holds")
ROOM_FOR_ALL = 100  # columns of the screen


def _cells(one: Assessment) -> dict[str, str]:
    return {
        "1/s": _number(one.deployment.per_s),
        "T_first, s": _number(one.first_token_s),
        "in time": f"{one.good_share:.0%}",
        "ms/token": _number(one.pace_s * 1e3),
        "start, s": _number(one.drained_at_s),
        "USD/1000": _number(one.usd_per_thousand_good),
        "limited by": one.deployment.limited_by,
        "holds": "yes" if one.holds else f"no: {', '.join(one.misses)}",
    }


def _changes(report: Report) -> Table:
    facts = report.question.facts
    table = Table(title="What would change the answer", title_justify="left")
    for column in ("change", "first choice then", "best then"):
        table.add_column(column)
    for one in report.changes:
        best = "nothing" if one.best is None else _named(facts, one.best)
        same = one.best is not None and one.best.deployment.counts == one.same.deployment.counts
        same = same and one.best is not None and one.best.deployment.prefill == one.same.deployment.prefill
        same = same and one.best is not None and one.best.deployment.organisation is one.same.deployment.organisation
        table.add_row(one.what, _outcome(one.same), "the same" if same else best)
    return table


def _named(facts: Facts, one: Assessment) -> str:
    chosen = one.deployment
    return f"{chosen.organisation.value}, {deployment_text(facts, chosen)}: {_outcome(one)}"


def _outcome(one: Assessment) -> str:
    if one.misses:
        return "; ".join(one.misses.values())
    return f"holds, {one.deployment.per_s:.3g} requests/s, {one.deployment.limited_by}"


def _number(value: float) -> str:
    if value != value:
        return "-"
    return "never" if value == inf else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def sentences(report: Report) -> Iterator[str]:
    """The answer in words, and where it stops being one."""
    question, first, bounds = report.question, report.first, report.bounds
    facts = question.facts
    if first.holds:
        usd = first.usd_per_thousand_good
        price = "at an unknown price" if usd != usd else f"at {usd:.3g} USD for a thousand good answers"
        yield f"First choice: {_named(facts, first)}; {first.cards} cards, {price}."
        if question.ready_s:
            yield f"The backlog of a start of {question.ready_s:g} s is gone {first.drained_at_s:.1f} s after it began."
        yield f"It carries the load and clears the start while {', '.join(_bounds(bounds))}, each alone."
    else:
        yield f"Nothing here holds. Nearest: {_named(facts, first)}."
        yield from _more_cards(report)
    bound = next((one for one in report.found if one.deployment.organisation is Organisation.CHUNKED), None)
    if all(one.deployment.counts == facts.counts for one in report.found) and sum(facts.counts) > 1:
        yield "So many cards have too many parts to look at each: only all of them together were."
    if bound is not None and bound.holds and not first.holds:
        yield f"If all of prefill hid in decode steps, this would: {_named(facts, bound)}."


def _more_cards(report: Report) -> Iterator[str]:
    """How many copies of the nearest choice would do what it does not; each with an equal part of the load."""
    question, first, many = report.question, report.first, report.many
    starts = question.ready_s > 0 and question.targets.drained_by_s < inf
    steps = {
        many.steady: f"keep up with {question.arrival_rps:g} requests/s",
        many.in_time: "clear the start in time" if starts else f"are at most {question.targets.most_busy:.0%} busy",
    }
    if report.holding is not None:
        steps[report.holding] = "meet all targets"
    steps.pop(1, None)  # what these cards do by themselves is no remedy
    told = [f"{times} times {does} ({times * first.cards} cards)" for times, does in steps.items()]
    if told:
        yield f"{', '.join(told)}.".replace(" times ", f" times these {first.cards} cards ", 1)
    if report.holding is None:
        always = "; ".join(misses_of_copies(question, first, MOST_COPIES).values())
        yield f"No number of copies of this choice meets all targets: {always}."


def _bounds(bounds: Limits) -> Iterator[str]:
    """Each alone, everything else as it is."""
    yield f"{bounds.arrival_rps:.3g} requests/s come at most"
    yield f"cards reach {bounds.speed:.0%} of the speed they are taken to have"
    if bounds.link_bytes_per_s:
        yield f"links carry {bounds.link_bytes_per_s / GB:.3g} GB/s"
    if bounds.ready_s < inf:
        yield f"a start takes {bounds.ready_s:.3g} s at most"


def as_plain(report: Report) -> dict[str, Any]:
    """For `--json`: units in names as in the estimators; null where a number is unknown or without limit."""
    facts = report.question.facts
    return {
        "arrival_rps": report.question.arrival_rps,
        "needed_rps": report.question.needed_rps,
        "ready_s": report.question.ready_s,
        "holds": report.first.holds,
        "deployments": [_plain(facts, one) for one in report.found],
        "limits": {name: getattr(report.bounds, name) for name in Limits.__dataclass_fields__},
        "copies": {
            **{name: getattr(report.many, name) for name in Copies.__dataclass_fields__},
            "holding": report.holding,
        },
        "changes": [
            {
                "what": one.what,
                "first_choice": _plain(facts, one.same),
                "best": None if one.best is None else _plain(facts, one.best),
            }
            for one in report.changes
        ],
    }


def _plain(facts: Facts, one: Assessment) -> dict[str, Any]:
    chosen = one.deployment
    names = [kind.name for kind in facts.cards]
    kept = [name for name in Assessment.__dataclass_fields__ if name != "deployment"]
    return {
        "organisation": chosen.organisation.value,
        "prefill": dict(zip(names, chosen.prefill, strict=True)),
        "decode": dict(zip(names, chosen.decode, strict=True)),
        "carries_rps": chosen.per_s,
        "limited_by": chosen.limited_by,
        "rates_rps": chosen.rates_rps,
        "moved_bytes": chosen.moved_bytes,
        "holds": one.holds,
        **{name: getattr(one, name) for name in kept},
    }
