"""Engines with canned answers, cheap enough that the proxy in front of them is what is measured.

Model     httptools under uvloop; every answer but a stream is written at once. A stream gets as many pieces as its
          message asks for, one each `every_ms`, staggered over the streams, each in a segment of its own. Every 20 ms,
          as after a step, an engine publishes two new blocks of 16 tokens for each prompt since, as vLLM does
Valid     requests that are whole and well-formed; model "m"
Blind to  the prompt: what is asked is told from the first 2,000 bytes of a body, which some proxies write anew
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import httptools
import msgspec
import uvloop
import zmq

HEAD_BYTES = 2000
BLOCK, STEP_S = 16, 0.020
STREAM_MARK, STREAM_OPEN = b'"stream":true', b"pieces="
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """`data` in chunk framing."""
    return b"%x\r\n%b\r\n" % (len(data), data)


PIECE, LAST = chunk(EVENT), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


COMPLETION = answer(
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"Well answered."},"finish_reason":"stop"}],"usage":{"prompt_tokens":20,"completion_tokens":4,'
    b'"total_tokens":24}}'
)
LOAD = answer(
    b'vllm:num_requests_running{model_name="m"} 0.0\nvllm:num_requests_waiting{model_name="m"} 0.0\n', b"text/plain"
)
OWN = {
    b"/health": answer(b"", b"text/plain"),
    b"/v1/models": answer(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"stub"}]}'),
    b"/metrics": LOAD,
    b"/get_model_info": answer(b'{"model_path":"m"}'),
    b"/get_server_info": answer(b'{"model_path":"m","served_model_name":"m"}'),
    b"/server_info": answer(b'{"model_path":"m","served_model_name":"m"}'),
}
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def two_blocks(draw: Callable[[int], int]) -> list[object]:
    """The event of two new blocks of tokens nobody asks for. draw : a number of so many bits"""
    tokens = [draw(17) for _ in range(2 * BLOCK)]
    return ["BlockStored", [draw(63), draw(63)], None, tokens, BLOCK, None, "GPU"]


class Publisher:
    """The cache events of one engine, in the form of vLLM 0.11: topic, number, [time, [event ...]]."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]], seed: int) -> None:
        self._loop, self._chance = loop, random.Random(seed)
        self._socket = context.socket(zmq.PUB)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._events: list[list[object]] = []
        self._number = 0
        self._publish()

    def prompt(self) -> None:
        """One more prompt was computed."""
        self._events.append(two_blocks(self._chance.getrandbits))

    def _publish(self) -> None:
        if self._events:
            events, self._events = self._events, []
            payload = msgspec.msgpack.encode([time.time(), events])
            self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            self._number += 1
        self._loop.call_later(STEP_S, self._publish)


class Stub(asyncio.Protocol):
    """One connection to an engine. every_s : between two pieces of a stream; published : told of each prompt"""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, every_s: float, published: Callable[[], object] = lambda: None
    ) -> None:
        self._loop, self._every_s, self._published = loop, every_s, published
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._path = b""
        self._start = b""  # of the body
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a proxy that tries HTTP/2 first, for one
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_message_begin(self) -> None:
        self._path = self._start = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, piece: bytes) -> None:
        if len(self._start) < HEAD_BYTES:
            self._start += piece[:HEAD_BYTES]

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._transport.write(OWN.get(self._path, NOT_FOUND))
            return
        self._published()
        if STREAM_MARK in self._start:
            self._stream(int(self._start.partition(STREAM_OPEN)[2].split(b";")[0]))
        else:
            self._transport.write(COMPLETION)

    def _stream(self, pieces: int) -> None:
        self._transport.write(STREAM_HEAD + PIECE)
        self._next(pieces - 1, self._loop.time())

    def _next(self, left: int, due_s: float) -> None:
        due_s += self._every_s
        tell: Callable[[int, float], None] = self._piece if left > 0 else self._end
        self._timer = self._loop.call_later(max(0.0, due_s - self._loop.time()), tell, left, due_s)

    def _piece(self, left: int, due_s: float) -> None:
        self._transport.write(PIECE)
        self._next(left - 1, due_s)

    def _end(self, left: int, due_s: float) -> None:
        del left, due_s
        self._timer = None
        self._transport.write(LAST)


async def serve(replicas: int, every_s: float) -> None:
    """Serve until the standard input is closed; tell the ports on one line, and those of their events on another."""
    loop, context = asyncio.get_running_loop(), zmq.Context()
    publishers = [Publisher(loop, context, seed) for seed in range(replicas)]
    servers = [
        await loop.create_server(partial(Stub, loop, every_s, publisher.prompt), "127.0.0.1", 0, backlog=4096)
        for publisher in publishers
    ]
    print(" ".join(str(server.sockets[0].getsockname()[1]) for server in servers))
    print(" ".join(str(publisher.port) for publisher in publishers), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--every-ms", type=float, default=10.0)
    args = parser.parse_args()
    uvloop.run(serve(args.replicas, args.every_ms / 1e3))


if __name__ == "__main__":
    main()
