"""Findings as an operator reads them: a table on a terminal, plain lines elsewhere, JSON where a program asks.

Model     the three forms hold the same findings; JSON adds the facts behind them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.doctor.facts import Facts
from router.doctor.judge import Finding, Level, works

_STYLES = {Level.FINE: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}
_PLAIN_LEVEL, _PLAIN_ABOUT = 8, 13  # widths of columns


@dataclass(frozen=True, slots=True)
class Report:
    """One server's facts and findings."""

    facts: Facts
    findings: list[Finding]

    @property
    def works(self) -> bool:
        return works(self.findings)


def print_reports(reports: Sequence[Report], console: Console) -> None:
    """A table for each server on a terminal, else plain lines that `grep` understands."""
    for report in reports:
        if console.is_terminal:
            console.print(_table(report))
        else:
            console.out("\n".join(_lines(report)), highlight=False)
    console.out(summary(reports), highlight=False)


def summary(reports: Sequence[Report]) -> str:
    """The last line: whether cache-aware routing would work."""
    bad = [report.facts.url for report in reports if not report.works]
    if not bad:
        return "Cache-aware routing would work."
    return f"Cache-aware routing would not work for {', '.join(bad)}."


def as_json(reports: Sequence[Report]) -> bytes:
    """Everything, for programs. Unknown is null."""
    servers = [
        {
            "url": report.facts.url,
            "works": report.works,
            "findings": [_finding(finding) for finding in report.findings],
            "facts": _builtins(report.facts),
        }
        for report in reports
    ]
    works_for_all = all(report.works for report in reports)
    return msgspec.json.format(msgspec.json.encode({"works": works_for_all, "servers": servers}), indent=2)


def _finding(finding: Finding) -> dict[str, str | None]:
    return {
        "level": finding.level.value,
        "about": finding.about,
        "sentence": finding.sentence,
        "fix": finding.fix,
    }


def _builtins(facts: Facts) -> Any:
    """Plain values; a source's computed answer to a replay is among them."""
    plain = msgspec.to_builtins(facts)
    for source, said in zip(facts.sources, plain["sources"], strict=True):
        said["replay_answers"] = source.replay_answers
    return plain


def _table(report: Report) -> Table:
    table = Table(title=report.facts.url, title_justify="left", show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in report.findings:
        sentence = Text(finding.sentence)
        if finding.fix is not None:
            sentence.append(f"\n→ {finding.fix}", style="bold")
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), finding.about, sentence)
    return table


def _lines(report: Report) -> Iterator[str]:
    yield report.facts.url
    for finding in report.findings:
        sentence = " ".join(finding.sentence.splitlines())  # a server's words cannot begin a line of their own
        yield f"  {finding.level.value:<{_PLAIN_LEVEL}}{finding.about:<{_PLAIN_ABOUT}}{sentence}"
        if finding.fix is not None:
            yield f"  {'':<{_PLAIN_LEVEL}}{'':<{_PLAIN_ABOUT}}-> {finding.fix}"
    yield ""
