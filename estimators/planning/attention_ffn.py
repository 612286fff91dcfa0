"""What does it cost to run attention and feed-forward layers on different machines?

Model     each layer sends one hidden vector a token over and gets one back: 2 x layers crossings a step, one after
          another, each start + bytes / rate. A prefill handoff (PD) crosses once with the whole state
Valid     dense feed-forward or one expert pool behind one link; crossings not hidden behind computation
Blind to  experts on several cards (see `expert_parallel`), queues on the link, crossings in the middle of an overlap
Source    textbook section 9.3.4; MegaScale-Infer, arXiv 2504.02263
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from estimators.ranges import require
from estimators.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Crossing:
    """Data that passes a link in `starts` (>= 1) parts, one after another. payload_bytes : of all of them, >= 0"""

    payload_bytes: float
    starts: int

    def __post_init__(self) -> None:
        require(0 <= self.payload_bytes < inf, "payload_bytes", self.payload_bytes)
        require(self.starts >= 1, "starts", self.starts)

    def serial_s(self, *, bytes_per_s: float, start_s: float) -> float:
        """Payload over the rate (> 0) and every start (>= 0), seconds."""
        require(0 < bytes_per_s < inf, "bytes_per_s", bytes_per_s)
        require(0 <= start_s < inf, "start_s", start_s)
        return self.payload_bytes / bytes_per_s + self.starts * start_s


def layer_crossings(shape: ModelShape, *, tokens: int = 1) -> Crossing:
    """Hidden vectors of `tokens` (>= 1) there and back, in every layer."""
    require(tokens >= 1, "tokens", tokens)
    starts = 2 * shape.layers
    return Crossing(float(starts * tokens * shape.hidden * shape.value_bytes), starts)


def critical_start_s(*, state_bytes: float, layers: Crossing, bytes_per_s: float) -> float:
    """The start time at which all crossings of a step take as long as one handoff of `state_bytes`.

    Below it the step is faster. (state - payload) / ((starts - 1) rate); negative when the state is the smaller one,
    so that no start time is short enough.

    Raises
    ------
    ValueError : `layers` has a single start, so that both differ in payload alone, or an argument is out of range.
    """
    require(layers.starts > 1, "layers.starts", layers.starts, "as many as the handoff's: no start time matters")
    require(0 <= state_bytes < inf, "state_bytes", state_bytes)
    require(0 < bytes_per_s < inf, "bytes_per_s", bytes_per_s)
    return (state_bytes - layers.payload_bytes) / ((layers.starts - 1) * bytes_per_s)
