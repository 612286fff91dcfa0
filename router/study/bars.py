"""The candidates of one receipt as bars of text on one time axis.

Model     a bar is the time from the choice to the first token: queue from 0 to Q, the fetch as long as it takes until
          R, both where they overlap, and compute from the later of the two. A cell shows what its middle is
Valid     any candidates; without `ready_s` a fetch is taken to begin with the queue
"""

from __future__ import annotations

from dataclasses import dataclass

from router.receipts import Candidate

QUEUE, FETCH, BOTH, COMPUTE, NOTHING = "░", "▒", "▓", "█", " "
WORDS = {QUEUE: "queue", FETCH: "fetch", BOTH: "queue and fetch", COMPUTE: "compute"}
ROUND = (1, 2, 2.5, 5, 10)  # steps of an axis, times a power of ten


@dataclass(frozen=True, slots=True)
class Spans:
    """When what happens, seconds from the choice. The fetch is empty where nothing is fetched."""

    queue_until_s: float
    fetch_from_s: float
    fetch_until_s: float
    compute_from_s: float
    first_token_s: float

    def at(self, moment_s: float) -> str:
        """What goes on at one moment."""
        if moment_s >= self.first_token_s:
            return NOTHING
        if moment_s >= self.compute_from_s:
            return COMPUTE
        queues = moment_s < self.queue_until_s
        fetches = self.fetch_from_s <= moment_s < self.fetch_until_s
        if queues and fetches:
            return BOTH
        return FETCH if fetches else QUEUE


def spans_of(candidate: Candidate) -> Spans:
    """When what happens, as it is believed."""
    queue_s, fetch_s = candidate.queue_s, candidate.fetch_s
    ready_s = fetch_s if candidate.ready_s is None else candidate.ready_s
    compute_from_s = min(max(queue_s, ready_s), candidate.first_token_s)
    begins_s = max(0.0, ready_s - fetch_s) if fetch_s else ready_s
    return Spans(queue_s, begins_s, ready_s, compute_from_s, candidate.first_token_s)


def bar(candidate: Candidate, *, axis_s: float, width: int) -> str:
    """`width` characters for the time from 0 to `axis_s` (> 0).

    >>> spans = Spans(0.2, 0.0, 0.4, 0.4, 0.8)
    >>> "".join(spans.at((cell + 0.5) * 0.1) for cell in range(10))
    '▓▓▒▒████  '
    """
    spans = spans_of(candidate)
    cell_s = axis_s / width
    return "".join(spans.at((cell + 0.5) * cell_s) for cell in range(width))


def axis_end_s(longest_s: float) -> float:
    """A round number of seconds, at least `longest_s` (> 0) and at most two and a half times that."""
    power = 1e-4
    while True:
        for step in ROUND:
            if step * power >= longest_s:
                return step * power
        power *= 10


def axis(axis_s: float, width: int) -> tuple[str, str]:
    """The axis under the bars and the line of numbers under it: 0, half where there is room, and the end."""
    middle = width // 2
    line = "└" + "─" * (middle - 1) + "┴" + "─" * (width - middle - 2) + "┘"
    half, end = seconds(axis_s / 2), seconds(axis_s)
    numbers = "0".ljust(middle - len(half) // 2) + half
    if len(numbers) + len(end) >= width:
        numbers = "0"
    return line, numbers.ljust(width - len(end)) + end


def seconds(value_s: float) -> str:
    """A time as people read it.

    >>> [seconds(value) for value in (0.00042, 0.0125, 0.3456, 12.3456, 400.0)]
    ['0.42 ms', '12.5 ms', '346 ms', '12.3 s', '400 s']
    """
    scaled, unit = (value_s * 1000, "ms") if abs(value_s) < 1.0 else (value_s, "s")
    return f"{scaled:.3g} {unit}"
