"""How long each replica takes, from what the receipts' candidates were expected to take.

Model     prefill = a new + b pairs + c, pairs = new (cached + new / 2); fetch = d + e tokens; both by least squares
          over all candidates that were named, per replica, coefficients not below zero. Output tokens come at one
          rate while a prefill runs, a token for each of its steps, and at another while none does, which makes up for
          what was observed. One factor on prefill for all replicas, found elsewhere
Valid     prompts like those of the receipts; a replica with few candidates takes the fleet's coefficients
Blind to  how many decodes ran beside a prefill or another decode: an average of what was met
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from router.receipts import Candidate, Receipt
from router.study.groups import Floats

Decoded = tuple[int, float, float, float]  # row, tokens after the first, seconds beside prefills and without

ENOUGH = 12  # candidates or answers of one replica for coefficients of its own
USUAL_RATE = 30.0  # output tokens per second where nothing was seen


@dataclass(frozen=True, slots=True)
class Service:
    """Coefficients by replica, in the order of `names`.

    prefill : (rows, 3); fetch : (rows, 2)
    rates : output tokens per second of each request while a prefill runs, and while none does, (rows, 2)
    """

    names: tuple[str, ...]
    prefill: Floats
    fetch: Floats
    rates: Floats
    factor: float = 1.0

    def prefill_s(self, row: int, new: float, cached: float) -> float:
        """Computing `new` tokens behind `cached`."""
        a, b, c = self.prefill[row].tolist()
        return float(self.factor * (a * new + b * new * (cached + 0.5 * new) + c))

    def fetch_s(self, row: int, tokens: float) -> float:
        """Bringing so many tokens from the store; 0 for none."""
        fixed_s, token_s = self.fetch[row].tolist()
        return float(fixed_s + token_s * tokens) if tokens > 0 else 0.0

    def times(self, factor: float) -> Service:
        """The same with prefills `factor` (> 0) times as long as the coefficients say."""
        return replace(self, factor=factor)


def fitted(receipts: Sequence[Receipt]) -> Service:
    """receipts : at least one with a candidate"""
    seen: dict[str, list[tuple[Candidate, int]]] = {}
    for receipt in receipts:
        for one in receipt.candidates:
            seen.setdefault(one.replica, []).append((one, receipt.prompt_tokens))
    names = tuple(sorted(seen))
    everyone = [pair for name in names for pair in seen[name]]
    own = [seen[name] if len(seen[name]) >= ENOUGH else everyone for name in names]
    return Service(
        names,
        np.stack([_prefill(pairs) for pairs in own]),
        np.stack([_fetch(pairs, everyone) for pairs in own]),
        np.full((len(names), 2), USUAL_RATE),
    )


def with_rates(service: Service, decoded: Sequence[Decoded], step_tokens: int) -> Service:
    """The same with rates of output, from what was decoded. step_tokens : prompt tokens an engine computes in one step

    While a prefill runs, each of its steps gives every running answer a token, so that rate follows from its time.
    """
    rows = np.array([row for row, *_ in decoded], dtype=np.int64)
    rest = np.array([one[1:] for one in decoded], dtype=np.float64).reshape(-1, 3)
    busy = np.array([1.0 / max(service.prefill_s(row, step_tokens, 0.0), 1e-6) for row in range(len(service.names))])
    usual = _idle_rate(rest, busy[rows], USUAL_RATE)
    idle = [_idle_rate(rest[rows == row], busy[row], usual) for row in range(len(service.names))]
    return replace(service, rates=np.stack((np.minimum(busy, idle), idle), axis=1))


def _idle_rate(decoded: Floats, busy_rate: Floats | float, usual: float) -> float:
    """Tokens per second without a prefill, of (tokens, busy_s, idle_s); `usual` where that cannot be told."""
    tokens, busy_s, idle_s = decoded.T
    left = float((tokens - np.minimum(tokens, busy_rate * busy_s)).sum())
    spare_s = float(np.maximum(idle_s, 0.0).sum())
    return left / spare_s if len(decoded) >= ENOUGH and left > 0.0 and spare_s > 0.0 else usual


def _prefill(pairs: Sequence[tuple[Candidate, int]]) -> Floats:
    reused = np.array([one.local_tokens + one.fetched_tokens for one, _ in pairs], dtype=np.float64)
    new = np.array([prompt for _, prompt in pairs], dtype=np.float64) - reused
    features = np.stack((new, new * (reused + 0.5 * new), np.ones(len(pairs))), axis=1)
    return _not_negative(features, np.array([one.compute_s for one, _ in pairs]))


def _fetch(pairs: Sequence[tuple[Candidate, int]], everyone: Sequence[tuple[Candidate, int]]) -> Floats:
    fetched = [one for one, _ in pairs if one.fetched_tokens] or [one for one, _ in everyone if one.fetched_tokens]
    if not fetched:
        return np.zeros(2)
    tokens = np.array([one.fetched_tokens for one in fetched], dtype=np.float64)
    features = np.stack((np.ones(len(fetched)), tokens), axis=1)
    return _not_negative(features, np.array([one.fetch_s for one in fetched]))


def _not_negative(features: Floats, values: Floats) -> Floats:
    """Least squares of relative errors; what would come out below zero is left out, one after the other."""
    weight = 1.0 / np.maximum(values, 1e-3)
    used = list(range(features.shape[1]))
    found = np.zeros(features.shape[1])
    while used:
        scale = np.maximum(np.abs(features[:, used]).max(axis=0), 1e-12)
        solved = np.linalg.lstsq(features[:, used] / scale * weight[:, None], values * weight, rcond=None)[0] / scale
        if (solved >= 0.0).all():
            found[used] = solved
            return found
        used.pop(int(np.argmin(solved * scale)))
    return found
