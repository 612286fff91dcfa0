from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from router.signals.fetch import Answer, Fetcher

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n"
LENGTHLESS = b"HTTP/1.1 200 OK\r\n\r\nhi"


class Server:
    """Answers each request of each connection with what `script` says for it; None closes instead."""

    def __init__(self, script: Callable[[int, bytes], bytes | None], *, closes: bool = False) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._script = script
        self._closes = closes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head)
                answer = self._script(len(self.requests), head.split()[1])
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if self._closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def a_fetcher(server: Server, *, max_body_bytes: int = 1000) -> AsyncIterator[Fetcher]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    fetcher = Fetcher(f"http://127.0.0.1:{port}", {"authorization": "Bearer k"}, max_body_bytes=max_body_bytes)
    try:
        yield fetcher
    finally:
        fetcher.close()
        listener.close()
        await listener.wait_closed()


def get(fetcher: Fetcher, path: str = "/x", timeout_s: float = 5.0) -> Awaitable[Answer]:
    return fetcher.get(path, timeout_s=timeout_s)


async def test_requests_share_one_connection_and_carry_host_and_headers() -> None:
    server = Server(lambda turn, path: CHUNKED if turn == 2 else OK)
    async with a_fetcher(server) as fetcher:
        assert [await get(fetcher) for _ in range(3)] == [Answer(200, b"hi")] * 3
    assert server.connections == 1
    assert b"authorization: Bearer k\r\n" in server.requests[0]
    assert b"host: 127.0.0.1:" in server.requests[0]
    assert b"accept-encoding" not in server.requests[0].lower()


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    server = Server(lambda turn, path: LENGTHLESS, closes=True)
    async with a_fetcher(server) as fetcher:
        assert [await get(fetcher) for _ in range(2)] == [Answer(200, b"hi")] * 2
    assert server.connections == 2


async def test_a_connection_closed_meanwhile_is_replaced_without_anybody_noticing() -> None:
    server = Server(lambda turn, path: None if turn == 2 else OK)
    async with a_fetcher(server) as fetcher:
        assert [await get(fetcher) for _ in range(2)] == [Answer(200, b"hi")] * 2
    assert (len(server.requests), server.connections) == (3, 2)


async def test_a_new_connection_that_is_closed_is_not_tried_again() -> None:
    server = Server(lambda turn, path: None)
    async with a_fetcher(server) as fetcher:
        answer = await get(fetcher)
    assert (answer.status, len(server.requests)) == (0, 1)
    assert b"closed" in answer.body


@pytest.mark.parametrize(
    "broken",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-x\r\n",
        b"",
    ],
)
async def test_an_answer_that_breaks_off_or_is_no_http_is_no_answer(broken: bytes) -> None:
    server = Server(lambda turn, path: broken, closes=True)
    async with a_fetcher(server) as fetcher:
        answer = await get(fetcher)
    assert answer.status == 0
    assert answer.body


async def test_a_silent_server_is_given_up_and_its_late_answer_is_not_taken_for_the_next() -> None:
    held = asyncio.Event()

    class Slow(Server):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not self.connections:
                self.connections += 1
                await reader.readuntil(b"\r\n\r\n")
                await held.wait()
                writer.close()
                return
            await super().serve(reader, writer)

    server = Slow(lambda turn, path: OK)
    async with a_fetcher(server) as fetcher:
        assert await get(fetcher, timeout_s=0.05) == Answer(0, b"no answer within the time limit")
        held.set()
        assert await get(fetcher) == Answer(200, b"hi")


async def test_other_statuses_are_told_without_their_body_and_keep_the_connection() -> None:
    server = Server(lambda turn, path: b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull" if turn == 1 else OK)
    async with a_fetcher(server) as fetcher:
        assert [await get(fetcher), await get(fetcher)] == [Answer(503, b""), Answer(200, b"hi")]
    assert server.connections == 1


async def test_a_body_beyond_the_limit_is_cut_and_the_connection_not_used_again() -> None:
    large = b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000
    server = Server(lambda turn, path: large if turn == 1 else OK)
    async with a_fetcher(server, max_body_bytes=100) as fetcher:
        assert await get(fetcher) == Answer(200, b"x" * 100, cut=True)
        assert await get(fetcher) == Answer(200, b"hi")
    assert server.connections == 2


@pytest.mark.parametrize(("location", "status"), [("/x/", 200), ("/loop", 307), ("http://other.example/x", 307)])
async def test_a_redirect_is_followed_on_the_same_server_only_and_not_for_ever(location: str, status: int) -> None:
    def script(turn: int, path: bytes) -> bytes:
        if path == b"/x/":
            return OK
        return f"HTTP/1.1 307 Moved\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()

    server = Server(script)
    async with a_fetcher(server) as fetcher:
        assert (await get(fetcher)).status == status
        asked = len(server.requests)
        assert (await get(fetcher)).status == status
    assert len(server.requests) <= asked + 3
    if status == 200:
        assert len(server.requests) == asked + 1, "where it moved to is remembered"


async def asked(fetcher: Fetcher, path: str = "/x") -> Answer | Exception:
    outcome: asyncio.Future[Answer | Exception] = asyncio.get_running_loop().create_future()
    fetcher.ask(path, outcome.set_result)
    assert not fetcher.ready, "one request at a time"
    return await asyncio.wait_for(outcome, 5)


async def test_an_open_connection_can_be_asked_without_a_task() -> None:
    server = Server(lambda turn, path: OK)
    async with a_fetcher(server) as fetcher:
        assert not fetcher.ready
        await get(fetcher)
        assert [await asked(fetcher) for _ in range(3)] == [Answer(200, b"hi")] * 3
        assert await get(fetcher) == Answer(200, b"hi")
    assert server.connections == 1


async def test_who_asked_hears_why_no_answer_comes() -> None:
    server = Server(lambda turn, path: None if turn == 2 else OK)
    async with a_fetcher(server) as fetcher:
        await get(fetcher)
        assert isinstance(await asked(fetcher), ConnectionError)
        assert not fetcher.ready
        assert await get(fetcher) == Answer(200, b"hi")


async def test_closing_ends_what_was_asked_and_a_get_does_not_wait_for_it() -> None:
    server = Server(lambda turn, path: b"" if turn in (2, 4) else OK)
    async with a_fetcher(server) as fetcher:
        await get(fetcher)
        outcome: asyncio.Future[Answer | Exception] = asyncio.get_running_loop().create_future()
        fetcher.ask("/x", outcome.set_result)
        fetcher.close()
        assert isinstance(await asyncio.wait_for(outcome, 5), ConnectionError)
        await get(fetcher)
        heard: list[Answer | Exception] = []
        fetcher.ask("/x", heard.append)
        assert await get(fetcher) == Answer(200, b"hi")
        assert isinstance(heard[0], ConnectionError)


async def test_an_address_nobody_listens_on_is_told() -> None:
    fetcher = Fetcher("http://127.0.0.1:1", {}, max_body_bytes=10)
    answer = await get(fetcher)
    assert answer.status == 0
    assert b"onnect" in answer.body


async def test_an_address_that_is_not_allowed_is_sent_nothing() -> None:
    server = Server(lambda turn, path: OK)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    fetcher = Fetcher(
        f"http://localhost:{port}",
        {},
        max_body_bytes=10,
        refused=lambda address, at: f"{address}:{at} is forbidden" if at == port else None,
    )
    answer = await get(fetcher)
    fetcher.close()
    listener.close()
    await listener.wait_closed()
    assert (answer.status, server.requests) == (0, [])
    assert answer.body.endswith(b":%d is forbidden" % port)
