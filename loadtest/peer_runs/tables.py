"""What was measured of each router, and the one table of it.

Model     medians over the rounds. Behind the simulated fleet: what users and engines see. Before stub engines, which
          answer at once: what the router itself takes
Valid     figures of one run only; what else a machine does moves processor time by a few per cent and tails by more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from loadtest.scenarios.goodput import NAN, percent, seconds, table


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One round behind the simulated fleet. Times are wall seconds; shares 0..1; NaN is unknown."""

    first_token_mean_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    end_mean_s: float
    end_p99_s: float
    reused_share: float
    own_share: float  # of the reused tokens, from the replica's own memory and not from the store
    errors: int
    cpu_s_per_1000: float
    resident_mib: float
    late_s: float
    first_error: str | None = None


class Relayed(msgspec.Struct, frozen=True, kw_only=True):
    """One round before stub engines. Processor seconds; NaN when it broke."""

    added_first_byte_s: float = NAN
    cpu_s_per_1000_small: float = NAN
    cpu_s_per_1000_long: float = NAN
    cpu_s_per_100k_chunks: float = NAN


class Measured(msgspec.Struct, kw_only=True):
    """All rounds of one router. missing : why it did not take part, or not to its end"""

    name: str
    version: str = ""
    missing: str | None = None
    served: list[Served] = []
    relayed: list[Relayed] = []


ROWS = (
    "first token, mean",
    "  p50",
    "  p99",
    "end to end, mean",
    "  p99",
    "prompt tokens not computed",
    "  of those from own memory",
    "errors",
    "CPU, 1,000 of these requests",
    "memory after them",
    "added to a first byte",
    "CPU, 1,000 requests of 64 B",
    "CPU, 1,000 requests of 32 kB",
    "CPU, 100,000 chunks",
)


def cells(measured: Measured) -> list[str]:
    """What stands in the rows of `ROWS`."""
    served, relayed = measured.served, measured.relayed
    return [
        seconds(middle([one.first_token_mean_s for one in served])),
        seconds(middle([one.first_token_p50_s for one in served])),
        seconds(middle([one.first_token_p99_s for one in served])),
        seconds(middle([one.end_mean_s for one in served])),
        seconds(middle([one.end_p99_s for one in served])),
        percent(middle([one.reused_share for one in served])),
        percent(middle([one.own_share for one in served])),
        str(sum(one.errors for one in served)) if served else "-",
        seconds(middle([one.cpu_s_per_1000 for one in served])),
        _mib(middle([one.resident_mib for one in served])),
        seconds(middle([one.added_first_byte_s for one in relayed])),
        seconds(middle([one.cpu_s_per_1000_small for one in relayed])),
        seconds(middle([one.cpu_s_per_1000_long for one in relayed])),
        seconds(middle([one.cpu_s_per_100k_chunks for one in relayed])),
    ]


def middle(values: Sequence[float]) -> float:
    """Median of the known values; NaN of none."""
    known = [value for value in values if value == value]
    return median(known) if known else NAN


def _mib(value: float) -> str:
    return "-" if value != value else f"{value:.0f} MiB"


def comparison(routers: Sequence[Measured]) -> str:
    """The table, and who is not in it."""
    there = {f"{one.name} {one.version}".strip(): cells(one) for one in routers if one.served or one.relayed}
    body = table(there, ROWS) if there else "no router could be started"
    return "\n".join([body, *remarks(routers)])


def remarks(routers: Sequence[Measured]) -> list[str]:
    """Who was missing and why, and the first thing that went wrong with each of the others."""
    said = [f"not there: {one.name}: {one.missing}" for one in routers if one.missing is not None]
    for one in routers:
        error = next((turn.first_error for turn in one.served if turn.first_error is not None), None)
        if error is not None:
            said.append(f"first error of {one.name}: {error}")
    return said


def markdown(routers: Sequence[Measured]) -> str:
    """The same for a page: a line for each router."""
    columns: Mapping[str, list[str]] = {
        f"{one.name} {one.version}".strip(): cells(one) for one in routers if one.served or one.relayed
    }
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for at, row in enumerate(ROWS):
        lines.append(f"| {row.strip()} | " + " | ".join(column[at] for column in columns.values()) + " |")
    return "\n".join([*lines, "", *(f"- {remark}" for remark in remarks(routers))])
