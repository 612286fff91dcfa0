"""The HTTP face of one simulated replica: what a vLLM server answers on aiohttp, or an SGLang one.

Both share the routes that generate; the rest differs by engine and release. What is wrong on purpose is decided
in `faults` and done here and in `answers`; `/sim/*` is in `sim_face`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Middleware

from sim_backends import generations, metrics_text, openai_wire, rank_publishers, sglang_text, tokenizer
from sim_backends.answers import Answer, BreakingStream, Stream, break_before_head, break_off, never, reset
from sim_backends.directives import Directive, Path
from sim_backends.driver import Driver
from sim_backends.faults import Break, FaultPlan, Kind
from sim_backends.generations import Generation
from sim_backends.lifecycle import NotServing, State
from sim_backends.metrics_text import About, Load
from sim_backends.openai_wire import ApiError, ChatBody, CompletionBody, Shape, StreamText
from sim_backends.publisher import ReplayingPublisher
from sim_backends.ranks import RANK_HEADER, BadRank, RankPicker, merged
from sim_backends.requests import EngineRequest, RequestRefused

SOURCE_HEADER = "x-kv-cache-source-host-port"  # of llm-d's routing sidecar, which stands before such replicas
MAX_BODY_BYTES = 64 * 2**20
_JSON = "application/json"
_FIRST_V1_LOADS = (0, 5, 9)
_LAST_GET_LOAD = (0, 5, 20)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class FaceSettings:
    """What one replica's face says of itself.

    row : the replica's row in the world, of its first rank; the others follow
    ranks : data-parallel engines behind this face, >= 1
    prompt_tokens_details : whether usage tells cached tokens (vLLM: --enable-prompt-tokens-details)
    memory_share : reported as gpu_memory_utilization
    generation : whose routes, errors and names it has
    listens : `header` or `body`, where a request may name a peer to read
    """

    row: int
    model: str
    vocab: int
    prompt_tokens_details: bool = True
    memory_share: float = 0.9
    generation: Generation = generations.DEFAULT
    ranks: int = 1
    listens: str | None = None


class Face:
    """Routes of one replica over its ranks' rows in a driver's world. `publishers` by rank; none without events."""

    def __init__(
        self,
        settings: FaceSettings,
        driver: Driver,
        plan: FaultPlan,
        publishers: Sequence[ReplayingPublisher] = (),
        *,
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        """addresses : name of each replica by the host:port it is read at; may grow"""
        self._addresses = {} if addresses is None else addresses
        self._settings = settings
        self._sglang = settings.generation.is_sglang
        self._driver = driver
        self._engines = driver.world.engines[settings.row : settings.row + settings.ranks]
        self._engine = self._engines[0]  # limits are alike for all
        self._picker = RankPicker(settings.ranks)
        self._plan = plan
        self._publishers = publishers
        self._numbers = count()
        self._live: dict[str, int] = {}  # ids of requests in the engines, with their rows
        self._in_flight = 0
        self._about: About
        self.restarted()

    def restarted(self) -> None:
        """Be a new process: what was under way is dropped unanswered, and the start time is now."""
        for request_id, row in self._live.items():
            self._driver.abort(row, request_id)
        self._live.clear()
        settings = self._settings
        self._about = About(settings.model, settings.generation, time.time(), settings.memory_share)

    def application(self) -> web.Application:
        middlewares = [_errors(self._settings.generation), self._only_when_up]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        for path, handler in self._posts().items():
            app.router.add_post(path, handler)
        for path, handler in self._gets().items():
            app.router.add_get(path, handler)
        return app

    def _posts(self) -> dict[str, Handler]:
        routes: dict[str, Handler] = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/tokenize": self._tokenize,
        }
        if self._sglang:
            return routes | {"/v1/tokenize": self._tokenize, "/flush_cache": self._reset_prefix_cache}
        return routes | {"/reset_prefix_cache": self._reset_prefix_cache}

    def _gets(self) -> dict[str, Handler]:
        routes: dict[str, Handler] = {
            "/v1/models": self._models,
            "/health": self._alive,
            "/metrics": self._metrics,
        }
        generation = self._settings.generation
        if not self._sglang:
            routes |= {"/ping": self._alive, "/version": self._version, "/load": self._server_load}
            return routes | ({"/kv_event_sources": self._sources} if generation.tells_event_sources else {})
        routes |= {"/server_info": self._server_info, "/get_server_info": self._server_info}
        if generation.version >= _FIRST_V1_LOADS:
            routes["/v1/loads"] = self._v1_loads
        return routes | ({"/get_load": self._get_load} if generation.version <= _LAST_GET_LOAD else {})

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
        return await self._generate(request, body, self._encode(self._rendered(body.messages, body)))

    def _rendered(self, messages: list[openai_wire.Message], body: ChatBody | openai_wire.TokenizeBody) -> str:
        """The conversation's text. vLLM refuses to open a turn and to continue one; SGLang then continues."""
        goes_on = body.continue_final_message
        if goes_on and body.add_generation_prompt and not self._sglang:
            raise openai_wire.bad_request(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            )
        turns = [(message.role, message.text()) for message in messages]
        return tokenizer.render_chat(turns, add_generation_prompt=body.add_generation_prompt, goes_on=goes_on)

    async def _generate(
        self, request: web.Request, body: CompletionBody | ChatBody, prompt: list[int]
    ) -> web.StreamResponse:
        if body.n is not None and body.n != 1:
            raise openai_wire.bad_request(f"This simulated server makes one choice, not n={body.n}.", param="n")
        broken = self._plan.strike_request() if self._plan.breaks_requests else None
        if broken is not None and broken.after_tokens is None:
            await self._fail_before_head(request, broken)
        chat = isinstance(body, ChatBody)
        given = body.rid if self._sglang else _field(request, "x-request-id") or body.request_id
        base_id = given or uuid.uuid4().hex
        row = self._settings.row + self._rank(request)
        job = EngineRequest(
            request_id=f"{base_id}/{next(self._numbers)}/{row}",  # clients may repeat theirs
            prompt=prompt,
            max_tokens=openai_wire.output_limit(body, room_tokens=self._engine.max_model_len - len(prompt)),
            output_tokens=body.sim_output_tokens,
            ignore_eos=body.ignore_eos,
            cache_salt=body.cache_salt,
            directive=self._directive(request, body, base_id),
        )
        shape = Shape(
            answer_id=base_id if self._sglang else f"{'chatcmpl' if chat else 'cmpl'}-{base_id}",
            created=int(time.time() + self._plan.faults.clock_skew_s),
            model=self._settings.model,
            chat=chat,
        )
        self._in_flight += 1
        self._live[job.request_id] = row
        try:
            if body.stream:
                return await self._streamed(request, job, row, shape, broken, wants_usage=body.wants_usage)
            return await self._whole(request, job, row, shape, broken)
        except RequestRefused as exc:
            raise openai_wire.bad_request(str(exc)) from exc
        except NotServing as exc:
            raise openai_wire.failure(503, sglang=self._sglang, retry_after_s=None) from exc
        finally:  # also when the client has left: this task is cancelled then
            self._in_flight -= 1
            self._live.pop(job.request_id, None)
            self._driver.abort(row, job.request_id)

    def _directive(self, request: web.Request, body: CompletionBody | ChatBody, base_id: str) -> Directive:
        """Where its state comes from: from the peer that its head or body names, where this replica listens to that."""
        named = None
        transfer = body.kv_transfer_params
        if self._settings.listens == "header":
            named = _field(request, SOURCE_HEADER)
        elif self._settings.listens == "body" and transfer is not None and transfer.remote_kv_source is not None:
            named = f"{transfer.remote_kv_source.remote_host}:{transfer.remote_kv_source.remote_port}"
        source = None if named is None else self._addresses.get(named)
        if source is None:  # a sidecar too ignores whom it does not know
            return body.sim_directive.directive(base_id)
        return Directive(Path.PEER, source, base_id)

    async def _fail_before_head(self, request: web.Request, broken: Break) -> None:
        if broken.kind is Kind.ERROR:
            faults = self._plan.faults
            raise openai_wire.failure(faults.error_status, sglang=self._sglang, retry_after_s=faults.retry_after_s)
        await break_before_head(_transport(request), broken)

    async def _whole(
        self, request: web.Request, job: EngineRequest, row: int, shape: Shape, broken: Break | None
    ) -> web.StreamResponse:
        answer = Answer()
        self._driver.submit(row, job, answer)
        await answer.over
        if answer.lost:
            reset(_transport(request))
            await never()
        assert answer.reason is not None, "an answer is over when its last token came"
        body = openai_wire.whole(shape, tokens=answer.tokens, reason=answer.reason, counts=self._usage(job, answer))
        if broken is not None:
            await self._break_in_body(request, body, broken.kind)
        return web.Response(body=body, content_type=_JSON)

    async def _break_in_body(self, request: web.Request, body: bytes, kind: Kind) -> None:
        transport = _transport(request)
        response = web.StreamResponse(headers={"Content-Type": _JSON, "Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        break_off(transport, kind)
        await never()

    async def _streamed(
        self,
        request: web.Request,
        job: EngineRequest,
        row: int,
        shape: Shape,
        broken: Break | None,
        *,
        wants_usage: bool,
    ) -> web.StreamResponse:
        transport = _transport(request)
        chunked = request.version >= HttpVersion11
        if broken is None or broken.after_tokens is None:
            stream = Stream(StreamText(shape), transport, chunked=chunked)
        else:
            stream = BreakingStream(
                StreamText(shape), transport, chunked=chunked, kind=broken.kind, after_tokens=broken.after_tokens
            )
        # Submitted before the head goes out, so that a refusal still has its own status.
        self._driver.submit(row, job, stream)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        stream.open()
        await stream.over
        if stream.lost:
            await never()
        tail = StreamText(shape).usage(self._usage(job, stream)) if wants_usage else b""
        await response.write(tail + openai_wire.DONE)
        await response.write_eof()
        return response

    def _usage(self, job: EngineRequest, answer: Answer) -> dict[str, Any]:
        details = self._settings.prompt_tokens_details and self._plan.faults.usage_details
        cached = answer.cached if details else None
        counts = openai_wire.usage(prompt=job.prompt_tokens, completion=answer.tokens, cached=cached)
        return counts | {"reasoning_tokens": 0} if self._sglang else counts

    def _rank(self, request: web.Request) -> int:
        try:
            return self._picker.pick(_field(request, RANK_HEADER))
        except BadRank as exc:
            raise openai_wire.bad_request(str(exc)) from exc

    @web.middleware
    async def _only_when_up(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A process that starts, or is gone, answers nothing of an engine; a socket here can only say 503."""
        away = any(engine.lifecycle.state in (State.STARTING, State.DOWN) for engine in self._engines)
        if away and not request.path.startswith("/sim/"):
            raise openai_wire.failure(503, sglang=self._sglang, retry_after_s=None)
        return await handler(request)

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
            text = self._rendered(body.messages, body)
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
        done = [engine.reset_prefix_cache() for engine in self._engines]
        if not all(done):
            raise ApiError(409, "ConflictError", "The prefix cache is in use: requests hold blocks.")
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._settings.model,
            "object": "model",
            "created": int(self._about.started_s),
            "owned_by": self._settings.generation.engine,
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [card]})

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": self._settings.generation.release})

    async def _server_load(self, request: web.Request) -> web.Response:
        return _json({"server_load": self._in_flight})

    async def _metrics(self, request: web.Request) -> web.Response:
        def tell(loads: Sequence[Load | None]) -> bytes:
            if self._sglang:
                return sglang_text.metrics(self._engine, self._about, loads[0]).encode()
            ranks = enumerate(zip(self._engines, loads, strict=True))
            pages = [metrics_text.render(engine, self._about, load, rank=rank) for rank, (engine, load) in ranks]
            return merged(pages).encode()

        body = await self._told(request, tell)
        return web.Response(body=body, headers={"Content-Type": metrics_text.CONTENT_TYPE})

    async def _v1_loads(self, request: web.Request) -> web.Response:
        def tell(loads: Sequence[Load | None]) -> bytes:
            now_s = time.time() + self._plan.faults.clock_skew_s
            return msgspec.json.encode(sglang_text.loads(self._engine, self._about, loads[0], now_s=now_s))

        return web.Response(body=await self._told(request, tell), content_type=_JSON)

    async def _get_load(self, request: web.Request) -> web.Response:
        def tell(loads: Sequence[Load | None]) -> bytes:
            return msgspec.json.encode(sglang_text.legacy_loads(self._engine, loads[0]))

        body = await self._told(request, tell)
        return web.Response(body=body, content_type=_JSON)

    async def _told(self, request: web.Request, tell: Callable[[Sequence[Load | None]], bytes]) -> bytes:
        """A page with each rank's load figures, as wrong and as late as the faults want it."""
        faults = self._plan.faults
        if faults.metrics_delay_s > 0:
            await asyncio.sleep(faults.metrics_delay_s)
        if faults.metrics_missing == "page":
            raise web.HTTPNotFound
        absent = faults.metrics_missing == "load"
        body = tell([None if absent else Load.of(engine, factor=faults.metrics_factor) for engine in self._engines])
        return self._plan.frozen_pages.setdefault(request.path, body) if faults.metrics_frozen else body

    async def _server_info(self, request: web.Request) -> web.Response:
        publisher = self._publishers[0] if self._publishers else None
        return _json(sglang_text.server_info(self._engine, self._about, publisher))

    async def _sources(self, request: web.Request) -> web.Response:
        return _json(rank_publishers.sources(self._publishers))


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=_JSON, status=status)


def _field(request: web.Request, name: str) -> str | None:
    """A header's value with its bytes as Latin-1, as engines read it; aiohttp takes them for UTF-8."""
    value = request.headers.get(name)
    return None if value is None else value.encode("utf-8", "surrogateescape").decode("latin-1")


def _transport(request: web.Request) -> asyncio.WriteTransport:
    if request.transport is None:
        raise ConnectionResetError("the client left before its answer began")
    return request.transport


def _errors(generation: Generation) -> Middleware:
    """Errors in the bodies that release gives them."""

    def answer(error: ApiError) -> web.Response:
        body = error.body(flat=generation.flat_errors)
        return web.Response(body=body, status=error.status, content_type=_JSON, headers=error.headers)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as exc:
            return answer(exc)
        except web.HTTPRequestEntityTooLarge:
            limit = MAX_BODY_BYTES // 2**20
            return answer(ApiError(413, "BadRequestError", f"The request body is larger than {limit} MiB."))
        except web.HTTPException as exc:
            if exc.status not in (404, 405):
                raise
            return _json({"detail": "Not Found" if exc.status == 404 else "Method Not Allowed"}, status=exc.status)

    return middleware
