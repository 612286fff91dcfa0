"""What the page shows, as plain values. Unknown is null, never zero.

Model     the fleet as `/fleet` has it, without what nobody reads from afar; decisions in short for the list, and whole
          when one is opened; arms as quantiles of what their requests saw
Valid     values that JSON can carry: NaN becomes null on the way out
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from router.page.live import Decision, Line, Live
from router.receipts import Candidate, Receipt
from router.receipts.writer import GOOD
from router.study.bars import seconds, spans_of
from router.study.explain import what_came, why

REPLICA = (
    *("name", "card", "role", "up", "drained", "health", "booked", "decoding", "prefill_ahead_s"),
    *("foreign_waiting", "signal_age_s", "calibration", "kv_used_share", "cache_is_guessed"),
)  # fields of a replica in /fleet that the page shows


def fleet(values: Mapping[str, Any]) -> dict[str, Any]:
    """`/fleet` in short, each replica with the state of its event source."""
    sources = {source["name"]: source for source in values["event_sources"]}
    return {
        "policy": values["policy"],
        "in_flight": values["in_flight"],
        "queued": sum(values["queued"].values()),
        "replicas": [
            {**{name: replica[name] for name in REPLICA}, "events": _source(sources.pop(replica["name"], None))}
            for replica in values["replicas"]
        ],
        "stores": [{"name": name, "events": _source(source)} for name, source in sources.items()],
        "experiment": values["experiment"],
    }


def _source(source: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if source is None:
        return None
    return {"state": source["state"], "carrier": source["carrier"], "age_s": source["age_s"]}


def decision(one: Decision) -> dict[str, Any]:
    """One decision as a row of the list."""
    receipt, choice = one.receipt, one.choice
    return {
        "number": one.number,
        "changed": one.changed,
        "id": receipt.request_id,
        "at": receipt.arrived_at + (receipt.placed_s or 0.0),
        "policy": receipt.policy,
        "arm": receipt.arm,
        "prompt_tokens": receipt.prompt_tokens,
        "outcome": receipt.outcome,
        "cause": receipt.cause,
        "attempts": receipt.attempts,
        "late": one.late,
        "notable": one.notable,
        "waited_s": receipt.waited_s,
        "chosen": None if choice is None else candidate(choice),
    }


def candidate(one: Candidate) -> dict[str, Any]:
    """One candidate with the spans of its bar."""
    spans = spans_of(one)
    return {
        "replica": one.replica,
        "path": one.path,
        "spans": [
            spans.queue_until_s,
            spans.fetch_from_s,
            spans.fetch_until_s,
            spans.compute_from_s,
            spans.first_token_s,
        ],
        "expected_s": one.expected_s,
        "p90_s": one.first_token_p90_s,
        "p99_s": one.first_token_p99_s,
        "hit_probability": one.hit_probability,
        "local_tokens": one.local_tokens,
        "fetched_tokens": one.fetched_tokens,
        "pace_s": one.pace_s,
        "queue_price_s": one.queue_price_s,
        "decode_price_s": one.decode_price_s,
        "signal_age_s": one.signal_age_s,
        "blocks_age_s": one.blocks_age_s,
        "evidence": one.evidence,
        "approximate": one.approximate,
        "calibration": one.calibration,
    }


def opened(one: Decision) -> dict[str, Any]:
    """One decision with all its candidates and the sentences why. Takes a while with many: not for the loop."""
    receipt = one.whole()
    order = _in_order(receipt)
    return {
        **decision(one),
        "model": receipt.model,
        "endpoint": receipt.endpoint,
        "streamed": receipt.streamed,
        "prompt_exact": receipt.prompt_exact,
        "tried": receipt.tried,
        "output_tokens": receipt.output_tokens,
        "expected_output_tokens": receipt.expected_output_tokens,
        "cached_tokens": receipt.cached_tokens,
        "first_token_s": receipt.first_token_s,
        "ended_s": receipt.ended_s,
        "deadline_s": receipt.deadline_s,
        "probability": receipt.probability,
        "regret_s": receipt.regret_s,
        "why": why(receipt),
        "what_came": what_came(receipt) if receipt.outcome is not None else _so_far(receipt),
        "candidates": [candidate(receipt.candidates[index]) for index in order],
        "shadows": [{"arm": each.arm, "replica": each.replica, "path": each.path} for each in receipt.shadows],
    }


def _so_far(receipt: Receipt) -> str:
    if receipt.first_token_s is None:
        return "It waits for its first token."
    return f"It is being answered; the first token came {seconds(receipt.first_token_s)} after it arrived."


def _in_order(receipt: Receipt) -> list[int]:
    """The chosen candidate, then the others by when their first token was expected."""
    return sorted(
        range(len(receipt.candidates)),
        key=lambda index: (index != receipt.chosen, receipt.candidates[index].expected_s),
    )


def points(lines: Iterable[Line]) -> list[list[Any]]:
    """Expected and observed first tokens with their path, where there are both."""
    return [
        [line.expected_s, line.waited_s, line.path]
        for line in lines
        if line.expected_s is not None and line.waited_s is not None
    ]


def steps(live: Live, last: int | None = None) -> list[dict[str, Any]]:
    """Counts by path of the last steps of time, or of all."""
    kept = list(live.steps)
    return [{"start": step.start, "paths": dict(step.paths)} for step in (kept if last is None else kept[-last:])]


def arms(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """What requests of each arm saw; without an experiment there is one, named ""."""
    by_arm: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_arm[line.arm].append(line)
    return [_arm(name, by_arm[name]) for name in sorted(by_arm)]


def _arm(name: str, lines: Sequence[Line]) -> dict[str, Any]:
    first = [line.first_token_s for line in lines if line.first_token_s is not None]
    ended = [line.ended_s for line in lines if line.ended_s is not None and line.outcome == "ok"]
    both = [(line.expected_s, line.waited_s) for line in lines if line.expected_s and line.waited_s is not None]
    return {
        "name": name,
        "policy": ", ".join(sorted({line.policy for line in lines})),
        "requests": len(lines),
        "failed": sum(line.outcome not in GOOD for line in lines),
        "late": sum(line.late is True for line in lines),
        "first_token_s": _quantiles(first),
        "end_to_end_s": _quantiles(ended),
        "error_share": _median([abs(waited / expected - 1.0) for expected, waited in both]),
        "within_p90": _covered([(line.p90_s, line.waited_s) for line in lines]),
        "within_p99": _covered([(line.p99_s, line.waited_s) for line in lines]),
    }


def _quantiles(values_s: Sequence[float]) -> list[float] | None:
    """Median, p90 and p99."""
    return None if not values_s else np.quantile(values_s, (0.5, 0.9, 0.99)).tolist()


def _median(values: Sequence[float]) -> float | None:
    return None if not values else float(np.median(values))


def _covered(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Share of observed first tokens within the quantile that was told of them."""
    inside = [waited <= limit for limit, waited in pairs if limit is not None and waited is not None]
    return sum(inside) / len(inside) if inside else None
