"""What goes wrong at one replica on purpose: which faults there are, and when they strike.

Model     each request, and each batch of events, draws on its own whether a fault with a share strikes; the next n
          requests of a fault with a count go first. Chance comes from one stream for each replica and purpose, so
          the same faults, seed and order of requests strike the same requests
Valid     shares 0..1, those of requests together at most 1; times in seconds of the wall clock
Blind to  the network between replica and router: everything is done by the replica's own sockets

Decides, and touches no socket, clock or loop; the faces and the event stream act. A replica without faults pays
one look at a flag for each request and for each batch.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from math import inf
from typing import Annotated, Any, Literal

import msgspec

from sim_backends.links import FairLink

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class BadFault(ValueError):
    """A fault that does not exist or cannot have this value, in one sentence."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All faults of one replica. The defaults are none.

    event_delay_s : every batch goes out so much later, in order
    event_loss_share : batches that take their sequence number and are never sent live
    event_loss_for_good : lost batches are missing from replays too
    event_reorder_share, event_reorder_s : batches held back so long while later ones overtake them
    metrics_factor : load figures are told so many times too high; shares may pass 1
    metrics_frozen : the page stays as it was at the first scrape with this on
    metrics_missing : `load` leaves the load figures out, `page` answers 404
    metrics_delay_s : the page comes so much later
    hang_*, cut_*, reset_* : a request gets no more bytes, a FIN without the end of its answer, or an RST
    *_share, *_next : that share of requests; the next so many requests
    *_after_tokens : how many tokens of a stream come first (its last token never does, and a shorter stream is
        spared; an answer that is not streamed breaks off in the middle of its body); null before the response head
    error_status, retry_after_s : what a failing request is told; null is no Retry-After
    clock_skew_s : added to the times in events and to `created`
    usage_details : false leaves `prompt_tokens_details` out of usage
    store_link_factor, host_link_factor : rates of the links to the store and into this replica, times this. The
        link to the store is shared: of what all replicas say the slowest holds
    step_factor : every step of the engine that begins from now on takes so many times longer
    restart_after_s : once, so long after this is set, the replica becomes a new process with empty caches; null never
    restart_down_s : how long it is away then
    """

    event_delay_s: NotNegative = 0.0
    event_loss_share: Share = 0.0
    event_loss_for_good: bool = False
    event_reorder_share: Share = 0.0
    event_reorder_s: NotNegative = 0.05
    metrics_factor: NotNegative = 1.0
    metrics_frozen: bool = False
    metrics_missing: Literal["no", "load", "page"] = "no"
    metrics_delay_s: NotNegative = 0.0
    hang_share: Share = 0.0
    hang_next: Count = 0
    hang_after_tokens: Count | None = None
    cut_share: Share = 0.0
    cut_next: Count = 0
    cut_after_tokens: Count | None = None
    reset_share: Share = 0.0
    reset_next: Count = 0
    reset_after_tokens: Count | None = None
    error_share: Share = 0.0
    error_next: Count = 0
    error_status: Literal[429, 500, 503] = 503
    retry_after_s: Count | None = None
    clock_skew_s: float = 0.0
    usage_details: bool = True
    store_link_factor: Positive = 1.0
    host_link_factor: Positive = 1.0
    step_factor: Positive = 1.0
    restart_after_s: NotNegative | None = None
    restart_down_s: NotNegative = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not -inf < value < inf:
                raise ValueError(f"{name} must be a finite number")
        total = self.error_share + self.reset_share + self.cut_share + self.hang_share
        if total > 1.0:
            raise ValueError(f"the shares of requests that error, reset, cut and hang add up to {total:g}, above 1")


NONE = Faults()


def faults_of(values: Mapping[str, Any], *, base: Faults = NONE, strict: bool = True) -> Faults:
    """`base` with these values by name. `strict` False takes numbers and words from text. Raises BadFault."""
    known = Faults.__struct_fields__
    for name in values:
        if name not in known:
            raise BadFault(f"there is no fault {name!r}; there are {', '.join(known)}")
    try:
        return msgspec.convert({**msgspec.structs.asdict(base), **values}, Faults, strict=strict)
    except msgspec.ValidationError as exc:
        problem, _, path = str(exc).partition(" - at `$.")
        name = path.rstrip("`")
        raise BadFault(f"fault {name} is {values[name]!r}: {problem}" if name in values else problem) from exc


def faults_of_options(options: Iterable[str], replicas: Sequence[str]) -> dict[str, Faults]:
    """Faults by replica from texts `NAME=VALUE` (all replicas) and `REPLICA:NAME=VALUE`, later ones winning.

    Raises BadFault.
    """
    chosen: dict[str, dict[str, str]] = {name: {} for name in replicas}
    for option in options:
        where, assignment = "", option
        if ":" in option.partition("=")[0]:
            where, _, assignment = option.partition(":")
            if where not in chosen:
                raise BadFault(f"fault {option!r} names no replica; there are {', '.join(replicas)}")
        name, equals, value = assignment.partition("=")
        if not equals:
            raise BadFault(f"fault {option!r} is not NAME=VALUE or REPLICA:NAME=VALUE")
        for row in [where] if where else replicas:
            chosen[row][name] = value
    return {name: faults_of(values, strict=False) for name, values in chosen.items()}


class Kind(Enum):
    ERROR = "error"
    RESET = "reset"
    CUT = "cut"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Break:
    """How one request fails. after_tokens : None before the head of the answer."""

    kind: Kind
    after_tokens: int | None = None


class FaultPlan:
    """The faults of one replica and what they have done so far. Change them with `set`."""

    def __init__(self, faults: Faults, *, seed: int, replica: str) -> None:
        self._requests = random.Random(f"{seed}/{replica}/faults/requests")
        self._events = random.Random(f"{seed}/{replica}/faults/events")
        self.struck: Counter[str] = Counter()  # how often, by kind
        self.frozen_pages: dict[str, bytes] = {}  # by path, while metrics_frozen
        self.set(faults)

    def set(self, faults: Faults) -> None:
        """Have these and no other faults from now on. Requests and events already struck stay so."""
        self.faults = faults
        self._left = {kind: getattr(faults, f"{kind.value}_next") for kind in Kind}
        self.breaks_requests = any(
            getattr(faults, f"{kind.value}_share") > 0 or getattr(faults, f"{kind.value}_next") > 0 for kind in Kind
        )
        self.disturbs_events = faults.event_delay_s > 0 or faults.event_loss_share > 0 or faults.event_reorder_share > 0
        if not faults.metrics_frozen:
            self.frozen_pages.clear()

    def now(self) -> Faults:
        """The faults, with `*_next` as many as are still to come."""
        left = {f"{kind.value}_next": number for kind, number in self._left.items()}
        return msgspec.structs.replace(self.faults, **left)

    def restarted(self) -> None:
        """The restart that was asked for has come: it is not asked for any more."""
        self.struck["restart"] += 1
        self.faults = msgspec.structs.replace(self.faults, restart_after_s=None)

    def strike_request(self) -> Break | None:
        """What happens to the request that has just come; None for nothing. Draws once."""
        kind = self._kind_of_next(self._requests.random())
        if kind is None:
            return None
        self.struck[kind.value] += 1
        return Break(kind, None if kind is Kind.ERROR else getattr(self.faults, f"{kind.value}_after_tokens"))

    def _kind_of_next(self, drawn: float) -> Kind | None:
        for kind in Kind:
            if self._left[kind] > 0:
                self._left[kind] -= 1
                return kind
        for kind in Kind:
            drawn -= getattr(self.faults, f"{kind.value}_share")
            if drawn < 0:
                return kind
        return None

    def loses_batch(self) -> bool:
        """Whether the batch that is ready now is lost. Draws only if some are."""
        lost = self.faults.event_loss_share > 0 and self._events.random() < self.faults.event_loss_share
        self.struck["event_loss"] += lost
        return lost

    def holds_batch(self) -> bool:
        """Whether the batch that is ready now is overtaken by later ones."""
        held = self.faults.event_reorder_share > 0 and self._events.random() < self.faults.event_reorder_share
        self.struck["event_reorder"] += held
        return held


def re_rate(link: FairLink, rate_bytes_per_s: float, now_s: float) -> None:
    """Change a link's rate > 0 from `now_s` on. What transfers have had by then, they have had at the old rate."""
    mark = link.start(1.0, now_s, lambda _at_s: None, look_up=False)  # brings the link's own accounts to now
    link.rate_bytes_per_s = rate_bytes_per_s
    link.cancel(mark, now_s)  # plans the next end anew


class Detour:
    """Numbered batches on their way out later than they were made. In order, but for those held back."""

    def __init__(self) -> None:
        self._held: list[tuple[float, int, int, bytes]] = []  # due, order, sequence number, payload
        self._order = count()
        self._last_due_s = -inf

    @property
    def due_s(self) -> float:
        """When `take_due` has something next; inf when nothing is held."""
        return self._held[0][0] if self._held else inf

    def put(self, seq: int, payload: bytes, *, now_s: float, delay_s: float, held_s: float = 0.0) -> None:
        """Send at `now_s + delay_s`, no earlier than those put before; `held_s` > 0 lets later ones overtake."""
        due_s = max(self._last_due_s, now_s + delay_s)
        self._last_due_s = due_s
        heapq.heappush(self._held, (due_s + held_s, next(self._order), seq, payload))

    def take_due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Sequence numbers and payloads to be sent by `now_s`, in the order to send them."""
        due: list[tuple[int, bytes]] = []
        while self._held and self._held[0][0] <= now_s:
            due.append(heapq.heappop(self._held)[2:])
        return due

    def drop(self) -> None:
        """Forget what is held."""
        self._held.clear()
        self._last_due_s = -inf
