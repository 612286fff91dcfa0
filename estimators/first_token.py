"""When the first token comes back, by what the engine does about a fetch.

Model     Q  moment the GPU can start the request      R  moment its KV state is ready
          C  work left once both are there             F(t)  duration of the fetch if it starts at t
          C' what the fetched tokens would cost to compute      C(x)  work left when the share x of them came
          overlapped         max(Q, R) + C                       R = F(0): the fetch runs while the request queues
          serial             Q + F(Q) + C                        the fetch starts at the turn, others run meanwhile
          blocking           Q + F(Q) + C                        the same, and the fetch holds the GPU
          layerwise          max(Q + C, R1 + C, R + C / L)       R1 first layer there, R last, L layers of equal work
          layerwise_in_turn  the same with Q added to R1 and R
          best_effort        Q + C(x(Q))                         the fetch ends at the turn
          time_limited       t + C(x(t)), t = min(max(Q, R), Q + limit)
          two_ends           Q + d + C                           from Q the head is computed until it meets the tail
                             that is fetched; d = C' F / (C' + F) for a fetch that starts at Q, less if it began before
          x(t) is zero until the first byte and then grows evenly to 1 at R
Valid     all times >= 0, in seconds from the request's arrival
Blind to  the pieces in which state comes (half a piece late or early); a GPU slowed by the copies; others that take
          the GPU while a serial fetch or the patience of a time-limited one goes on
Source    AI Infra textbook, section 9.5.4; CachedAttention (USENIX ATC 2024) for the layer-wise form and its preload
          buffer, SGLang HiCache's prefetch policies (best_effort, timeout), Cake (Jin et al. 2024) for the two ends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Times = npt.NDArray[np.float64]  # a scalar in gives a 0-d array out
Seconds = float | Times


class Discipline(Enum):
    """What a replica does between a request's arrival and its turn. Configured, or learned: `discipline.py`."""

    OVERLAPPED = "overlapped"
    SERIAL = "serial"
    BLOCKING = "blocking"
    LAYERWISE = "layerwise"
    LAYERWISE_IN_TURN = "layerwise_in_turn"
    BEST_EFFORT = "best_effort"
    TIME_LIMITED = "time_limited"
    TWO_ENDS = "two_ends"

    @property
    def in_turn(self) -> bool:
        """Whether the fetch starts at the request's turn, so that F is F(Q), else on arrival."""
        return self in _IN_TURN

    @property
    def takes_parts(self) -> bool:
        """Whether a part of the fetch is of use, so that C of a part must be known."""
        return self in _TAKE_PARTS


_IN_TURN = frozenset({Discipline.SERIAL, Discipline.BLOCKING, Discipline.LAYERWISE_IN_TURN})
_TAKE_PARTS = frozenset({Discipline.BEST_EFFORT, Discipline.TIME_LIMITED, Discipline.TWO_ENDS})


def in_turn_mask(disciplines: Sequence[Discipline]) -> npt.NDArray[np.bool_]:
    """Whether each replica's fetches start at the turn, shape (rows,)."""
    return np.array([discipline.in_turn for discipline in disciplines], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Rest:
    """C(x), the prefill left when the share x (0..1) of the fetched tokens has come, counted from their start.

        C(x) = none + (all - none) x + bend x (1 - x)

    Exact for work in tokens and in query-key pairs, a seconds each: h fetched tokens over themselves make h^2 / 2
    pairs, and bend = a h^2 / 2. The step count's stairs are not in it.

    all_reused_s : C when all came, >= 0
    none_reused_s : C when none came, >= all_reused_s; what is in HBM is reused in both. None: a part is never used
    bend_s : see above, 0..none - all; 0 is the straight line
    step_share : what one step computes, as a share of the fetched tokens, >= 0: two ends cannot meet within a step.
        0: as little as they like
    """

    all_reused_s: Seconds
    none_reused_s: Seconds | None = None
    bend_s: Seconds = 0.0
    step_share: Seconds = 0.0

    def at(self, share: npt.ArrayLike) -> Times:
        """C(share). Raises `ValueError` when `none_reused_s` is not known."""
        x = np.asarray(share)
        return np.asarray(self.all_reused_s + (1.0 - x) * (self.spared_s + self.bend_s * x))

    def head_s(self, share: npt.ArrayLike) -> Times:
        """Computing the first `share` of the fetched tokens: C'(share), which is C' for all of them."""
        x = np.asarray(share)
        return np.asarray(x * (self.spared_s - self.bend_s * (1.0 - x)))

    @property
    def spared_s(self) -> Times:
        """C': what reusing all of the fetched tokens spares."""
        if self.none_reused_s is None:
            raise ValueError("none_reused_s is not given, and this discipline uses parts of a fetch")
        return np.asarray(self.none_reused_s - self.all_reused_s)


@dataclass(frozen=True, slots=True)
class Service:
    """How one request is served; arrays of one shape, seconds from its arrival.

    first_token_s : T_first
    ready_s, work_s : T_first = max(Q, ready) + work. Earliest start the fetch allows, zero if it allows any, and the
        length of the service from then: what is booked
    held_from_s : the GPU is this request's from here to its first token; earlier than its start only layer by layer,
        where the prefill waits for layers
    fetched_share : of the fetched tokens, used; 0..1
    """

    first_token_s: Times
    ready_s: Times
    work_s: Times
    held_from_s: Times
    fetched_share: Times


@dataclass(frozen=True, slots=True)
class _Case:
    """Arguments of `service`. queue_s, fetch_s: one shape; the others broadcast to it."""

    queue_s: Times
    fetch_s: Times
    first_byte_s: Times
    rest: Rest
    layers: int
    limit_s: Times
    preload_layers: int

    def came(self, at_s: Times) -> Times:
        """Share of the fetch that has come by `at_s`, of one that started on arrival. All, where nothing is fetched."""
        moving_s = self.fetch_s - self.first_byte_s
        came_s = np.maximum(np.minimum(at_s, self.fetch_s) - self.first_byte_s, 0.0)
        return np.where(at_s >= self.fetch_s, 1.0, came_s / np.where(moving_s > 0, moving_s, 1.0))

    def served(self, ready_s: Times, work_s: Seconds, share: Times | None = None) -> Service:
        starts_s = np.maximum(self.queue_s, ready_s)
        first_s = np.asarray(starts_s + work_s)
        work = np.asarray(work_s)
        return Service(
            first_token_s=first_s,
            ready_s=ready_s,
            work_s=work if work.shape == first_s.shape else np.broadcast_to(work, first_s.shape),
            held_from_s=starts_s,
            fetched_share=np.ones_like(first_s) if share is None else share,
        )


def service(
    discipline: Discipline,
    *,
    queue_s: npt.ArrayLike,
    fetch_s: npt.ArrayLike,
    first_byte_s: npt.ArrayLike,
    rest: Rest,
    layers: int,
    limit_s: npt.ArrayLike = 0.0,
    preload_layers: int | None = None,
) -> Service:
    """How requests are served under `discipline`. Scalars or arrays that broadcast; where F is zero it is Q + C.

    Parameters
    ----------
    queue_s : Q, >= 0
    fetch_s : F from the fetch's start, which is Q if `discipline.in_turn`, else the arrival; zero: nothing is fetched
    first_byte_s : its part before anything usable comes, 0..fetch_s, see `links.Fetch`
    rest : C, and for the disciplines that take parts C(x)
    layers : of the model, >= 1
    limit_s : patience of the time-limited at the turn, >= 0
    preload_layers : layer by layer from arrival, how many may be read before the turn, 0..layers; None: all

    Raises
    ------
    ValueError : layers or preload_layers out of range, or `rest` does not say what a part is worth.
    """
    require(layers >= 1, "layers", layers)
    preload = layers if preload_layers is None else preload_layers
    require(0 <= preload <= layers, "preload_layers", preload_layers)
    queue, fetch = np.asarray(queue_s, dtype=np.float64), np.asarray(fetch_s, dtype=np.float64)
    if queue.shape != fetch.shape:
        queue, fetch = np.broadcast_arrays(queue, fetch)
    case = _Case(queue, fetch, np.asarray(first_byte_s, dtype=np.float64), rest, layers, np.asarray(limit_s), preload)
    return _FORMS[discipline](case)


def service_by_row(
    disciplines: Sequence[Discipline],
    *,
    queue_s: npt.ArrayLike,
    fetch_s: npt.ArrayLike,
    first_byte_s: npt.ArrayLike,
    rest: Rest,
    layers: int,
    limit_s: npt.ArrayLike = 0.0,
    preload_layers: int | None = None,
) -> Service:
    """`service` with one discipline for each replica, the last axis of the arrays."""
    distinct = set(disciplines)
    if len(distinct) == 1:
        (discipline,) = distinct
        return service(
            discipline,
            queue_s=queue_s,
            fetch_s=fetch_s,
            first_byte_s=first_byte_s,
            rest=rest,
            layers=layers,
            limit_s=limit_s,
            preload_layers=preload_layers,
        )
    none_s = rest.all_reused_s if rest.none_reused_s is None else rest.none_reused_s
    columns = np.broadcast_arrays(
        queue_s, fetch_s, first_byte_s, limit_s, rest.all_reused_s, none_s, rest.bend_s, rest.step_share
    )
    require(columns[0].shape[-1:] == (len(disciplines),), "disciplines", len(disciplines), "not one for each row")
    whole = Service(*(np.empty(columns[0].shape) for _ in fields(Service)))
    for discipline in distinct:
        rows = np.flatnonzero([other is discipline for other in disciplines])
        queue, fetch, first_byte, limit, all_s, no_s, bend, step = (column[..., rows] for column in columns)
        part = service(
            discipline,
            queue_s=queue,
            fetch_s=fetch,
            first_byte_s=first_byte,
            rest=Rest(all_s, None if rest.none_reused_s is None else no_s, bend, step),
            layers=layers,
            limit_s=limit,
            preload_layers=preload_layers,
        )
        for name in _PARTS:
            getattr(whole, name)[..., rows] = getattr(part, name)
    return whole


_PARTS = tuple(field.name for field in fields(Service))


def _overlapped(case: _Case) -> Service:
    return case.served(case.fetch_s, case.rest.all_reused_s)


def _serial(case: _Case) -> Service:
    return case.served((case.queue_s + case.fetch_s) * (case.fetch_s > 0), case.rest.all_reused_s)


def _blocking(case: _Case) -> Service:
    return case.served(np.zeros_like(case.fetch_s), case.fetch_s + case.rest.all_reused_s)


def _layerwise(case: _Case) -> Service:
    some = case.fetch_s > 0
    layer_s = (case.fetch_s - case.first_byte_s) / case.layers
    first_s = case.first_byte_s + layer_s
    last_s = case.fetch_s
    if case.preload_layers < case.layers:
        last_s = np.maximum(last_s, case.queue_s + (case.layers - case.preload_layers) * layer_s)
    if case.preload_layers == 0:
        first_s = np.maximum(first_s, case.queue_s + layer_s)
    return _by_layer(case, first_s * some, last_s * some)


def _layerwise_in_turn(case: _Case) -> Service:
    some = case.fetch_s > 0
    first_s = first_layer_s(case.fetch_s, case.first_byte_s, case.layers)
    return _by_layer(case, (case.queue_s + first_s) * some, (case.queue_s + case.fetch_s) * some)


def _by_layer(case: _Case, first_layer_here_s: Times, last_layer_here_s: Times) -> Service:
    """The prefill starts with the first layer; it ends one layer's work after the last at the earliest."""
    work_s = case.rest.all_reused_s
    late_s = last_layer_here_s - work_s * (1.0 - 1.0 / case.layers)
    served = case.served(np.maximum(first_layer_here_s, late_s), work_s)
    return Service(
        first_token_s=served.first_token_s,
        ready_s=served.ready_s,
        work_s=served.work_s,
        held_from_s=np.maximum(case.queue_s, first_layer_here_s),
        fetched_share=served.fetched_share,
    )


def _best_effort(case: _Case) -> Service:
    share = case.came(case.queue_s)
    return case.served(np.zeros_like(case.fetch_s), case.rest.at(share), share)


def _time_limited(case: _Case) -> Service:
    ready_s = np.minimum(case.fetch_s, case.queue_s + case.limit_s)
    share = case.came(np.maximum(case.queue_s, ready_s))
    return case.served(ready_s, case.rest.at(share), share)


def _two_ends(case: _Case) -> Service:
    """The head's share h is computed from Q while the tail comes: cost(h) = C' h - bend h (1 - h), met when
    Q + cost(h) = first byte + (1 - h) x moving time. A square equation in h."""
    bend_s, whole_s = case.rest.bend_s, case.rest.spared_s
    left_s = np.maximum(case.fetch_s - case.queue_s, 0.0)
    slope_s = whole_s - bend_s + case.fetch_s - case.first_byte_s
    below = slope_s + np.sqrt(slope_s * slope_s + 4.0 * bend_s * left_s)
    head = np.where(left_s > 0, np.minimum(1.0, 2.0 * left_s / np.where(below > 0, below, 1.0)), 0.0)
    if np.any(np.asarray(case.rest.step_share) > 0):
        head = _to_the_end_of_a_step(case, head)
    work_s = case.rest.head_s(head) + case.rest.all_reused_s
    return case.served(np.zeros_like(case.fetch_s), work_s, 1.0 - head)


def _to_the_end_of_a_step(case: _Case, head: Times) -> Times:
    """A step takes what is missing when it starts, a full one at most, and ends although more has come meanwhile."""
    step = np.asarray(case.rest.step_share)
    done = np.floor(head / np.where(step > 0, step, 1.0)) * step
    missing = 1.0 - case.came(case.queue_s + case.rest.head_s(done))
    last = np.minimum(np.minimum(done + step, 1.0), np.maximum(missing, done))
    return np.where((step > 0) & (head > 0), np.maximum(last, done), head)


_FORMS: dict[Discipline, Callable[[_Case], Service]] = {
    Discipline.OVERLAPPED: _overlapped,
    Discipline.SERIAL: _serial,
    Discipline.BLOCKING: _blocking,
    Discipline.LAYERWISE: _layerwise,
    Discipline.LAYERWISE_IN_TURN: _layerwise_in_turn,
    Discipline.BEST_EFFORT: _best_effort,
    Discipline.TIME_LIMITED: _time_limited,
    Discipline.TWO_ENDS: _two_ends,
}


def first_layer_s(fetch_s: Times, fetch_start_s: Seconds, layers: int) -> Times:
    """R1: when the first of `layers` (>= 1) layers is there, of a fetch that moves its bytes evenly after its start."""
    return np.asarray(np.minimum(fetch_s, fetch_start_s + (fetch_s - fetch_start_s) / layers))
