"""The HTTP face of one simulated replica: what a vLLM 0.33 server answers, on aiohttp.

Token events are written to the transport as ready-made chunks, all that are due in one write: through
`StreamResponse.write` each token would wake its handler's task first, which costs more than the engine.
A slow reader's bytes wait in the transport, at most one answer's worth.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from sim_backends import metrics_text, openai_wire, tokenizer
from sim_backends.driver import Driver
from sim_backends.openai_wire import ApiError, ChatBody, CompletionBody, Shape, StreamText
from sim_backends.publisher import HIGH_WATER_MARK, ReplayingPublisher
from sim_backends.requests import EngineRequest, Output, RequestRefused

MAX_BODY_BYTES = 64 * 2**20
VERSION = "0.33.0"
_JSON = "application/json"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class FaceSettings:
    """What one replica's face says of itself.

    row : the replica's row in the world
    prompt_tokens_details : whether usage tells cached tokens (vLLM: --enable-prompt-tokens-details)
    memory_share : reported as gpu_memory_utilization
    """

    row: int
    model: str
    vocab: int
    prompt_tokens_details: bool = True
    memory_share: float = 0.9


class _Answer:
    """What is known of one answer so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self.cached = 0
        self.reason: str | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, output: Output) -> bool:
        self.tokens += 1
        self.cached = output.cached_tokens
        self.reason = output.finish_reason
        return self.reason is not None

    def flush(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class _Stream(_Answer):
    """An answer whose tokens go to `transport` as they come."""

    def __init__(self, text: StreamText, transport: asyncio.WriteTransport, *, chunked: bool) -> None:
        super().__init__()
        self._text = text
        self._transport = transport
        self._chunked = chunked
        self._token = _chunk(text.token) if chunked else text.token
        self._waiting = 0
        self._open = False
        self._opening = text.opening

    def open(self) -> None:
        """The head is out: tokens may follow."""
        self._open = True
        if self.tokens:
            self.flush()

    def take(self, output: Output) -> bool:
        super().take(output)
        self._waiting += output.finish_reason is None
        return True

    def flush(self) -> None:
        if not self._open:
            return
        parts = [self._framed(self._opening), self._token * self._waiting]
        self._opening, self._waiting = b"", 0
        if self.reason is not None:
            parts.append(self._framed(self._text.last(self.reason)))
        if not self._transport.is_closing():  # it closes some moments before the handler is cancelled
            self._transport.write(b"".join(parts))
        if self.reason is not None:
            super().flush()

    def _framed(self, data: bytes) -> bytes:
        return _chunk(data) if self._chunked and data else data


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Face:
    """Routes of one replica over one row of a driver's world."""

    def __init__(self, settings: FaceSettings, driver: Driver, publisher: ReplayingPublisher | None) -> None:
        self._settings = settings
        self._driver = driver
        self._engine = driver.world.engines[settings.row]
        self._publisher = publisher
        self._numbers = count()
        self._in_flight = 0
        self._started = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        for path, handler in (
            ("/v1/models", self._models),
            ("/health", self._alive),
            ("/ping", self._alive),
            ("/version", self._version),
            ("/load", self._load),
            ("/metrics", self._metrics),
            ("/kv_event_sources", self._kv_event_sources),
        ):
            app.router.add_get(path, handler)
        return app

    # Generation.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body: CompletionBody = openai_wire.decode(openai_wire.COMPLETION, await request.read())
        self._known_model(body.model)
        prompt = openai_wire.decode_prompt(body.prompt)
        return await self._generate(request, body, self._encode(prompt) if isinstance(prompt, str) else prompt)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body: ChatBody = openai_wire.decode(openai_wire.CHAT, await request.read())
        self._known_model(body.model)
        if not body.messages:
            raise openai_wire.bad_request("messages must hold at least one message.", param="messages")
        turns = [(message.role, message.text()) for message in body.messages]
        text = tokenizer.render_chat(turns, add_generation_prompt=body.add_generation_prompt)
        return await self._generate(request, body, self._encode(text))

    async def _generate(
        self, request: web.Request, body: CompletionBody | ChatBody, prompt: list[int]
    ) -> web.StreamResponse:
        if body.n is not None and body.n != 1:
            raise openai_wire.bad_request(f"This simulated server makes one choice, not n={body.n}.", param="n")
        chat = isinstance(body, ChatBody)
        base_id = request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
        job = EngineRequest(
            request_id=f"{base_id}/{next(self._numbers)}/{self._settings.row}",  # clients may repeat theirs
            prompt=prompt,
            max_tokens=openai_wire.output_limit(body, room_tokens=self._engine.max_model_len - len(prompt)),
            output_tokens=body.sim_output_tokens,
            ignore_eos=body.ignore_eos,
            cache_salt=body.cache_salt,
        )
        shape = Shape(
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{base_id}",
            created=int(time.time()),
            model=self._settings.model,
            chat=chat,
        )
        self._in_flight += 1
        try:
            if body.stream:
                return await self._streamed(request, job, shape, wants_usage=body.wants_usage)
            return await self._whole(job, shape)
        except RequestRefused as exc:
            raise openai_wire.bad_request(str(exc)) from exc
        finally:  # also when the client has left: this task is cancelled then
            self._in_flight -= 1
            self._driver.abort(self._settings.row, job.request_id)

    async def _whole(self, job: EngineRequest, shape: Shape) -> web.Response:
        answer = _Answer()
        self._driver.submit(self._settings.row, job, answer)
        await answer.over
        assert answer.reason is not None, "an answer is over when its last token came"
        body = openai_wire.whole(shape, tokens=answer.tokens, reason=answer.reason, counts=self._usage(job, answer))
        return web.Response(body=body, content_type=_JSON)

    async def _streamed(
        self, request: web.Request, job: EngineRequest, shape: Shape, *, wants_usage: bool
    ) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left before its stream began")
        chunked = request.version >= HttpVersion11
        stream = _Stream(StreamText(shape), transport, chunked=chunked)
        # Submitted before the head goes out, so that a refusal still has its own status.
        self._driver.submit(self._settings.row, job, stream)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        stream.open()
        await stream.over
        tail = StreamText(shape).usage(self._usage(job, stream)) if wants_usage else b""
        await response.write(tail + openai_wire.DONE)
        await response.write_eof()
        return response

    def _usage(self, job: EngineRequest, answer: _Answer) -> dict[str, Any]:
        cached = answer.cached if self._settings.prompt_tokens_details else None
        return openai_wire.usage(prompt=len(job.prompt), completion=answer.tokens, cached=cached)

    def _known_model(self, model: str | None) -> None:
        if model is not None and model != self._settings.model:
            raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", param="model")

    def _encode(self, text: str) -> list[int]:
        limit = self._engine.max_model_len
        if tokenizer.count_bound(text) > limit:
            raise openai_wire.bad_request(f"This model's maximum context length is {limit} tokens.", param="prompt")
        return tokenizer.encode(text, vocab=self._settings.vocab)

    # Everything else.

    async def _tokenize(self, request: web.Request) -> web.Response:
        body: openai_wire.TokenizeBody = openai_wire.decode(openai_wire.TOKENIZE, await request.read())
        self._known_model(body.model)
        if body.messages is not None:
            turns = [(message.role, message.text()) for message in body.messages]
            text = tokenizer.render_chat(turns, add_generation_prompt=body.add_generation_prompt)
        elif body.prompt is not None:
            text = body.prompt
        else:
            raise openai_wire.bad_request("Either prompt or messages must be given.")
        tokens = tokenizer.encode(text, vocab=self._settings.vocab)
        return _json({
            "count": len(tokens),
            "max_model_len": self._engine.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        })  # fmt: skip

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        if not self._engine.reset_prefix_cache():
            raise ApiError(409, "ConflictError", "The prefix cache is in use: requests hold blocks.")
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._settings.model,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [card]})

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _load(self, request: web.Request) -> web.Response:
        return _json({"server_load": self._in_flight})

    async def _metrics(self, request: web.Request) -> web.Response:
        settings = self._settings
        text = metrics_text.render(self._engine, model=settings.model, memory_share=settings.memory_share)
        return web.Response(body=text.encode(), headers={"Content-Type": metrics_text.CONTENT_TYPE})

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        publisher = self._publisher
        if publisher is None:
            return _json({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.address,
            "replay_endpoint": publisher.replay_address,
            "buffer_steps": publisher.buffer_batches,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": "",
        }
        return _json({"0": source})


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=_JSON, status=status)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the bodies vLLM gives them."""
    try:
        return await handler(request)
    except ApiError as exc:
        return web.Response(body=exc.body(), status=exc.status, content_type=_JSON)
    except web.HTTPRequestEntityTooLarge:
        limit = MAX_BODY_BYTES // 2**20
        too_large = ApiError(413, "BadRequestError", f"The request body is larger than {limit} MiB.")
        return web.Response(body=too_large.body(), status=413, content_type=_JSON)
    except web.HTTPException as exc:
        if exc.status not in (404, 405):
            raise
        return _json({"detail": "Not Found" if exc.status == 404 else "Method Not Allowed"}, status=exc.status)
