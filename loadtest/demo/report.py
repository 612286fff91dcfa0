"""One run's numbers, and the table that compares runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from loadtest.client import Sample

PATHS = ("local", "remote", "recompute")
SECTION_ENDS = (
    "  p99",
    "end to end, mean",
    "  of those from own memory",
    "  recompute (mainly computed)",
    "  recompute",
)
ENOUGH = 5  # fewer requests of a path give no median worth printing


class ChosenCandidate(msgspec.Struct):
    """What a receipt expected of the candidate it chose."""

    first_token_s: float
    local_tokens: int
    fetched_tokens: int


class ReceiptLine(msgspec.Struct):
    """The fields of a receipt that are read here."""

    request_id: str
    prompt_tokens: int
    candidates: list[ChosenCandidate] = []
    chosen: int | None = None
    first_token_s: float | None = None

    @property
    def main_source(self) -> str:
        """Where most of the prompt's state was expected from: own memory, the store, or computing it."""
        if self.chosen is None:
            return "recompute"
        choice = self.candidates[self.chosen]
        computed = self.prompt_tokens - choice.local_tokens - choice.fetched_tokens
        amounts = dict(zip(PATHS, (choice.local_tokens, choice.fetched_tokens, computed), strict=True))
        return max(amounts, key=lambda path: amounts[path])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens of a whole fleet by where they came from, as its engines counted."""

    prompt: float
    own_memory: float
    store: float

    @property
    def reused_share(self) -> float:
        """Share of all prompt tokens that were not computed; NaN without any."""
        return (self.own_memory + self.store) / self.prompt if self.prompt else float("nan")

    @property
    def own_share(self) -> float:
        """Share of the reused tokens that were in the replica's own memory; NaN without any."""
        reused = self.own_memory + self.store
        return self.own_memory / reused if reused else float("nan")


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's run. Times are wall seconds; `speed` turns them into those of real cards."""

    policy: str
    samples: list[Sample]
    receipts: list[ReceiptLine]
    tokens: Tokens
    speed: float

    @property
    def failed(self) -> list[Sample]:
        """Requests that were not answered."""
        return [sample for sample in self.samples if sample.error is not None]

    def first_tokens_s(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """T_first of every answered request, on real cards."""
        values = [s.first_token_s for s in self.samples if s.first_token_s is not None and s.error is None]
        return np.array(values) * self.speed

    def mean_end_to_end_s(self) -> float:
        """Mean time to the end of an answer, on real cards."""
        return mean([s.ended_s for s in self.samples if s.ended_s is not None]) * self.speed

    def mean_per_token_s(self) -> float:
        """Mean over requests of the time per output token, on real cards."""
        return mean([s.per_token_s for s in self.samples if s.per_token_s is not None]) * self.speed

    def relative_errors(self, path: str | None = None) -> list[float]:
        """|predicted - observed| / observed of T_first, all streamed requests or those of one path."""
        return [
            abs(r.candidates[r.chosen].first_token_s - r.first_token_s) / r.first_token_s
            for r in self.receipts
            if r.chosen is not None and r.first_token_s and path in (None, r.main_source)
        ]

    def path_shares(self) -> list[float]:
        """Share of requests whose state came mainly from each path."""
        sources = [r.main_source for r in self.receipts if r.chosen is not None]
        return [sources.count(path) / max(1, len(sources)) for path in PATHS]


def read_receipts(path: Path) -> list[ReceiptLine]:
    """All receipts in a file of JSON lines."""
    decoder = msgspec.json.Decoder(ReceiptLine)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def tokens_of(scrapes: list[str]) -> Tokens:
    """Sum of the engines' own counters over the replicas' /metrics texts."""

    def total(name: str) -> float:
        pattern = rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$"
        return sum(float(value) for text in scrapes for value in re.findall(pattern, text, flags=re.MULTILINE))

    return Tokens(
        prompt=total("prompt_tokens_total"),
        own_memory=total("prefix_cache_hits_total"),
        store=total("external_prefix_cache_hits_total"),
    )


def comparison(runs: list[Run]) -> Table:
    """The table at the end of the demo: a column for each run, a row for each number."""
    speed = runs[0].speed
    table = Table(
        title=f"{len(runs[0].samples)} requests; times as on real cards (wall time x {speed:g})", title_justify="left"
    )
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")

    firsts = [run.first_tokens_s() for run in runs]
    shares = [run.path_shares() for run in runs]
    rows: list[tuple[str, list[str]]] = [
        ("first token, mean", [seconds(mean(f.tolist())) for f in firsts]),
        ("  p50", [seconds(percentile(f.tolist(), 50)) for f in firsts]),
        ("  p99", [seconds(percentile(f.tolist(), 99)) for f in firsts]),
        ("time per output token", [f"{run.mean_per_token_s() * 1000:.0f} ms" for run in runs]),
        ("end to end, mean", [seconds(run.mean_end_to_end_s()) for run in runs]),
        ("prompt tokens not computed", [f"{run.tokens.reused_share:.0%}" for run in runs]),
        ("  of those from own memory", [f"{run.tokens.own_share:.0%}" for run in runs]),
        ("path local (mainly own memory)", [f"{share[0]:.0%}" for share in shares]),
        ("  remote (mainly the store)", [f"{share[1]:.0%}" for share in shares]),
        ("  recompute (mainly computed)", [f"{share[2]:.0%}" for share in shares]),
        ("prediction error of first token", [median_error(run.relative_errors()) for run in runs]),
        ("  local", [median_error(run.relative_errors("local")) for run in runs]),
        ("  remote", [median_error(run.relative_errors("remote")) for run in runs]),
        ("  recompute", [median_error(run.relative_errors("recompute")) for run in runs]),
        ("errors (requests not answered)", [str(len(run.failed)) for run in runs]),
    ]
    for label, cells in rows:
        table.add_row(label, *cells, end_section=label in SECTION_ENDS)
    table.caption = "prediction error: median of |predicted - observed| / observed"
    table.caption_justify = "left"
    return table


def seconds(value: float) -> str:
    return f"{value:.2f} s"


def median_error(errors: list[float]) -> str:
    """Median relative error; few samples are said to be few rather than averaged."""
    if len(errors) < ENOUGH:
        return f"only {len(errors)}"
    return f"{float(np.median(errors)):.0%}"


def percentile(values: list[float], share: float) -> float:
    """Percentile; NaN of nothing."""
    return float(np.percentile(values, share)) if values else float("nan")


def mean(values: list[float]) -> float:
    """Mean; NaN of nothing, which prints as nan rather than as a number."""
    return sum(values) / len(values) if values else float("nan")
