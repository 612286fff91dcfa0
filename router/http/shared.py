"""What all connections of one traffic port have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.http.contract import (
    Admit,
    Answer,
    Clock,
    Decider,
    Endpoint,
    Heard,
    Limits,
    PromptReader,
    Resumable,
    TimeOuts,
)
from router.http.messenger import Messenger
from router.http.pool import Pool
from router.stored_answers import StoredAnswers

if TYPE_CHECKING:
    from router.http.client import ClientConnection


@dataclass(slots=True)
class Counts:
    """What happened that no answer and no decider tells about."""

    internal_errors: int = 0  # decider, prompt reader or own answers raised
    reader_failures: int = 0  # somebody who reads along raised; the answer was relayed all the same
    repeats: int = 0  # a pooled connection was dead; the request went out again on a new one
    received: int = 0  # requests, each once, whatever became of it; those the router answers of itself are none
    rejected: dict[int, int] = field(default_factory=dict)  # refused before the decider saw them, by status
    left_early: int = 0  # their clients left before the decider saw them
    broken: int = 0  # the router failed at them before the decider saw them

    def internal_error(self) -> None:
        self.internal_errors += 1

    def reject(self, status: int) -> None:
        """One that was received is answered by the router, and the decider will not see it."""
        self.rejected[status] = self.rejected.get(status, 0) + 1

    def turn_away(self, status: int) -> None:
        """Receive a request and reject it at once."""
        self.received += 1
        self.reject(status)


@dataclass(slots=True)
class Shared:
    """Lent to every connection and exchange; owned by the traffic port."""

    loop: asyncio.AbstractEventLoop
    decider: Decider
    read_prompt: PromptReader
    answer: Answer
    clock: Clock
    pool: Pool
    limits: Limits
    times: TimeOuts
    heard: Heard | None = None
    endpoints: Callable[[], Sequence[Endpoint]] = tuple
    admin: Admit | None = None
    relay_unknown: bool = True
    stored: StoredAnswers = field(default_factory=StoredAnswers)
    admit: Admit | None = None
    drops: frozenset[bytes] = frozenset()
    via: bytes = b""
    resumable: Resumable | None = None
    counts: Counts = field(default_factory=Counts)
    spoke: set[int] = field(default_factory=set)  # rows of which bytes of answers came; whoever looks empties it
    clients: set[ClientConnection] = field(default_factory=set)
    per_client: dict[bytes, int] = field(default_factory=dict)  # open connections by address
    deserted: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last client leaves
    messenger: Messenger = field(init=False)

    def __post_init__(self) -> None:
        self.messenger = Messenger(self.loop, self.decider, self.clock, self.counts.internal_error)

    def join(self, client: ClientConnection) -> bool:
        """Count a connection that was made; False when its address has too many. Either way it `leave`s once."""
        self.clients.add(client)
        peer, limit = client.forwarded.peer, self.limits.max_connections_per_client
        self.per_client[peer] = count = self.per_client.get(peer, 0) + 1
        return not limit or count <= limit

    def leave(self, client: ClientConnection) -> None:
        self.clients.discard(client)
        peer = client.forwarded.peer
        self.per_client[peer] -= 1
        if not self.per_client[peer]:
            del self.per_client[peer]
        if not self.clients:
            self.deserted.set()
