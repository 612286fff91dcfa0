"""What the rules had to reach, and whether they did: sentences with their numbers, made of what was played.

Model     means over seeds; "the best of ours" is the objective with the lowest mean first token at that size and load
Valid     tables of `plan.py`; what was not played says nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan

from loadtest.replay.contest.plan import OURS, Table
from loadtest.replay.contest.play import YARDSTICK, Played
from loadtest.replay.measure import Group

WORST_SHARE = 1.02  # of the best baseline
LOST_BY_ERROR = 1.10
MIXED_END_TO_END, MIXED_FIRST_TOKEN, MIXED_OF_BEST = 1.25, 1.3, 1.15
FIRST, ENDED, PACE = "first_token_mean_s", "end_to_end_mean_s", "per_token_p50_s"

Mark = tuple[bool, str]
At = tuple[int, float | None]


def marks(tables: list[Table], played: Mapping[str, Played]) -> Iterator[Mark]:
    """(reached, sentence) for every mark that `played` has numbers for."""
    for table in tables:
        if (own := played.get(table.name)) is None:
            continue
        if table.mark is not None:
            yield from placement(table, own)
        if table.name == "mixed":
            yield from mixed(own)
        if table.error and (right := played.get(table.name.replace("error", "placement"))) is not None:
            yield from error(table, own, right)
        if not table.first_tokens_only:
            yield from pace(table, own)


def by_setting(played: Played) -> dict[At, dict[str, Group]]:
    """Groups by size and load, then by rule."""
    settings: dict[At, dict[str, Group]] = {}
    for group in played.groups:
        settings.setdefault((group.replicas, group.load), {})[group.policy] = group
    return settings


def number(group: Group, field: str) -> float:
    """Mean over seeds; NaN where it is not known."""
    return group.numbers[field].mean


def lowest(rules: Mapping[str, Group], field: str) -> tuple[str, float]:
    """The rule with the lowest known mean of `field`, and that."""
    known = {name: number(group, field) for name, group in rules.items() if not isnan(number(group, field))}
    name = min(known, key=lambda rule: known[rule])
    return name, known[name]


def placement(table: Table, played: Played) -> Iterator[Mark]:
    assert table.mark is not None, "a table with a mark"
    for (size, load), rules in by_setting(played).items():
        ours, baselines = split(rules)
        if not (ours and baselines):
            continue
        name, best_s = lowest(ours, FIRST)
        ratio = number(ours[name], "central_ratio")
        yield (
            ratio <= table.mark,
            f"{table.title}, {size} replicas, {load:g}: `{name}` {ratio:.2f} x central_fcfs (at most {table.mark:.2f})",
        )
        other, other_s = lowest(baselines, FIRST)
        yield (
            best_s <= WORST_SHARE * other_s,
            f"{table.title}, {size} replicas, {load:g}: `{name}` {best_s:.2f} s, others' `{other}` {other_s:.2f} s",
        )


def error(table: Table, wrong: Played, right: Played) -> Iterator[Mark]:
    for setting, rules in by_setting(wrong).items():
        size, load = setting
        before = by_setting(right).get(setting, {})
        for name in (rule for rule in ("e2e",) if rule in rules and rule in before):
            loss = number(rules[name], FIRST) / number(before[name], FIRST)
            sentence = f"{table.title}, {size} replicas, {load:g}: `{name}` loses {loss - 1:.1%} (at most 10 %)"
            yield loss <= LOST_BY_ERROR, sentence


def mixed(played: Played) -> Iterator[Mark]:
    for (_size, load), rules in by_setting(played).items():
        _ours, baselines = split(rules)
        if not {"e2e", "lmetric", "dynamo"} <= rules.keys():
            continue
        e2e = rules["e2e"]
        other, other_s = lowest(baselines, ENDED)
        gain = other_s / number(e2e, ENDED)
        yield (
            gain >= MIXED_END_TO_END,
            f"mixed fleet, {load:g}: `e2e` ends {gain:.2f} x sooner than `{other}`, the best rule (at least 1.25)",
        )
        for name in ("lmetric", "dynamo"):
            gain = number(rules[name], FIRST) / number(e2e, FIRST)
            sentence = f"mixed fleet, {load:g}: first token {gain:.2f} x sooner than `{name}` (at least 1.3)"
            yield gain >= MIXED_FIRST_TOKEN, sentence
        other, other_s = lowest(baselines, FIRST)
        ratio = number(e2e, FIRST) / other_s
        yield (
            ratio <= MIXED_OF_BEST,
            f"mixed fleet, {load:g}: first token {ratio:.2f} x that of `{other}`, the best rule (at most 1.15)",
        )


def pace(table: Table, played: Played) -> Iterator[Mark]:
    for (size, load), rules in by_setting(played).items():
        if "least_request" not in rules:
            continue
        other_s = number(rules["least_request"], PACE)
        for name in (rule for rule in ("e2e", "cost") if rule in rules):
            own_s = number(rules[name], PACE)
            yield (
                own_s <= other_s,
                f"{table.title}, {size} replicas, {load:g}: median time per token of `{name}` {own_s * 1e3:.1f} ms,"
                f" of `least_request` {other_s * 1e3:.1f} ms",
            )


def split(rules: Mapping[str, Group]) -> tuple[dict[str, Group], dict[str, Group]]:
    """Objectives, and the rules of others."""
    ours = {name: group for name, group in rules.items() if name in OURS}
    return ours, {name: group for name, group in rules.items() if name not in OURS and name != YARDSTICK}
