"""Who may be sent on now, who waits, in which order, and who is told at once that it makes no sense to wait.

Model     a replica is full when as many requests are in flight there, or before their first token, as its limits say.
          Who finds every replica full that could take it waits in one `Backlog`, until a time-out or, where late
          answers are refused, until its deadline cannot be met any more. What is told to come back later is told when
          the work that waits now will have left, at the rate at which work has left so far
Valid     limits that keep engines busy: with one request before its first token a replica computes no prompt between
          two of them for as long as the news takes
Blind to  requests that do not generate, which pass; work of decodes: a request's work is its prefill
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import ceil, inf
from typing import Annotated, Literal

import msgspec

from estimators.request import RequestFacts
from router.backlog import Backlog, Ticket
from router.drain_rate import DrainRate

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
FieldName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=64)]

MOST_RETRY_AFTER_S = 600
MOST_PRIORITY = 100  # and -100: beyond, clients only try to outbid each other


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `admission`: how much each replica is given at a time, and who waits in the router meanwhile.

    Without a limit nothing is ever full and the engines queue by themselves, each in order of arrival.
    """

    max_in_flight: Count | None = None  # on each replica; as many as the engine runs at once (max_num_seqs) is no less
    max_prefills: Count | None = None  # on each, before the first token: 1 orders best, 2 hide a slow network
    max_queued: Count = 1000  # more are answered 429
    queue_timeout_s: Seconds = 30.0  # then 503; clients that gave up leave at once by themselves
    order: Literal["fcfs", "wspt"] = "fcfs"  # wspt: expected work counts too, as stretch says
    stretch: NotNegative = 20.0  # seconds of age one second of work weighs; larger: shorter first, longer wait longer
    priority_step_s: NotNegative = 10.0  # seconds of age one step of priority is worth
    share_by: Literal["tenant", "prefix"] = "tenant"  # who shares: names in a header, or equal first blocks of prompts
    tenant_header: FieldName | None = "x-tenant"  # null: a tenant is whose key it is, whatever clients say
    shares: dict[str, Positive] = {}  # weights of tenants; others have 1
    deadline_s: Seconds | None = None  # of the first token, of requests that name none
    late: Literal["best_effort", "refuse"] = "best_effort"  # refuse: 429 when no replica is expected to meet it

    @property
    def limits(self) -> bool:
        """Whether a replica can be full."""
        return self.max_in_flight is not None or self.max_prefills is not None

    @property
    def reads_estimates(self) -> bool:
        """Whether who is let in depends on how long anything takes."""
        return self.limits or self.late == "refuse"


class Admission:
    """Limits, the queue, and what it tells clients. Replicas are rows; in_flight, prefills : of a row, now."""

    def __init__(
        self, config: AdmissionConfig, rows: int, *, in_flight: Callable[[int], int], prefills: Callable[[int], int]
    ) -> None:
        self._config = config
        self._in_flight = in_flight
        self._prefills = prefills
        self._limits: list[float] = [config.max_in_flight or inf] * rows
        self._most_prefills = config.max_prefills or inf
        self._rate = DrainRate()
        self.backlog = Backlog(config.max_queued, config.shares)
        self.limited = config.limits
        self.refuses_late = config.late == "refuse"
        self.compares = config.reads_estimates

    # Limits

    def learned(self, row: int, max_running: int) -> None:
        """`row` said that it runs at most `max_running` (>= 1) requests at once: more would only queue there.

        A limit on requests in flight that is configured is lowered to it, never raised; without one nothing changes.
        """
        if self._config.max_in_flight is not None:
            self._limits[row] = min(self._config.max_in_flight, max_running)

    def forget(self, row: int) -> None:
        """`row` is another replica's, which has said nothing yet."""
        self._limits[row] = self._config.max_in_flight or inf

    def has_room(self, row: int) -> bool:
        """Whether one more request would be within the limits of `row`."""
        return not self.limited or (
            self._in_flight(row) < self._limits[row] and self._prefills(row) < self._most_prefills
        )

    def with_room(self, rows: Sequence[int]) -> list[int]:
        """Of `rows`, those that are not full."""
        return [row for row in rows if self.has_room(row)] if self.limited else list(rows)

    # The queue

    def ticket(
        self,
        request: RequestFacts,
        where: Hashable,
        what: object,
        *,
        work_s: float,
        arrived_at_s: float,
        now_s: float,
    ) -> Ticket:
        """A place for `request`, by the configured order. work_s : its expected prefill, >= 0

        The rest of a stream keeps the place of its arrival, and has from now on as long as others from theirs.
        """
        config = self._config
        priority = max(-MOST_PRIORITY, min(MOST_PRIORITY, request.priority))
        stretch = config.stretch if config.order == "wspt" else 0.0
        expires_at_s = (arrived_at_s if request.sent_tokens is None else now_s) + config.queue_timeout_s
        deadline_s = self.deadline_s(request)
        if deadline_s is not None:
            expires_at_s = min(expires_at_s, arrived_at_s + max(0.0, deadline_s - work_s))
        return Ticket(
            key_s=arrived_at_s + stretch * work_s - config.priority_step_s * priority,
            group=self.group_of(request),
            where=where,
            work_s=work_s,
            expires_at_s=expires_at_s,
            what=what,
        )

    def group_of(self, request: RequestFacts) -> str:
        """Whom `request` shares its turns with."""
        if self._config.share_by == "tenant":
            return request.tenant
        return str(request.chain[min(1, len(request.chain) - 1)]) if request.chain else ""

    def take(
        self, can_go: Callable[[Hashable], bool], wants: Callable[[Ticket], bool], now_s: float, *, looks: int
    ) -> Ticket | None:
        """Who goes next, out of the queue; see `Backlog.take`."""
        ticket = self.backlog.take(can_go, wants, looks=looks)
        if ticket is not None:
            self._rate.departed(ticket.work_s, now_s)
        if not len(self.backlog):
            self._rate.emptied()
        return ticket

    # What clients are told

    def deadline_s(self, request: RequestFacts) -> float | None:
        """Until when, from arrival, its first token has to come if it is to be served at all; None: whenever."""
        if not self.refuses_late or request.sent_tokens is not None:  # the client of a rest has had its first token
            return None
        return self._config.deadline_s if request.deadline_s is None else request.deadline_s

    def wait_s(self, ticket: Ticket, replicas: int, now_s: float) -> float:
        """How long a `ticket` that waits is expected to wait from now on. replicas : that can take it, >= 1"""
        return self.backlog.ahead_s(ticket) / self._rate.rate(now_s, supposed=float(replicas))

    def retry_after_s(self, replicas: int, now_s: float) -> int:
        """When what waits now will have left, in whole seconds, 1 .. MOST_RETRY_AFTER_S."""
        drained_s = self.backlog.work_s / self._rate.rate(now_s, supposed=float(max(1, replicas)))
        return whole_seconds(drained_s)


def whole_seconds(wait_s: float) -> int:
    """`wait_s` as Retry-After has it: rounded up, within 1 .. MOST_RETRY_AFTER_S; unknown is 1."""
    return ceil(min(max(wait_s, 1.0), MOST_RETRY_AFTER_S)) if wait_s == wait_s else 1
