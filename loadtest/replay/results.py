"""What one run gave, as columns: one entry for each request of the trace, in order of arrival.

Every contestant gives this form, a policy behind the router's dispatcher as well as a bound that no router can reach,
so that all of them can stand beside each other in a report.

Valid     times in seconds as on cards of normal speed; durations count from the request's arrival
Blind to  anything between first and last token
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loadtest.traffic import TrafficRow
from sim_backends.engine import Engine

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NOWHERE = -1  # row of a request that was placed on no replica


@dataclass(slots=True)
class Result:
    """One run of one contestant. NaN is unknown; shape (requests,) unless said.

    arrived_s : on the trace's clock, ascending
    first_token_s, ended_s : from arrival; NaN for a request that got none
    prompt_tokens, output_tokens : lengths
    wanted_tokens : of the answer, in the trace
    cached_tokens : prompt tokens the engine did not compute, from memory or store
    row : replica of the fleet file, `NOWHERE` when it was refused
    predicted_s : first token as estimated at the choice; NaN where nobody estimated
    predicted_p90_s, predicted_p99_s : quantiles of it as estimated at the choice; NaN where nobody estimated
    local_tokens, fetched_tokens : believed at the choice, in the replica's memory and to come from elsewhere
    path : index into PATHS as chosen, -1 unknown
    fetched_bytes : over the network, all requests together
    decisions_s : wall time of each decision; empty where nothing is decided one by one
    took_s : processor time of the whole run
    """

    label: str
    replicas: list[str]
    cards: list[str]
    arrived_s: Floats
    first_token_s: Floats
    ended_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    wanted_tokens: Ints
    cached_tokens: Ints
    row: Ints
    predicted_s: Floats
    predicted_p90_s: Floats
    predicted_p99_s: Floats
    local_tokens: Ints
    fetched_tokens: Ints
    path: Ints
    fetched_bytes: float = 0.0
    decisions_s: Floats = field(default_factory=lambda: np.empty(0))
    took_s: float = 0.0

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Requests that got their last token."""
        return ~np.isnan(self.ended_s)

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """Requests whose answer ended before the trace's did: prompt and answer filled all a replica can hold."""
        return self.answered & (self.output_tokens < self.wanted_tokens)

    @property
    def pace_s(self) -> Floats:
        """Seconds per output token after the first; NaN for answers of one token."""
        later = np.where(self.output_tokens > 1, self.output_tokens - 1.0, np.nan)
        return np.asarray((self.ended_s - self.first_token_s) / later)


def room_for_output(engine: Engine, row: TrafficRow) -> int:
    """Output tokens a request may make there: what an engine fills in when its client names no limit, at least 1."""
    return max(1, engine.max_model_len - row.input_length)


def blank(label: str, *, replicas: list[str], cards: list[str], requests: int) -> Result:
    """A result in which nothing has happened yet."""
    unknown = np.full(requests, np.nan)
    zero = np.zeros(requests, dtype=np.int64)
    return Result(
        label=label,
        replicas=replicas,
        cards=cards,
        arrived_s=unknown.copy(),
        first_token_s=unknown.copy(),
        ended_s=unknown.copy(),
        prompt_tokens=zero.copy(),
        output_tokens=zero.copy(),
        wanted_tokens=zero.copy(),
        cached_tokens=zero.copy(),
        row=np.full(requests, NOWHERE, dtype=np.int64),
        predicted_s=unknown.copy(),
        predicted_p90_s=unknown.copy(),
        predicted_p99_s=unknown.copy(),
        local_tokens=zero.copy(),
        fetched_tokens=zero.copy(),
        path=np.full(requests, -1, dtype=np.int64),
    )
