"""SIGTERM ends a demo at any moment, also in the middle of what a loop does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import pytest
import uvloop

from loadtest.demo.cli import Terminated, ended_by_sigterm


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def told_while_data_comes() -> None:
    """Waits for ever; SIGTERM comes while a transport hands its protocol some data."""

    class Protocol(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            signal.raise_signal(signal.SIGTERM)

    near, far = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(Protocol, sock=near)
    far.send(b"x")
    try:
        async with asyncio.timeout(20):
            await asyncio.Event().wait()
    finally:
        transport.close()
        far.close()


def test_it_is_not_taken_for_an_error_of_the_transport_it_comes_in() -> None:
    with pytest.raises(Terminated), ended_by_sigterm():
        uvloop.run(told_while_data_comes())


def test_it_ends_what_runs_without_a_loop_too() -> None:
    with pytest.raises(Terminated), ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)


def test_who_has_dealt_with_the_interrupt_is_terminated_all_the_same() -> None:
    with pytest.raises(Terminated), ended_by_sigterm(), contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_ctrl_c_stays_what_it_is() -> None:
    with pytest.raises(KeyboardInterrupt), ended_by_sigterm():
        signal.raise_signal(signal.SIGINT)
    with ended_by_sigterm():
        pass
