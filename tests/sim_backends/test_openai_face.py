"""The HTTP face over real sockets, driven as clients and routers drive a vLLM server."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sim_backends.answers import Stream
from sim_backends.openai_wire import Shape, StreamText
from sim_backends.requests import Output
from tests.sim_backends.builders import prompt
from tests.sim_backends.serving import TIMEOUT_S, Client, serving

MODEL = "Qwen/Qwen3-8B"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as made:
        yield made


@pytest.fixture
async def slow() -> AsyncIterator[Client]:
    """Real-card speed: a long answer takes minutes, so that leaving early shows."""
    async with serving(speed=1.0) as made:
        yield made


LONG = {"prompt": [1, 2, 3], "max_tokens": 20_000, "ignore_eos": True}


async def test_a_completion_answers_with_text_usage_and_the_given_id(client: Client) -> None:
    body = {"model": MODEL, "prompt": prompt(40), "max_tokens": 9, "sim_output_tokens": 4}
    status, answer = await client.post("/v1/completions", body, **{"x-request-id": "abc"})
    assert (status, answer["id"], answer["object"]) == (200, "cmpl-abc", "text_completion")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 40,
        "total_tokens": 44,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("name", [b"x-request-id", b"X-data-parallel-rank"])
async def test_a_header_that_is_no_utf_8_is_read_as_latin_1(name: bytes, client: Client) -> None:
    body = b'{"prompt": [1, 2, 3], "max_tokens": 1}'
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: e", b"Connection: close", name + b": caf\xe9\x85"]
    at = urlsplit(client.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body]))
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    if name == b"x-request-id":
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(answer)["id"] == "cmpl-caf\xe9\x85"
    else:
        assert head.startswith(b"HTTP/1.1 400 ")


async def test_a_repeated_prompt_tells_its_cached_tokens(client: Client) -> None:
    body = {"prompt": prompt(40), "max_tokens": 2}
    await client.post("/v1/completions", body)
    _status, answer = await client.post("/v1/completions", body)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_prompt_tokens_details_can_be_switched_off() -> None:
    async with serving(prompt_tokens_details=False) as client:
        _status, answer = await client.post("/v1/completions", {"prompt": "x"})
        assert "prompt_tokens_details" not in answer["usage"]


async def test_a_completion_stream_has_one_event_a_token_and_usage_on_request(client: Client) -> None:
    body = {"prompt": prompt(20), "max_tokens": 3, "stream_options": {"include_usage": True}}
    events = await client.stream("/v1/completions", body, **{"x-request-id": "abc"})
    assert {event["id"] for event in events} == {"cmpl-abc"}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3


async def test_a_stream_without_include_usage_has_no_usage_event(client: Client) -> None:
    events = await client.stream("/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert len(events) == 3


async def test_a_chat_stream_opens_with_its_role(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "sim_output_tokens": 3}
    events = await client.stream("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:]] == [" tok", " tok", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_chat_answer_comes_whole_when_not_streamed(client: Client) -> None:
    parts = [{"type": "text", "text": "hi"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "sim_output_tokens": 9}
    status, answer = await client.post("/v1/chat/completions", body)
    assert (status, answer["object"]) == (200, "chat.completion")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["content"] == " tok tok"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_streams_arrive_token_by_token_with_the_head_before_the_first(slow: Client) -> None:
    data = json.dumps({"prompt": prompt(8000), "max_tokens": 3, "stream": True})
    async with slow.session.post(slow.url + "/v1/completions", data=data) as response:
        assert slow.engine.counters.generation == 0  # about 1 s of prefill is still ahead
        pieces = [piece async for piece, _end in response.content.iter_chunks() if piece]
    assert len(pieces) >= 3


async def test_an_http_1_0_client_gets_an_unframed_stream(client: Client) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt":"x","max_tokens":3,"stream":true}'
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    head, _, text = (await asyncio.wait_for(reader.read(), TIMEOUT_S)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert [event[:6] for event in text.split(b"\n\n")] == [b"data: "] * 4 + [b""]
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(slow: Client, stream: bool) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**LONG, "stream": stream}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    if stream:
        await asyncio.wait_for(reader.readuntil(b"data: "), TIMEOUT_S)
    await slow.until(lambda: slow.engine.running == 1)
    writer.close()
    await slow.until(lambda: slow.engine.running == 0)
    assert slow.engine.counters.finished == {"stop": 0, "length": 0, "abort": 1}
    assert slow.engine.cache.free_blocks == slow.engine.cache.size
    assert json.loads((await slow.get("/load"))[1]) == {"server_load": 0}
    await writer.wait_closed()


async def test_two_requests_with_one_id_do_not_disturb_each_other(client: Client) -> None:
    body = {"prompt": "x", "max_tokens": 5}
    answers = await asyncio.gather(
        *(client.post("/v1/completions", body, **{"x-request-id": "same"}) for _ in range(2))
    )
    assert [(status, answer["id"]) for status, answer in answers] == [(200, "cmpl-same")] * 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/completions", b'{"model":"nope","prompt":"x"%s}', 404, "NotFoundError"),
        ("/v1/completions", b'{"prompt":"x"%s', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt":"x","max_tokens":"many"%s}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt":"x","max_tokens":0%s}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt":["a","b"]%s}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt":"x","n":2%s}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt":"x","max_tokens":200000%s}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt":[151936]%s}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt":[]%s}', 400, "BadRequestError"),
        ("/v1/completions", b'{"max_tokens":1%s}', 400, "BadRequestError"),
        ("/v1/chat/completions", b'{"messages":[]%s}', 400, "BadRequestError"),
        ("/v1/chat/completions", b'{"messages":"hi"%s}', 400, "BadRequestError"),
    ],
)
async def test_bad_requests_get_a_status_and_one_sentence(
    client: Client, path: str, body: bytes, status: int, kind: str, stream: bool
) -> None:
    got, answer = await client.post(path, body % (b',"stream":true' if stream else b""))
    assert (got, answer["error"]["type"], answer["error"]["code"]) == (status, kind, status)
    assert answer["error"]["message"]
    assert client.engine.waiting + client.engine.running == 0


async def test_a_long_list_of_ids_is_taken(client: Client) -> None:
    status, answer = await client.post("/v1/completions", {"prompt": prompt(100_000, start=0), "max_tokens": 1})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 100_000)


async def test_a_body_over_64_mib_is_refused(client: Client) -> None:
    body = io.BytesIO(b"x" * (64 * 2**20 + 1))
    async with client.session.post(client.url + "/v1/completions", data=body) as response:
        assert response.status == 413
        assert (await response.json())["error"]["message"] == "The request body is larger than 64 MiB."


async def test_unknown_routes_and_methods_answer_as_fastapi_does(client: Client) -> None:
    assert await client.get("/nothing") == (404, '{"detail":"Not Found"}')
    assert await client.get("/v1/completions") == (405, '{"detail":"Method Not Allowed"}')


async def test_the_small_routes_answer(client: Client) -> None:
    assert await client.get("/health") == (200, "")
    assert await client.get("/ping") == (200, "")
    assert "version" in json.loads((await client.get("/version"))[1])
    (card,) = json.loads((await client.get("/v1/models"))[1])["data"]
    assert (card["id"], card["owned_by"], card["max_model_len"]) == (MODEL, "vllm", 131072)


async def test_tokenize_gives_the_tokens_a_prompt_of_that_text_has(client: Client) -> None:
    messages = [{"role": "user", "content": "one two three four five six seven"}]
    _status, chat = await client.post("/tokenize", {"model": MODEL, "messages": messages})
    _status, answer = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert chat["count"] == len(chat["tokens"]) == answer["usage"]["prompt_tokens"]
    _status, text = await client.post("/tokenize", {"prompt": "abcdefgh"})
    _status, again = await client.post("/v1/completions", {"prompt": text["tokens"], "max_tokens": 1})
    assert text["count"] == again["usage"]["prompt_tokens"] == 2
    status, _error = await client.post("/tokenize", {"model": MODEL})
    assert status == 400


async def test_metrics_parse_and_count_what_was_served(client: Client) -> None:
    await client.post("/v1/completions", {"prompt": prompt(40), "max_tokens": 7})
    status, text = await client.get("/metrics")
    values = {sample.name: sample.value for f in text_string_to_metric_families(text) for sample in f.samples}
    assert status == 200
    assert values["vllm:generation_tokens_total"] == 7.0
    assert values["vllm:prompt_tokens_total"] == 40.0


async def test_a_reset_forgets_the_cache_and_is_refused_while_in_use(slow: Client) -> None:
    body = {"prompt": prompt(40), "max_tokens": 1}
    await slow.post("/v1/completions", body)
    assert (await slow.post("/reset_prefix_cache", b""))[0] == 200
    assert (await slow.post("/v1/completions", body))[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    leaving = asyncio.create_task(slow.post("/v1/completions", LONG))
    await slow.until(lambda: slow.engine.running == 1)
    status, answer = await slow.post("/reset_prefix_cache", b"")
    assert (status, answer["error"]["code"]) == (409, 409)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await slow.until(lambda: slow.engine.running == 0)


async def test_stopping_cuts_a_stream_visibly_and_does_not_wait_for_its_end() -> None:
    async with serving(speed=1.0) as client, asyncio.timeout(TIMEOUT_S):
        data = json.dumps({**LONG, "stream": True})
        async with client.session.post(client.url + "/v1/completions", data=data) as response:
            await response.content.readuntil(b"data: ")
            stopping = asyncio.create_task(client.cluster.stop())
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
            await stopping
    assert client.engine.counters.finished["abort"] == 1


class ClosedTransport(asyncio.WriteTransport):
    """What a handler still holds in the moment after its client left."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise RuntimeError("unable to perform operation: the handler is closed")


async def test_tokens_for_a_client_that_just_left_are_dropped_and_nobody_else_is_harmed() -> None:
    shape = Shape(answer_id="cmpl-1", model="m", chat=False, created=0)
    stream = Stream(StreamText(shape), ClosedTransport(), chunked=True)
    stream.open()
    stream.take(Output("cmpl-1", at_s=0.0, index=0, token_id=1, finish_reason="stop", cached_tokens=0))
    stream.flush()
    assert stream.over.done()


async def test_a_message_that_is_continued_adds_its_text_to_the_prompt(client: Client) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True}
    _, first = await client.post("/v1/chat/completions", asked)
    said = first["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said}]
    goes_on = asked | {"messages": messages, "continue_final_message": True}
    status, refused = await client.post("/v1/chat/completions", goes_on)
    assert (status, "both" in refused["error"]["message"]) == (400, True)
    status, second = await client.post("/v1/chat/completions", goes_on | {"add_generation_prompt": False})
    assert (status, second["usage"]["prompt_tokens"]) == (200, first["usage"]["prompt_tokens"] + 3)
