"""The fleet as columns: one row per replica, lent read-only to estimators and policies for one decision.

The `Dispatcher` owns and updates it in place; nobody keeps a reference past the decision. Unknown is NaN, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from estimators.first_token import Discipline
from estimators.prefill_features import FEATURES, prior_coefficients
from estimators.ranges import require
from estimators.roofline import Rates

if TYPE_CHECKING:
    from estimators.told import Told

Column = npt.NDArray[np.float64]


# Rows of the table that most columns are part of. Their order is what `few_replicas.py` unpacks.
TABLE = (
    "linear_s_per_token",
    "attention_s_per_pair",
    "head_s",
    "weights_s",
    "experts_s",
    "context_s_per_token",
    "decode_attention_s_per_pair",
    *(f"coefficient_{feature}" for feature in FEATURES),
    "waiting_linear_s",
    "waiting_attention_s",
    "waiting_tokens",
    "waiting_context_tokens",
    "waiting_held_s",
    "head_ends_s",
    "head_compute_s",
    "head_tokens",
    "decode_batch",
    "decode_context_tokens",
    "decode_read_tokens",
    "remaining_tokens",
    "foreign_waiting",
    "foreign_decoding",
    "capacity_tokens",
    "pace_scale",
    "occupancy",
)
_AT = {name: number for number, name in enumerate(TABLE)}


def spare_name(row: int) -> str:
    """What a row that is no replica's is called; replicas have no such names."""
    return f"(spare {row})"


def is_nobody(name: str) -> bool:
    """Whether a row of this name takes no part in anything: spare, or given up by its replica."""
    return name.startswith("(")


class FleetView:
    """Columns of shape (rows,), float64 unless said; all but a few are rows of one table, which a decision can read
    at once, so they are written in place only.

    table : (len(TABLE), rows)
    What a replica is
        names : of the replicas, in order, all different; another tuple once one changes
        linear_s_per_token ... decode_attention_s_per_pair : its roofline, see `estimators.roofline.Rates`
        work_rates : the three of them that a prompt's own work takes, (3, rows): linear, attention, head
        capacity_tokens : context its KV memory holds; NaN unknown
        usd_per_hour : price of all its cards; NaN unknown
        chosen_share : routed experts one token passes over all there are, of the model; 1 without experts
    now_s : moment of the decision it is lent for, or of the event a rule is told of
    What it is doing, from the router's own bookings
        up (bool) : answers its probes, so that others may read from it
        ready (bool) : may be chosen for the request being decided
        booked (int64) : requests chosen for it and not yet ended
        prefill_tokens : prompt tokens it was to compute for those whose prefill is not known to be over, all of them
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
        decode_read_tokens : what each of their steps reads of it, see `ShapeCosts.read_tokens`
        remaining_tokens : output they have yet to produce, expected
    What it reports, with its age
        foreign_waiting, foreign_decoding : requests of others queued and running there; NaN unknown
        kv_used_share : share of its KV memory in use, 0..1; NaN unknown
        sampled_at_s : when that was last reported; NaN never
        oldest_report_s : the earliest of these, or earlier; NaN while there is none
        fresh_s : a report counts in full for so long, > 0
    What was learned
        coefficients (rows, features) : prefill corrections, see `estimators.prefill_features`
        pace_scale : observed over ideal time per output token
        occupancy : KV memory in use over the context booked there, which is below 1 where requests share blocks
        samples (int64) : first tokens the replica's prefill corrections rest on
        disciplines : what each replica does about a fetch, a list; limit_s : patience of the time-limited ones
    told : what each replica can be told now, see `told.py`; None: all that is possible
    """

    def __init__(self, names: Sequence[str], rates: Sequence[Rates]) -> None:
        require(len(names) == len(rates), "rates", len(rates), "not one for each name")
        rows = len(names)
        self.names = tuple(names)
        self.rows = rows
        self.table = table = np.zeros((len(TABLE), rows))
        column = dict(zip(TABLE, table, strict=True))
        self.linear_s_per_token = column["linear_s_per_token"]
        self.attention_s_per_pair = column["attention_s_per_pair"]
        self.head_s = column["head_s"]
        self.weights_s = column["weights_s"]
        self.experts_s = column["experts_s"]
        self.context_s_per_token = column["context_s_per_token"]
        self.decode_attention_s_per_pair = column["decode_attention_s_per_pair"]
        self.capacity_tokens = column["capacity_tokens"]
        self._knows_capacity = False
        self.work_rates = table[_AT["linear_s_per_token"] : _AT["weights_s"]]
        self._is(rates)
        self.usd_per_hour = np.full(rows, np.nan)
        self.chosen_share = 1.0

        self.up = np.ones(rows, dtype=np.bool_)
        self.ready = np.zeros(rows, dtype=np.bool_)
        self.now_s = 0.0
        self.booked = np.zeros(rows, dtype=np.int64)
        self.prefill_tokens = np.zeros(rows)
        self.head_ends_s = column["head_ends_s"]
        self.head_compute_s = column["head_compute_s"]
        self.head_tokens = column["head_tokens"]
        self.waiting = table[_AT["waiting_linear_s"] : _AT["head_ends_s"]]
        (
            self.waiting_linear_s,
            self.waiting_attention_s,
            self.waiting_tokens,
            self.waiting_context_tokens,
            self.waiting_held_s,
        ) = self.waiting
        self.decode_batch = column["decode_batch"]
        self.decode_context_tokens = column["decode_context_tokens"]
        self.decode_read_tokens = column["decode_read_tokens"]
        self.remaining_tokens = column["remaining_tokens"]

        self.foreign_waiting = column["foreign_waiting"]
        self.foreign_decoding = column["foreign_decoding"]
        self.kv_used_share = np.full(rows, np.nan)
        self.sampled_at_s = np.full(rows, np.nan)
        self.oldest_report_s = np.nan
        self.fresh_s = 2.0

        self.coefficients = table[_AT["coefficient_linear"] : _AT["waiting_linear_s"]].T
        self.pace_scale = column["pace_scale"]
        self.occupancy = column["occupancy"]
        self.samples = np.zeros(rows, dtype=np.int64)
        self.disciplines: list[Discipline] = [Discipline.OVERLAPPED] * rows
        self.limit_s = np.zeros(rows)
        self.told: Told | None = None
        self._begin(slice(None))

    def renew(
        self, row: int, name: str, rates: Rates, *, usd_per_hour: float, discipline: Discipline, limit_s: float
    ) -> None:
        """`row` is that of another replica: nothing is known of it but what is said here, and it is not up yet."""
        require(self.booked.item(row) == 0, "row", row, "still has requests booked")
        self.name(row, name)
        self.table[:, row] = 0.0
        self._is([rates], first=row)
        self._begin(row)
        self.up[row] = self.ready[row] = False
        self.samples[row] = 0
        self.kv_used_share[row] = self.sampled_at_s[row] = np.nan
        self.usd_per_hour[row] = usd_per_hour
        self.disciplines[row] = discipline
        self.limit_s[row] = limit_s
        self._knows_capacity = not bool(np.isnan(self.capacity_tokens).all())

    def name(self, row: int, name: str) -> None:
        """`row` is called so from now on."""
        require(name not in self.names[:row] + self.names[row + 1 :], "name", name, "that of another row")
        self.names = (*self.names[:row], name, *self.names[row + 1 :])

    def _begin(self, rows: int | slice) -> None:
        """Columns of `rows` that are not zero before anything was booked, reported or learned."""
        self.head_ends_s[rows] = -np.inf
        for unknown in (self.capacity_tokens, self.foreign_waiting, self.foreign_decoding):
            unknown[rows] = np.nan
        self.coefficients[rows] = prior_coefficients()
        for factor in (self.pace_scale, self.occupancy):
            factor[rows] = 1.0

    def _is(self, rates: Sequence[Rates], *, first: int = 0) -> None:
        for row, one in enumerate(rates, first):
            self.linear_s_per_token[row] = one.linear_s_per_token
            self.attention_s_per_pair[row] = one.attention_s_per_pair
            self.head_s[row] = one.head_s
            self.weights_s[row] = one.weights_s
            self.experts_s[row] = one.experts_s
            self.context_s_per_token[row] = one.context_s_per_token
            self.decode_attention_s_per_pair[row] = one.decode_attention_s_per_pair or one.attention_s_per_pair

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
