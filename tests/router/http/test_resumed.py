"""Streams whose replica dies anywhere go on from the next one, over real sockets, and a client cannot tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from estimators.request import RequestFacts
from router.actions import Cause, Refuse
from router.http.contract import Rewritten, TimeOuts
from router.http.head import RequestHead
from router.http.server import TrafficPort
from router.http.splice import edits_now, spliced
from router.resume.log import ResumeConfig
from router.resume.reasons import WhyNot
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Client,
    Decisions,
    Received,
    Replica,
    Script,
    a_client,
    a_port,
    a_replica,
    answer,
    chunk,
    facts_of,
    on_uvloop,
    post,
    reset,
    says,
    says_and_closes,
    silence,
    until,
)
from tests.router.resume import engine
from tests.router.resume.streams import delta, event, text, told

CONFIG = ResumeConfig(enabled=True)
USAGE = {"include_usage": True}
CHAT = b"/v1/chat/completions"
_DETAILS = re.compile(rb'"prompt_tokens_details":(null|\{"cached_tokens":\d+\})')


def a_body(**more: Any) -> bytes:
    asked = {"model": "m", "prompt": 'Say "a":', "stream": True, "max_tokens": 4, "stream_options": USAGE}
    return json.dumps(asked | more, separators=(",", ":")).encode()


def a_chat(**more: Any) -> bytes:
    turns = [{"role": "user", "content": "Où?"}]
    asked = {"model": "m", "messages": turns, "stream": True, "max_tokens": 4, "stream_options": USAGE}
    return json.dumps(asked | more, separators=(",", ":")).encode()


def ids(prompt: str) -> list[int]:
    return list(map(ord, prompt))


@dataclass
class Engine:
    """Answers as `tests.router.resume.engine` does; its first answers end at `cuts`, of which None is all.

    ends : how a cut shows on the wire; sizes : of the pieces it writes
    """

    cuts: list[int | None] = field(default_factory=list)
    ends: str = "fin"
    sizes: tuple[int, ...] = (1_000_000,)
    tells_ids: bool = False
    asked: list[Any] = field(default_factory=list)

    async def __call__(self, received: Received, writer: asyncio.StreamWriter) -> None:
        number = len(self.asked)
        self.asked.append(json.loads(received.body))
        whole = engine.stream(received.body, name=f"r{number}", tells_ids=self.tells_ids, cached=number)
        cut = self.cuts[number] if number < len(self.cuts) else None
        writer.write(STREAM_HEAD)
        for piece in self._pieces(whole[:cut]):
            writer.write(chunk(piece))
            await asyncio.sleep(0)
        if cut is None or self.ends == "well":
            writer.write(LAST_CHUNK)
        elif self.ends == "half a chunk":
            writer.write(b"ff\r\ndata: {")
            writer.close()
        elif self.ends == "reset":
            await asyncio.sleep(0.01)  # a reset overtakes bytes the peer has not read yet
            reset(writer)
        else:
            writer.close()

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        at = turn = 0
        while at < len(body):
            size = self.sizes[turn % len(self.sizes)]
            yield body[at : at + size]
            at, turn = at + size, turn + 1


@contextlib.asynccontextmanager
async def served(
    script: Script, *, config: ResumeConfig = CONFIG, resumes: int = 9, **parts: Any
) -> AsyncIterator[tuple[Replica, TrafficPort, Decisions]]:
    """A port whose every attempt goes to one script, so that it tells the first replica's part by order."""
    async with a_replica(script) as replica:
        decisions = Decisions([replica.url], on_failure=[replica.url] * 9, on_break=[replica.url] * resumes)
        async with a_port(decisions, resumable=lambda model: config, **parts) as port:
            yield replica, port, decisions


async def stream_of(port: TrafficPort, body: bytes, target: bytes = b"/v1/completions") -> bytes:
    async with a_client(port) as client:
        return (await client.ask(post(body, target=target))).body


async def seen_of(client: Client, request: bytes) -> bytes:
    """What comes of an answer that is cut, without its framing as far as it goes."""
    client.writer.write(request)
    await client.read_head()
    seen = b""
    while line := await client.reader.readline():
        size = int(line, 16)
        assert size, "a cut stream has no last chunk"
        seen += (await client.reader.readexactly(size + 2))[:-2]
    return seen


def target_of(body: bytes) -> bytes:
    return CHAT if b'"messages"' in body else b"/v1/completions"


def alike(stream: bytes) -> bytes:
    """Without what the second replica cannot know: how much the first had cached."""
    return _DETAILS.sub(b"", stream)


def first_event_end(stream: bytes) -> int:
    return stream.index(b"\n\n") + 2


# -- one stream


@pytest.mark.parametrize("body", [a_body(max_tokens=2), a_chat(max_tokens=2)], ids=["completions", "chat"])
@on_uvloop
async def test_a_replica_that_dies_at_any_byte_does_not_show(body: bytes) -> None:
    whole = engine.stream(body, name="r0")
    engine_ = Engine()
    async with served(engine_) as (_, port, decisions):
        for cut in range(first_event_end(whole), len(whole)):
            engine_.cuts, engine_.asked = [cut], []
            decisions.on_break = decisions.urls * 9
            assert alike(await stream_of(port, body, target_of(body))) == alike(whole), cut
    assert decisions.of("failed") == []


BODIES = [
    a_body(max_tokens=300),
    a_body(prompt=ids("Say: "), max_tokens=60, return_token_ids=True),
    a_chat(max_tokens=40),
    a_chat(max_completion_tokens=9, min_tokens=2, seed=7),
    a_body(max_tokens=12, stream_options=None),
]


@pytest.mark.parametrize("ends", ["fin", "reset", "half a chunk", "well"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[12:60].decode())
@on_uvloop
async def test_neither_do_deaths_of_three_replicas_in_odd_pieces(body: bytes, ends: str) -> None:
    """Each brings a part of its own; the engines' text is a function of all text before."""
    tells_ids = b"return_token_ids" in body
    whole = engine.stream(body, name="r0", tells_ids=tells_ids)
    for sizes in [(1_000_000,), (7, 1, 40), (3,)]:
        engine_ = Engine([len(whole) // 3, 500, 333], ends=ends, sizes=sizes, tells_ids=tells_ids)
        async with served(engine_, config=ResumeConfig(enabled=True, max_resumes=9)) as (_, port, decisions):
            assert told(await stream_of(port, body, target_of(body))) == told(whole)
        assert decisions.kinds[-1] == "finished"


@on_uvloop
async def test_the_next_replica_is_asked_for_the_rest_alone() -> None:
    body = a_body(max_tokens=6, user="u")
    whole = engine.stream(body, name="r0")
    cut = [blank.end() for blank in re.finditer(b"\n\n", whole)][2]
    engine_ = Engine([cut])
    async with served(engine_) as (_, port, decisions):
        got = await stream_of(port, body)
    first, rest = engine_.asked
    assert rest == first | {"prompt": first["prompt"] + told(got)[0][:3], "max_tokens": 3}
    (request,) = decisions.of("broke")
    assert isinstance(request, RequestFacts)
    assert request.sent_tokens == 3
    assert decisions.kinds == ["arrived", "first_token", "broke", "first_token", "finished"]


@on_uvloop
async def test_each_attempt_is_reported_with_what_its_own_replica_said() -> None:
    body = a_body(max_tokens=6)
    engine_ = Engine([first_event_end(engine.stream(body, name="r0"))])
    async with served(engine_) as (_, port, decisions):
        got = await stream_of(port, body)
    (ended,) = decisions.of("finished")
    assert (ended.status, ended.cached_tokens) == (200, 1)
    assert ended.prompt_tokens == len('Say "a":') + 1
    assert told(got)[2]["prompt_tokens"] == len('Say "a":')


@on_uvloop
async def test_what_is_lacking_is_only_the_end_and_nobody_is_asked() -> None:
    body = a_body(max_tokens=2)
    whole = engine.stream(body, name="r0")
    engine_ = Engine([whole.index(b"data: [DONE]") + 5])
    async with served(engine_, resumes=0) as (_, port, decisions):
        assert await stream_of(port, body) == whole
    assert decisions.kinds == ["arrived", "first_token", "finished"]


@pytest.mark.parametrize("more", [{}, {"tools": [{"type": "function"}]}], ids=["could go on", "could not"])
@on_uvloop
async def test_a_death_behind_the_end_is_none(more: dict[str, Any]) -> None:
    body = a_body(max_tokens=2, **more)
    whole = engine.stream(body, name="r0")
    async with served(Engine([len(whole)]), resumes=0) as (_, port, decisions):
        assert await stream_of(port, body) == whole
    assert decisions.kinds == ["arrived", "first_token", "finished"]


@on_uvloop
async def test_an_answer_without_length_that_ends_early_is_a_break_too() -> None:
    """Where the end of the connection is the end of the answer, only the stream itself can tell."""
    body = a_body(max_tokens=6)
    whole = engine.stream(body, name="r0")
    open_end = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    cut = first_event_end(whole) + 9

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(open_end + (engine.stream(received.body, name="r1") if script.asked else whole[:cut]))  # type: ignore[attr-defined]
        script.asked = True  # type: ignore[attr-defined]
        writer.close()

    script.asked = False  # type: ignore[attr-defined]
    async with served(script) as (_, port, _decisions), a_client(port) as client:
        assert alike((await client.ask(post(body))).body) == alike(whole)


@on_uvloop
async def test_a_client_of_http_1_0_gets_the_same_stream_without_chunks() -> None:
    body = a_body(max_tokens=6)
    whole = engine.stream(body, name="r0")
    async with served(Engine([first_event_end(whole)])) as (_, port, _decisions), a_client(port) as client:
        client.writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await client.read_head()
        assert alike(await client.reader.read()) == alike(whole)


@on_uvloop
async def test_usage_that_the_client_did_not_ask_for_stays_here_and_is_learned() -> None:
    def read(head: RequestHead, body: bytes) -> Rewritten:
        edited = spliced(body, edits_now(body, aliases={"fast": "m"}, asks_usage=True).values())
        return Rewritten(RequestFacts("r", "m", streams=True), edited, swallows_usage=True)

    body = a_body(max_tokens=6, stream_options=None, model="fast")
    whole = engine.stream(body, name="r0")
    engine_ = Engine([first_event_end(whole)])
    async with served(engine_, read_prompt=read) as (_, port, decisions):
        assert await stream_of(port, body) == whole
    assert [(asked["model"], asked["stream_options"]) for asked in engine_.asked] == [("m", USAGE)] * 2
    assert decisions.of("finished")[0].output_tokens == 5


@on_uvloop
async def test_a_first_answer_that_dies_before_its_first_byte_is_replaced_as_ever() -> None:
    body = a_body()
    async with served(Engine([0])) as (_, port, decisions):
        assert await stream_of(port, body) == engine.stream(body, name="r1", cached=1)
    assert decisions.kinds == ["arrived", "failed", "first_token", "finished"]


# -- what cannot go on


@pytest.mark.parametrize(
    ("why_not", "more"),
    [
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("logprobs", {"logprobs": 1}),
        ("several_choices", {"n": 2}),
        ("structured", {"response_format": {"type": "json_object"}}),
        ("ids_unknown", {"prompt": [1, 2, 3]}),
    ],
)
@on_uvloop
async def test_what_cannot_go_on_says_so_in_an_event_of_its_own_and_is_cut(why_not: str, more: dict[str, Any]) -> None:
    body = a_body(**more)
    whole = text("one") + text("two")
    script = says_and_closes(STREAM_HEAD + chunk(whole[:50]) + chunk(whole[50:] + b"data: {half an"))
    async with served(script) as (_, port, decisions), a_client(port) as client:
        seen = await seen_of(client, post(body))
    assert seen.startswith(whole + b'data: {"error":')
    said = json.loads(seen[len(whole) + 6 :])["error"]
    assert (said["type"], said["param"], said["code"]) == ("StreamBroken", why_not, 502)
    assert decisions.of("broke") == [WhyNot(why_not)]
    assert b"[DONE]" not in seen
    assert b"half an" not in seen


@on_uvloop
async def test_thoughts_seen_under_way_pass_and_end_what_could_have_gone_on() -> None:
    whole = delta({"role": "assistant"}) + delta({"reasoning_content": "hm"}) + delta({"content": "so"})
    async with served(says_and_closes(STREAM_HEAD + chunk(whole))) as (_, port, decisions), a_client(port) as client:
        seen = await seen_of(client, post(a_chat(), target=CHAT))
    assert seen.startswith(whole + b'data: {"error":')
    assert decisions.of("broke") == [WhyNot.REASONING]


@on_uvloop
async def test_nobody_left_to_go_on_is_said_and_shown() -> None:
    whole = text("one")
    async with (
        served(says_and_closes(STREAM_HEAD + chunk(whole)), resumes=0) as (_, port, decisions),
        a_client(port) as client,
    ):
        seen = await seen_of(client, post(a_body()))
    assert json.loads(seen[len(whole) + 6 :])["error"]["param"] is None
    assert decisions.kinds == ["arrived", "first_token", "broke"]


@on_uvloop
async def test_a_stream_goes_on_as_often_as_it_may() -> None:
    once = says_and_closes(STREAM_HEAD + chunk(text("one")))
    async with (
        served(once, config=ResumeConfig(enabled=True, max_resumes=2)) as (replica, port, decisions),
        a_client(port) as client,
    ):
        seen = await seen_of(client, post(a_body(max_tokens=9)))
        assert len(replica.received) == 3
    assert seen.count(b'"one"') >= 3
    assert decisions.of("broke")[-1] is WhyNot.TOO_OFTEN


@on_uvloop
async def test_an_event_too_large_to_be_held_passes_and_its_stream_is_cut_without_another() -> None:
    large = b'data: {"choices":[],"pad":"' + b"x" * 5000
    config = ResumeConfig(enabled=True, max_event_bytes=1000)
    script = says_and_closes(STREAM_HEAD + chunk(text("one")) + chunk(large))
    async with served(script, config=config) as (_, port, decisions), a_client(port) as client:
        assert await seen_of(client, post(a_body())) == text("one") + large
    assert decisions.of("broke") == [WhyNot.OVERFLOW]


@on_uvloop
async def test_an_error_of_the_engine_in_a_stream_that_ends_well_passes_as_it_came() -> None:
    whole = text("one") + event({"error": {"message": "m", "code": 500}})
    async with served(says(STREAM_HEAD + chunk(whole) + LAST_CHUNK)) as (_, port, decisions):
        assert await stream_of(port, a_body()) == whole
    assert decisions.of("finished")[0].stream_error


@on_uvloop
async def test_streams_of_a_pool_that_does_not_go_on_are_cut_as_ever() -> None:
    broken = STREAM_HEAD + chunk(text("one")) + b"ff\r\ndata: {cut"
    async with a_replica(says_and_closes(broken)) as replica:
        decisions = Decisions([replica.url], on_break=[replica.url])
        async with a_port(decisions, resumable=lambda model: None) as port, a_client(port) as client:
            client.writer.write(post(a_body()))
            await client.read_head()
            assert await client.reader.read() == broken[len(STREAM_HEAD) :]
    assert decisions.of("failed") == [Cause.BROKEN]


# -- attempts at the rest


def dies_once(*then: Script) -> Script:
    """The first answer breaks behind its first event; the next ones are by `then`, the last of it for all others."""
    turns = iter([says_and_closes(STREAM_HEAD + chunk(text("a"))), *then[:-1]])

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        await next(turns, then[-1])(received, writer)

    return script


async def goes_on(received: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(engine.stream(received.body, name="last")) + LAST_CHUNK)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (says(answer(b"busy", b"503 Busy")), Cause.OVERLOADED),
        (says(answer(b"{}", b"500 Oh")), Cause.BAD_ANSWER),
        (says_and_closes(b"HTTP/9 rubbish\r\n\r\n"), Cause.BAD_ANSWER),
        (says_and_closes(), Cause.NO_ANSWER),
    ],
    ids=["busy", "fails", "rubbish", "leaves"],
)
@on_uvloop
async def test_an_attempt_at_the_rest_that_brings_nothing_is_replaced(how: Script, cause: Cause) -> None:
    body = a_body(max_tokens=5)
    async with served(dies_once(how, goes_on)) as (replica, port, decisions):
        got = told(await stream_of(port, body))
        asked = [json.loads(received.body)["prompt"] for received in replica.received]
    assert asked == ['Say "a":', 'Say "a":a', 'Say "a":a']
    assert got[0] == "a" + engine.output('Say "a":a', 4)[0].strip(engine.END)
    assert (got[3], got[4]) == (1, 1)
    assert decisions.of("failed") == [cause]


@on_uvloop
async def test_one_that_begins_and_brings_no_event_is_a_break_again() -> None:
    body = a_body(max_tokens=5)
    half = says_and_closes(STREAM_HEAD + chunk(b'data: {"id":"x","choi'))
    config = ResumeConfig(enabled=True, max_resumes=3)
    async with served(dies_once(says_and_closes(STREAM_HEAD), half, goes_on), config=config) as (_, port, decisions):
        got = told(await stream_of(port, body))
    assert got[0] == "a" + engine.output('Say "a":a', 4)[0].strip(engine.END)
    assert decisions.kinds == ["arrived", "first_token", "broke", "broke", "broke", "first_token", "finished"]


@pytest.mark.parametrize("status", [b"400 Bad Request", b"404 Not Found", b"200 OK"])
@on_uvloop
async def test_a_replica_that_would_not_go_on_ends_it_without_its_own_answer(status: bytes) -> None:
    script = dies_once(says(answer(b'{"no":"thanks"}', status)))
    async with served(script) as (_, port, decisions), a_client(port) as client:
        seen = await seen_of(client, post(a_body()))
    assert json.loads(seen[len(text("a")) + 6 :])["error"]["param"] == "refused"
    assert b"thanks" not in seen
    assert decisions.of("broke")[-1] is WhyNot.REFUSED


@on_uvloop
async def test_a_refusal_of_the_rest_by_its_reader_is_shown() -> None:
    def read(head: RequestHead, body: bytes) -> RequestFacts | Refuse:
        return Refuse(400, "BadRequestError", "too long") if b'":a"' in body else facts_of(head, body)

    async with (
        served(dies_once(goes_on), read_prompt=read) as (_, port, decisions),
        a_client(port) as client,
    ):
        seen = await seen_of(client, post(a_body()))
    assert json.loads(seen[len(text("a")) + 6 :])["error"]["param"] == "body"
    assert decisions.of("broke") == [WhyNot.BODY]


@on_uvloop
async def test_a_reader_that_raises_on_the_rest_costs_its_stream_alone() -> None:
    def read(head: RequestHead, body: bytes) -> RequestFacts | Refuse:
        if b'":a"' in body:
            raise RuntimeError("a bug")
        return facts_of(head, body)

    async with (
        served(dies_once(goes_on), read_prompt=read, bugs=1) as (_, port, decisions),
        a_client(port) as client,
    ):
        assert b"StreamBroken" in await seen_of(client, post(a_body()))
    assert decisions.of("failed") == [Cause.BROKEN]


@on_uvloop
async def test_a_rest_whose_prompt_takes_a_while_to_read_goes_on_after_it() -> None:
    later: list[asyncio.Future[RequestFacts]] = []

    def read(head: RequestHead, body: bytes) -> Any:
        if b'":a"' not in body:
            return facts_of(head, body)
        later.append(asyncio.get_running_loop().create_future())
        return later[-1]

    async with served(dies_once(goes_on), read_prompt=read) as (_, port, _decisions):
        asking = asyncio.ensure_future(stream_of(port, a_body()))
        await until(lambda: bool(later))
        later[0].set_result(RequestFacts("r", "m", streams=True))
        assert told(await asking)[4] == 1


async def _leaves(port: TrafficPort, waits: Any) -> None:
    """A client that leaves when something holds."""
    async with a_client(port) as client:
        client.writer.write(post(a_body()))
        await client.read_head()
        await client.reader.readuntil(b"\n\n")
        await until(waits)


@on_uvloop
async def test_a_client_that_leaves_while_the_rest_is_awaited_leaves_nothing_behind() -> None:
    async with served(dies_once(silence)) as (replica, port, decisions):
        await _leaves(port, lambda: len(replica.received) == 2)
        await until(lambda: replica.open == 0)
        await until(lambda: not decisions.open)
    assert decisions.kinds == ["arrived", "first_token", "broke", "cancelled"]


@on_uvloop
async def test_a_client_that_leaves_while_the_rest_is_read_leaves_nothing_behind() -> None:
    later: list[asyncio.Future[RequestFacts]] = []

    def read(head: RequestHead, body: bytes) -> Any:
        if b'":a"' not in body:
            return facts_of(head, body)
        later.append(asyncio.get_running_loop().create_future())
        return later[-1]

    async with served(dies_once(goes_on), read_prompt=read) as (replica, port, decisions):
        await _leaves(port, lambda: bool(later))
        await until(lambda: later[0].cancelled())
        await until(lambda: not decisions.open)
        assert len(replica.received) == 1
    assert decisions.kinds == ["arrived", "first_token", "cancelled"]


@on_uvloop
async def test_a_replica_that_falls_silent_under_way_is_left_for_another() -> None:
    body = a_body(max_tokens=5)
    stops = says(STREAM_HEAD + chunk(text("a")))
    turns = iter([stops])

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        await next(turns, goes_on)(received, writer)

    async with served(script, times=TimeOuts(stall_s=0.05)) as (replica, port, _decisions):
        assert told(await stream_of(port, body))[4] == 1
        assert replica.opened == 2


@on_uvloop
async def test_the_limit_of_the_whole_holds_while_the_rest_is_awaited() -> None:
    async with (
        served(dies_once(silence), times=TimeOuts(total_s=0.3)) as (replica, port, decisions),
        a_client(port) as client,
    ):
        decisions.on_failure.clear()
        seen = await seen_of(client, post(a_body()))
        await until(lambda: replica.open == 0)
    assert seen == text("a")
    assert decisions.of("failed") == [Cause.TOO_LONG]


@on_uvloop
async def test_an_abort_by_the_first_id_ends_a_stream_whose_engine_has_another() -> None:
    second = says(STREAM_HEAD + chunk(text("b", name="two")))
    async with (
        served(dies_once(second)) as (replica, port, decisions),
        a_client(port) as client,
        a_client(port) as other,
    ):
        client.writer.write(post(a_body()))
        await client.read_head()
        await client.reader.readuntil(b'"b"')
        wanted = b'{"rid":"one"}'
        said = await other.ask(post(wanted, target=b"/abort_request"))
        assert json.loads(said.body) == {"object": "abort", "told": [], "cut": 1}
        assert b"[DONE]" not in await client.reader.read()
        await until(lambda: replica.open == 0)
    assert decisions.kinds[-1] == "cancelled"
