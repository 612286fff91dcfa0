"""Asks an engine, or a renderer beside it, for the tokens of a prompt.

Model     `/tokenize` with the prompt or the conversation, or `.../render` with the client's own body; what it answers
          is what the engine computes, at one hop and some of the engine's own processor time
Valid     `/tokenize` of vLLM and of SGLang (conversations since 0.5.12); render of vLLM since 0.15.1
Errors    after three calls in a row that got no answer in time, or no connection, the engine is left alone for a while.
          What may be one prompt's own doing does not count: it is long, the engine answered somebody meanwhile, or it
          answered this one with a failure
Blind to  images: an answer that has any gives no tokens. What was asked while the engine did not answer
Source    vLLM 0.33 and SGLang 0.5.23 HTTP interfaces
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal

import aiohttp
import msgspec

from router.prompts.body import prompts_in
from router.tokenizing.asked import Asked, Form, NoTokens, Tokenised, Unread, Wanted, tokenised
from router.tokenizing.breaker import Breaker
from router.tokenizing.messages import Engine, conversation_of
from router.tokenizing.workers import LARGE_BYTES, BadIds, Workers

Way = Literal["tokenize", "render"]
MOST_TEXTS = 8  # of one request, each a call
LONGEST_TRIAL_BYTES = 64 * 1024  # of body; if a longer one is late that may be its length
LONGEST_ANSWER_BYTES = 64 << 20  # three times what the ids of a body of 4 MiB can take
_RENDER_PATHS = {
    Form.TEXT: "/v1/completions/render",
    Form.CHAT: "/v1/chat/completions/render",
    Form.TOOLS: "/v1/chat/completions/render",
    Form.RESPONSES: "/v1/responses/render",
    Form.MESSAGES: "/v1/messages/render",
}

log = logging.getLogger(__name__)


class _Reply(msgspec.Struct):
    tokens: msgspec.Raw = msgspec.Raw()  # of /tokenize
    token_ids: msgspec.Raw = msgspec.Raw()  # of a renderer
    features: Any = None  # images and the like, of a renderer


_reply = msgspec.json.Decoder(_Reply)
_replies = msgspec.json.Decoder(list[_Reply])
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class EngineTokens:
    """A `TokenSource` that is asked over HTTP. One failing kind of answer is logged when it starts and when it ends.

    url_of : base URL of who is asked for a base model's tokens; None when nobody can be
    workers : read long answers, and say how long a request may wait
    clock : seconds, for the rests between trials
    has_key : whether the session has a key of the router's own; if not, clients' keys are passed on
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url_of: Callable[[str], str | None],
        workers: Workers,
        *,
        way: Way,
        engine: Engine,
        has_key: bool,
        clock: Callable[[], float],
        most_waiting: int,
    ) -> None:
        self._session = session
        self._url_of = url_of
        self._workers = workers
        self._way: Way = way
        self._engine: Engine = engine
        self._has_key = has_key
        self._clock = clock
        self._most_waiting = most_waiting
        self._breaker = Breaker()
        self._answered = 0
        self.waiting = 0

    @property
    def up(self) -> bool:
        """Whether it answers, as far as is known."""
        return not self._breaker.open

    async def tokens_of(self, asked: Asked, body: bytes, wanted: Wanted) -> Tokenised:
        """Tokens of a text prompt. Raises `NoTokens`."""
        if self.waiting >= self._most_waiting:
            raise NoTokens(Unread.BUSY)
        url = self._url_of(asked.model)
        if url is None or not self._may_ask(wanted):
            raise NoTokens(Unread.UNAVAILABLE, "nobody can be asked")
        answered = self._answered
        self.waiting += 1
        try:
            async with asyncio.timeout(self._workers.limit_s(wanted.size_bytes)):
                if self._way == "render":
                    made = await self._render(url, asked, body, wanted)
                else:
                    made = await self._tokenize(url, asked, wanted)
        except TimeoutError:
            counts = answered == self._answered and wanted.size_bytes <= LONGEST_TRIAL_BYTES
            self._failed("no answer within the time limit", counts=counts)
            raise NoTokens(Unread.LATE) from None
        except NoTokens as exc:
            if exc.why in (Unread.UNAVAILABLE, Unread.UNAUTHORISED):
                self._failed(exc.detail, counts=exc.why is Unread.UNAVAILABLE or self._has_key)
            raise
        finally:
            self.waiting -= 1
        self._answered += 1
        if self._breaker.succeeded():
            log.info("prompts are tokenised by the engine again")
        return made

    def _may_ask(self, wanted: Wanted) -> bool:
        if self._breaker.open and wanted.size_bytes > LONGEST_TRIAL_BYTES:
            return False  # its end would tell nothing, and the next trial would have to wait
        return self._breaker.lets_through(self._clock())

    async def _tokenize(self, url: str, asked: Asked, wanted: Wanted) -> Tokenised:
        questions = questions_of(asked, self._engine)
        headers = self._headers(wanted)
        raw = await asyncio.gather(*(tokenize(self._session, url, question, headers=headers) for question in questions))
        return await self._blocks(raw, wanted)

    async def _render(self, url: str, asked: Asked, body: bytes, wanted: Wanted) -> Tokenised:
        headers = {**self._headers(wanted), "content-type": "application/json"}
        data = await post(self._session, url + _RENDER_PATHS[asked.form], body, headers=headers)
        try:
            replies = _replies.decode(data) if data[:1] == b"[" else [_reply.decode(data)]
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise NoTokens(Unread.UNAVAILABLE, f"{url} renders something else: {exc}") from exc
        if any(reply.features for reply in replies):
            raise NoTokens(Unread.MEDIA)
        return await self._blocks([bytes(reply.token_ids) for reply in replies], wanted)

    async def _blocks(self, raw: list[bytes], wanted: Wanted) -> Tokenised:
        """Blocks of the JSON lists that came back; long ones are read elsewhere."""
        ids = raw[0] if len(raw) == 1 else b"[" + b",".join(raw) + b"]"
        try:
            if len(ids) > LARGE_BYTES:
                return await self._workers.read_ids(ids, wanted)
            prompts = prompts_in(ids)
            if prompts is None:
                raise NoTokens(Unread.UNAVAILABLE, "the answer holds no token ids")
            return tokenised(prompts, wanted)
        except (ValueError, BadIds) as exc:
            raise NoTokens(Unread.UNAVAILABLE, f"the answer holds odd token ids: {exc}") from exc

    def _headers(self, wanted: Wanted) -> dict[str, str]:
        passed_on = bool(wanted.authorization) and not self._has_key
        return {"authorization": wanted.authorization} if passed_on else {}

    def _failed(self, why: str, *, counts: bool = True) -> None:
        """A call failed; a client whose key is refused says nothing about the engine."""
        if counts and self._breaker.failed(self._clock()):
            log.warning("prompts are placed by load and length, the engine's tokenizer does not answer: %s", why)


def questions_of(asked: Asked, engine: Engine) -> list[dict[str, Any]]:
    """Bodies for `/tokenize`, one for each text. Raises `NoTokens`."""
    options = dict(asked.options)
    named: dict[str, Any] = {"model": asked.name} if asked.name else {}
    if asked.form is Form.TEXT:
        return [{**named, "prompt": text, **options} for text in _texts(asked.prompt)]
    choice = options.pop("tool_choice", None)
    if isinstance(choice, dict) and engine == "sglang":
        raise NoTokens(Unread.FORM, "a named tool")
    effort = options.pop("reasoning_effort", None)
    if effort is not None:
        own = options.get("chat_template_kwargs")
        options["chat_template_kwargs"] = {"reasoning_effort": effort, **(own if isinstance(own, dict) else {})}
    messages: Any = msgspec.Raw(asked.messages)
    tools: Any = msgspec.Raw(asked.tools) if asked.form is Form.TOOLS else None
    if asked.form in (Form.RESPONSES, Form.MESSAGES):
        said = conversation_of(asked)
        messages, tools = said.messages, said.tools
    question = {**named, "messages": messages, **options}
    if tools is not None and not (engine == "sglang" and choice == "none"):
        question["tools"] = tools
    return [question]


def _texts(prompt: bytes) -> list[msgspec.Raw]:
    """The texts of a prompt as the client wrote them, which takes no decoding."""
    if prompt.startswith(b'"'):
        return [msgspec.Raw(prompt)]
    try:
        texts = _raws.decode(prompt)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise NoTokens(Unread.FORM, "neither a text nor a few of them") from exc
    if not 1 <= len(texts) <= MOST_TEXTS or not all(bytes(memoryview(text)[:1]) == b'"' for text in texts):
        raise NoTokens(Unread.FORM, "not a few texts")
    return texts


async def tokenize(
    session: aiohttp.ClientSession, url: str, question: dict[str, Any], *, headers: dict[str, str] | None = None
) -> bytes:
    """JSON list of the tokens `url` makes of a question. Raises `NoTokens`; sets no time limit."""
    headers = {**(headers or {}), "content-type": "application/json"}
    try:
        asked = _encode(question)
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:  # half a surrogate pair, for one
        raise NoTokens(Unread.FORM, f"a prompt that cannot be asked about: {type(exc).__name__}") from exc
    data = await post(session, f"{url}/tokenize", asked, headers=headers)
    try:
        raw = bytes(_reply.decode(data).tokens)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise NoTokens(Unread.UNAVAILABLE, f"{url}/tokenize answers something else: {exc}") from exc
    if not raw.startswith(b"["):
        raise NoTokens(Unread.UNAVAILABLE, f"{url}/tokenize answers without tokens")
    return raw


async def post(session: aiohttp.ClientSession, url: str, data: bytes, *, headers: dict[str, str]) -> bytes:
    """The body of a good answer. Raises `NoTokens`; sets no time limit."""
    try:
        async with session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            body, status = await _whole(response, url), response.status
    except (aiohttp.ClientError, OSError) as exc:
        raise NoTokens(Unread.UNAVAILABLE, f"{url}: {exc or type(exc).__name__}") from exc
    if status == 200:
        return body
    if status in (401, 403):
        raise NoTokens(Unread.UNAUTHORISED, f"{url} answered {status}; api_key_env names the key to use")
    if status in (400, 422):
        raise NoTokens(Unread.FORM, f"{url} answered {status}")
    raise NoTokens(Unread.FAILED if status == 500 else Unread.UNAVAILABLE, f"{url} answered {status}")


async def _whole(response: aiohttp.ClientResponse, url: str) -> bytes:
    """An answer's body, unless it is longer than any list of ids."""
    whole = bytearray()
    async for piece in response.content.iter_any():
        whole += piece
        if len(whole) > LONGEST_ANSWER_BYTES:
            raise NoTokens(Unread.UNAVAILABLE, f"{url} does not stop answering")
    return bytes(whole)
