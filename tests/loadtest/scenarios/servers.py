"""A small OpenAI-compatible server on loopback that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

EVENT = 'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
END = (
    'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":2,'
    '"prompt_tokens_details":{"cached_tokens":10}}}'
    "\n\ndata: [DONE]\n\n"
)


def chunked(text: str) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text.encode())


@dataclass
class Server:
    """Answers /v1/models, and every POST by `write`. bodies, heads : of these; looks : heads of the others"""

    write: Callable[[asyncio.StreamWriter], None]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    looks: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith("GET"):
                    self.looks.append(head)
                    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n{"data":[{"id":"it"}]}')
                    continue
                self.heads.append(head)
                self.bodies.append(json.loads(body))
                self.write(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def whole(writer: asyncio.StreamWriter) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + chunked(EVENT) + chunked(EVENT) + chunked(END) + b"0\r\n\r\n")


def cut(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(EVENT))
    writer.close()


def busy(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 9\r\n\r\nnot today")


@asynccontextmanager
async def a_server(write: Callable[[asyncio.StreamWriter], None] = whole) -> AsyncIterator[Server]:
    server = Server(write)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield server
