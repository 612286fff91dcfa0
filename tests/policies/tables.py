"""Candidates written down by hand, so that a test of a rule says every number it rests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimates, Surroundings
from estimators.hit_probability import HitProbability
from estimators.paths import COLUMN, PATHS, Path
from estimators.spread import ResidualSpread

NAMES = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Row:
    """One candidate: `path` on replica `row`. Seconds; the first token is max(queue, ready) + compute."""

    row: int
    path: Path
    queue_s: float = 0.0
    ready_s: float = 0.0
    compute_s: float = 0.01
    put_off_s: float = 0.0


def table(
    *candidates: Row,
    rows: int = 2,
    output_tokens: float = 1.0,
    pace_s: float | list[float] = 1e-9,
    decoding: float | list[float] = 0.0,
    usd_per_hour: float | list[float] = np.nan,
) -> Estimates:
    """The estimates of these candidates and no others, of `rows` replicas, in a fleet to which nothing else arrives."""
    shape = (len(PATHS), rows)
    queue_s, possible = np.zeros(rows), np.zeros(shape, dtype=np.bool_)
    compute_s, ready_s, put_off_s = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for one in candidates:
        at = COLUMN[one.path], one.row
        queue_s[one.row] = one.queue_s
        possible[at], compute_s[at], ready_s[at], put_off_s[at] = True, one.compute_s, one.ready_s, one.put_off_s
    return Estimates(
        possible=possible,
        reused_tokens=np.zeros(shape),
        queue_s=queue_s,
        fetch_s=ready_s,
        ready_s=ready_s,
        prefill_s=compute_s,
        compute_s=compute_s,
        first_token_s=np.maximum(queue_s, ready_s) + compute_s,
        hit_probability=np.ones(shape),
        stored_probability=np.zeros(shape),
        stored_s=np.ones(rows),
        age_s=np.full((4, rows), np.nan),
        pace_s=np.broadcast_to(pace_s, rows).astype(np.float64),
        decoding=np.broadcast_to(decoding, rows).astype(np.float64),
        remaining_tokens=np.zeros(rows),
        step_growth_s=np.zeros(rows),
        around=Surroundings(
            arrival_rps=0.0,
            mean_compute_s=0.0,
            mean_context_tokens=0.0,
            output_tokens=output_tokens,
            others_output_tokens=1.0,
        ),
        prompt_tokens=1000,
        pace_scale=np.ones(rows),
        weights_s=np.zeros(rows),
        usd_per_hour=np.broadcast_to(usd_per_hour, rows).astype(np.float64),
        put_off=lambda _: put_off_s,
    )


def with_hits(estimates: Estimates, path: Path, row: int, probability: float) -> Estimates:
    """The same, with a copy that is there only with `probability`, and no residual spread."""
    hit = estimates.hit_probability.copy()
    hit[COLUMN[path], row] = probability
    names = NAMES[: len(estimates.queue_s)]
    doubt = Doubt(HitProbability(names), ResidualSpread(names), Conformal(LEVELS))
    return estimates.changed(hit_probability=hit, doubt=doubt, scale=0.0, shift=0.0)
