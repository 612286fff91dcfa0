"""Bodies of every size through a whole router: what reaches the engine is what the client sent, byte for byte."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from aiohttp import ClientSession, web

from router.config import PromptConfig
from tests.router.test_gateway import Engine, running

KIB = 1024
ODD = b'{ "model":"m",\t"prompt" : %s , "x":1E-1, "user":"\\ud83d\\u00e9\\/ \xc3\xa9", "max_tokens":1 }'


class Keeping(Engine):
    """Keeps the bodies it is sent. Names no source of cache events, so its cache is guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(b"".join([piece async for piece in request.content.iter_any()]))
        return await super()._complete(request)


def a_body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 1, **fields}, indent=1).encode()


BODIES = {
    "odd spelling": ODD % b'"hi"',
    "64 KiB of text": a_body(prompt="x" * 64 * KIB),
    "64 KiB of arguments": a_body(prompt="hi", chat_template_kwargs={"a": "y" * 64 * KIB}),
    "a long session": a_body(prompt="hi", session_id="s" * 70 * KIB),
    "300 KiB, odd spelling": ODD % (b'"' + b'\\"\\u00e9 ' * 30 * KIB + b'"'),
    "300 KiB of ids": a_body(prompt=list(range(50_000))),
    "300 KiB of arguments": a_body(prompt="hi", chat_template_kwargs={"a": "y" * 300 * KIB}),
    "5 MiB of text": a_body(prompt="x" * 5 * KIB * KIB),
    "5 MiB of arguments": a_body(prompt="hi", chat_template_kwargs={"a": [1] * 500 * KIB}),
}


@pytest.mark.parametrize("source", ["bytes", "none"])
async def test_what_reaches_the_engine_is_what_the_client_sent_byte_for_byte(source: Any) -> None:
    engine = Keeping()
    async with running(engine, prompts=PromptConfig(source=source)) as router, ClientSession() as client:
        for name, body in BODIES.items():
            async with client.post(f"{router.traffic}/v1/completions", data=io.BytesIO(body)) as response:
                await response.read()
                assert (name, response.status) == (name, 200)
    assert [name for name, body in zip(BODIES, engine.bodies, strict=True) if body != BODIES[name]] == []
