"""The fleet as columns: one row per replica, lent read-only to estimators and policies for one decision.

The `Dispatcher` owns and updates it in place; nobody keeps a reference past the decision. Unknown is NaN, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from estimators.first_token import Discipline
from estimators.prefill_features import prior_coefficients
from estimators.ranges import require
from estimators.roofline import Rates

Column = npt.NDArray[np.float64]


class Row(NamedTuple):
    """One replica as plain numbers, in the order of the view's table; see `FleetView`."""

    linear_s_per_token: float
    attention_s_per_pair: float
    head_s: float
    weights_s: float
    experts_s: float
    context_s_per_token: float
    decode_attention_s_per_pair: float
    linear: float  # coefficients, see `estimators.prefill_features`
    attention: float
    steps: float
    constant: float
    memory: float
    waiting_linear_s: float
    waiting_attention_s: float
    waiting_tokens: float
    waiting_context_tokens: float
    waiting_held_s: float
    head_ends_s: float
    head_compute_s: float
    head_tokens: float
    decode_batch: float
    decode_context_tokens: float
    remaining_tokens: float
    foreign_waiting: float
    foreign_decoding: float
    capacity_tokens: float
    pace_scale: float
    occupancy: float


_AT = {name: number for number, name in enumerate(Row._fields)}


class FleetView:
    """Columns of shape (rows,), float64 unless said; all but a few are rows of one table, which a decision can read
    at once, so they are written in place only.

    What a replica is
        names : of the replicas, in order
        linear_s_per_token ... decode_attention_s_per_pair : its roofline, see `estimators.roofline.Rates`
        work_rates : the three of them that a prompt's own work takes, (3, rows): linear, attention, head
        capacity_tokens : context its KV memory holds; NaN unknown
    What it is doing, from the router's own bookings
        ready (bool) : may be chosen for the request being decided
        booked (int64) : requests chosen for it and not yet ended
        head_ends_s : when the prefill now in service should end, absolute; -inf when none is
        head_compute_s : length of that prefill
        head_tokens : its prompt
        waiting_linear_s, waiting_attention_s : prefill work booked behind it, seconds at the roofline
        waiting_tokens : prompt tokens to compute in that work
        waiting_context_tokens : prompt tokens of that work, reused ones included
        waiting_held_s : how long fetches of that work hold the GPU, on engines where they do
        waiting : all of these columns together, (5, rows)
        decode_batch : booked requests past their first token
        decode_context_tokens : their context, prompt and output so far
        remaining_tokens : output they have yet to produce, expected
    What it reports, with its age
        foreign_waiting, foreign_decoding : requests of others queued and running there; NaN unknown
        kv_used_share : share of its KV memory in use, 0..1; NaN unknown
        sampled_at_s : when that was last reported; NaN never
    What was learned
        coefficients (rows, features) : prefill corrections, see `estimators.prefill_features`
        pace_scale : observed over ideal time per output token
        occupancy : KV memory in use over the context booked there, which is below 1 where requests share blocks
        samples (int64) : first tokens the replica's prefill corrections rest on
        disciplines : what each replica does about a fetch, a list; limit_s : patience of the time-limited ones
    """

    def __init__(self, names: Sequence[str], rates: Sequence[Rates]) -> None:
        require(len(names) == len(rates), "rates", len(rates), "not one for each name")
        rows = len(names)
        self.names = tuple(names)
        self.rows = rows
        table = np.zeros((len(_AT), rows))
        self.table = table
        self.linear_s_per_token = table[_AT["linear_s_per_token"]]
        self.attention_s_per_pair = table[_AT["attention_s_per_pair"]]
        self.head_s = table[_AT["head_s"]]
        self.weights_s = table[_AT["weights_s"]]
        self.experts_s = table[_AT["experts_s"]]
        self.context_s_per_token = table[_AT["context_s_per_token"]]
        self.decode_attention_s_per_pair = table[_AT["decode_attention_s_per_pair"]]
        self.capacity_tokens = table[_AT["capacity_tokens"]]
        self._knows_capacity = False
        self.work_rates = table[_AT["linear_s_per_token"] : _AT["weights_s"]]
        self._is(rates)

        self.ready = np.zeros(rows, dtype=np.bool_)
        self.booked = np.zeros(rows, dtype=np.int64)
        self.head_ends_s = table[_AT["head_ends_s"]]
        self.head_ends_s[:] = -np.inf
        self.head_compute_s = table[_AT["head_compute_s"]]
        self.head_tokens = table[_AT["head_tokens"]]
        self.waiting = table[_AT["waiting_linear_s"] : _AT["head_ends_s"]]
        (
            self.waiting_linear_s,
            self.waiting_attention_s,
            self.waiting_tokens,
            self.waiting_context_tokens,
            self.waiting_held_s,
        ) = self.waiting
        self.decode_batch = table[_AT["decode_batch"]]
        self.decode_context_tokens = table[_AT["decode_context_tokens"]]
        self.remaining_tokens = table[_AT["remaining_tokens"]]

        self.foreign_waiting = table[_AT["foreign_waiting"]]
        self.foreign_decoding = table[_AT["foreign_decoding"]]
        self.kv_used_share = np.full(rows, np.nan)
        self.sampled_at_s = np.full(rows, np.nan)
        for unknown in (self.capacity_tokens, self.foreign_waiting, self.foreign_decoding):
            unknown[:] = np.nan

        self.coefficients = table[_AT["linear"] : _AT["waiting_linear_s"]].T
        self.coefficients[:] = prior_coefficients()
        self.pace_scale = table[_AT["pace_scale"]]
        self.occupancy = table[_AT["occupancy"]]
        for factor in (self.pace_scale, self.occupancy):
            factor[:] = 1.0
        self.samples = np.zeros(rows, dtype=np.int64)
        self.disciplines: list[Discipline] = [Discipline.OVERLAPPED] * rows
        self.limit_s = np.zeros(rows)

    def _is(self, rates: Sequence[Rates]) -> None:
        for row, one in enumerate(rates):
            self.linear_s_per_token[row] = one.linear_s_per_token
            self.attention_s_per_pair[row] = one.attention_s_per_pair
            self.head_s[row] = one.head_s
            self.weights_s[row] = one.weights_s
            self.experts_s[row] = one.experts_s
            self.context_s_per_token[row] = one.context_s_per_token
            self.decode_attention_s_per_pair[row] = one.decode_attention_s_per_pair or one.attention_s_per_pair

    def by_row(self) -> list[Row]:
        """The columns of the table, turned: for those to whom plain numbers are cheaper than arrays."""
        return [Row(*numbers) for numbers in self.table.T.tolist()]

    @property
    def knows_capacity(self) -> bool:
        """Whether the KV capacity of any replica is known."""
        return self._knows_capacity

    def has_capacity(self, row: int, tokens: float) -> None:
        """`row` has KV memory for `tokens` (> 0) of context."""
        self.capacity_tokens[row] = tokens
        self._knows_capacity = True

    @property
    def discipline(self) -> Discipline | None:
        """What every replica does about a fetch; None where they differ."""
        first = self.disciplines[0]
        return first if self.disciplines.count(first) == self.rows else None
