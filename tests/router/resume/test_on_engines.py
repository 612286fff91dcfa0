"""A stream of a simulated engine, cut around every event, goes on at the same engine over real sockets."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from router.resume.continuation import CHAT, COMPLETIONS, Rest, continuation, why_not_of_request, why_not_of_sent
from router.resume.events import DONE_EVENT
from router.resume.log import ResumeConfig, StreamLog
from router.resume.stitcher import Stitcher
from tests.sim_backends.serving import Client, serving

ASKED = {"stream": True, "max_tokens": 6, "ignore_eos": True, "stream_options": {"include_usage": True}}
_CACHED = re.compile(rb'"prompt_tokens_details":(null|\{"cached_tokens":\d+\})')


async def answer(client: Client, path: str, body: bytes) -> bytes:
    async with client.session.post(client.url + path, data=body) as response:
        assert response.status == 200
        return await response.read()


async def joined_at(client: Client, path: str, body: bytes, whole: bytes, cut: int) -> bytes:
    log = StreamLog(ResumeConfig())
    seen = log.feed(whole[:cut])
    log.broke()
    assert why_not_of_sent(path, body, log, template_strips=False) is None
    rest = continuation(path, body, log)
    if rest.rest in (Rest.NOTHING, Rest.DONE):
        return seen + (DONE_EVENT if rest.rest is Rest.DONE else b"")
    stitcher = Stitcher(log, rest.rest)
    return seen + stitcher.feed(await answer(client, path, rest.body)) + stitcher.end()


@pytest.mark.parametrize(
    ("path", "prompt"),
    [(COMPLETIONS, {"prompt": "Once upon"}), (CHAT, {"messages": [{"role": "user", "content": "Once upon"}]})],
)
async def test_a_stream_cut_around_every_event_equals_the_uncut_one(path: str, prompt: dict[str, Any]) -> None:
    body = json.dumps(prompt | ASKED).encode()
    assert why_not_of_request(path, body) is None
    async with serving() as client:
        whole = await answer(client, path, body)
        ends = [blank.end() for blank in re.finditer(b"\n\n", whole)]
        cuts = [cut for end in ends[:-1] for cut in (end, end + 30)]
        for cut in cuts:
            seen = await joined_at(client, path, body, whole, cut)
            assert _CACHED.sub(b"", seen) == _CACHED.sub(b"", whole), cut
