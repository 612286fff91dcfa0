"""For tests: the real dispatcher behind a port, with limits, and what became of each request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from estimators.request import RequestFacts
from router.actions import Refuse
from router.admission import AdmissionConfig
from router.assemble import assemble
from router.config import PolicyConfig, RouterConfig
from router.decider import TimedDecider
from router.fleet import fleet_of_urls
from router.health import HealthConfig
from router.http.contract import TimeOuts
from router.http.head import RequestHead
from router.http.server import TrafficPort
from router.receipts import Receipt
from tests.router.http.stubs import here, until

MODEL = "m1"


class Books:
    """Replicas at `urls`, all up at 0.0. receipts : of what ended, in that order"""

    def __init__(
        self, urls: list[str], *, policy: str = "least_request", health: HealthConfig | None = None, **admission: object
    ) -> None:
        self.receipts: list[Receipt] = []
        config = RouterConfig(
            worker_urls=urls,
            policy=PolicyConfig(name=policy),
            admission=AdmissionConfig(**admission),  # type: ignore[arg-type]
            health=health or HealthConfig(),
        )
        core = assemble(config, fleet_of_urls(urls), on_receipt=self.receipts.append)
        self.dispatcher = core.dispatcher
        self.decider = TimedDecider(
            self.dispatcher, took=lambda s: None, answered=lambda *told: None, ranks=[None] * len(urls)
        )
        for row in range(len(urls)):
            self.dispatcher.replica_up(row, frozenset({MODEL}), 0.0)

    @property
    def queued(self) -> int:
        return sum(self.dispatcher.queued.values())

    @property
    def outcomes(self) -> dict[str, str | None]:
        """How each request ended, by its id."""
        return {receipt.request_id: receipt.outcome for receipt in self.receipts}

    def gone(self, port: TrafficPort, row: int = 0) -> None:
        """A replica is known to be gone."""
        self.dispatcher.replica_down(row)
        port.look()


def facts_of(head: RequestHead, body: bytes) -> RequestFacts | Refuse:
    """A prompt reader that looks at the id and at whether the body asks for a stream."""
    own = (head.get(b"x-request-id") or b"made").decode("latin-1")
    return RequestFacts(own, MODEL, prompt_tokens=100, streams=b'"stream":true' in body, path=head.path)


def a_post(name: str, *, stream: bool = False) -> bytes:
    body = b'{"model":"m1","stream":true}' if stream else b'{"model":"m1"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (name.encode(), len(body)) + body


@contextlib.asynccontextmanager
async def a_limited_port(books: Books, times: TimeOuts | None = None) -> AsyncIterator[TrafficPort]:
    """A started port. On leaving nothing may be held: no place, no exchange, no connection in use, nobody waiting."""
    port = TrafficPort(
        books.decider, read_prompt=facts_of, answer=here, clock=asyncio.get_running_loop().time, times=times
    )
    await port.start("127.0.0.1", 0)
    try:
        yield port
        await until(lambda: port.open_exchanges == port.pool.in_use == port.pool.connecting == 0)
        await until(lambda: books.dispatcher.in_flight == books.queued == 0)
    finally:
        await port.stop(grace_s=0.0)
    assert port.counts.internal_errors == 0
