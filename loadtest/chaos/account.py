"""Whether every request had exactly one end, and how fast first tokens came back, from what both sides wrote down.

Model     clients and router each wrote down an end of every request. A request is accounted for when there is one
          receipt of it, and it tells of the same end. Traffic repeats a pattern, so the first tokens of any stretch
          as long as the pattern are those of the same work; recovered is the first such stretch after the failure
          that is as fast as before, if all that came after it was as fast on average too
Valid     receipts of one run; requests that never reached the router need have none
Blind to  receipts that a killed router had not written yet: missing ones prove nothing then
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import nan

import msgspec

from loadtest.chaos.load import Answer, Outcome

TOLERANCE = 0.2  # first tokens this share slower than before count as recovered

# What a receipt may say of a request that ended so for its client.
_AGREES: dict[Outcome, frozenset[str]] = {
    Outcome.OK: frozenset({"ok"}),
    Outcome.REFUSED: frozenset({"refused", "failed", "server_error", "client_error"}),
    Outcome.CUT: frozenset({"failed", "server_error"}),
    Outcome.SHORT: frozenset(),
    Outcome.FAILED: frozenset({"failed"}),
    Outcome.HUNG: frozenset({"cancelled"}),
}


class ReceiptLine(msgspec.Struct):
    """The fields of a receipt that are read here."""

    request_id: str
    outcome: str | None = None
    attempts: int = 0


def read_receipts(text: bytes) -> list[ReceiptLine]:
    """All receipts in JSON lines. A line that is none, as a killed router may leave one, counts as missing."""
    decoder, receipts = msgspec.json.Decoder(ReceiptLine), []
    for line in text.splitlines():
        with suppress(msgspec.DecodeError):
            receipts.append(decoder.decode(line))
    return receipts


def disagreements(answers: Sequence[Answer], receipts: Sequence[ReceiptLine], *, killed: bool) -> list[str]:
    """A sentence for each request whose end the two sides do not agree on.

    killed : the router was killed meanwhile, so that receipts may be missing
    """
    found: dict[str, list[ReceiptLine]] = {}
    for receipt in receipts:
        found.setdefault(receipt.request_id, []).append(receipt)
    sentences = []
    for answer in answers:
        assert answer.outcome is not None, "all have ended"
        lines = found.pop(answer.request_id, [])
        if not lines and (killed or answer.outcome is Outcome.FAILED):
            continue
        if len(lines) != 1:
            sentences.append(f"{answer.request_id} ({answer.outcome.value}) has {len(lines)} receipts")
        elif lines[0].outcome not in _AGREES[answer.outcome]:
            sentences.append(
                f"{answer.request_id} was {answer.outcome.value} for its client and {lines[0].outcome} in its receipt"
            )
    sentences += [f"{request_id} has a receipt and was never sent" for request_id in found]
    return sentences


def unexpected(answers: Sequence[Answer], may: Collection[Outcome]) -> list[str]:
    """A sentence for each kind of end that this failure must not cause. may : those it may, beside OK"""
    counts = Counter(answer.outcome for answer in answers if answer.outcome not in (Outcome.OK, *may))
    sentences = []
    for outcome, number in counts.items():
        example = next(answer for answer in answers if answer.outcome is outcome)
        name = "unended" if outcome is None else outcome.value
        sentences.append(f"{number} requests {name}, first {example.request_id}: {example.said}")
    return sentences


def mean_first_s(answers: Sequence[Answer]) -> float:
    """Mean time to the first token of those that had one, seconds; NaN if none had."""
    times_s = [answer.first_s for answer in answers if answer.first_s is not None]
    return sum(times_s) / len(times_s) if times_s else nan


def recovery(
    answers: Sequence[Answer], *, before_s: float, well_at_s: float, window: int
) -> tuple[float | None, float]:
    """How long after `well_at_s` first tokens were as before, None if they were not, and their mean from there on.

    Parameters
    ----------
    answers : in order of arrival; those that still run end what can be said, and a stretch with one that was not
        answered is none
    before_s : mean first token before the failure, > 0
    well_at_s : when the failure was over; answers to earlier requests do not count
    window : requests in one repetition of the pattern, >= 1
    """
    after: list[Answer] = []
    for answer in answers:
        if answer.at_s < well_at_s:
            continue
        if answer.outcome is None:
            break
        after.append(answer)
    whole = max((i + 1 for i, answer in enumerate(after) if answer.outcome is not Outcome.OK), default=0)
    limit_s = (1.0 + TOLERANCE) * before_s
    for start in range(whole, len(after) - window + 1):
        rest_s = mean_first_s(after[start:])
        if max(mean_first_s(after[start : start + window]), rest_s) <= limit_s:
            return after[start].at_s - well_at_s, rest_s
    return None, mean_first_s(after[-window:])


def counts_of(answers: Sequence[Answer]) -> Mapping[str, int]:
    """Requests by how they ended, every kind named."""
    counts = Counter(answer.outcome for answer in answers)
    return {outcome.value: counts[outcome] for outcome in Outcome}
