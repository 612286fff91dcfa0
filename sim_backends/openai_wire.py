"""Request bodies, answers, stream events and errors as vLLM 0.33 speaks them, and where SGLang differs.

Source    vLLM's OpenAI-compatible server: /v1/completions, /v1/chat/completions, /tokenize; recorded streams and
          error bodies of both engines
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sim_backends.directives import Directive, Path

FILLER = " tok"  # text of every output token; a token that ends by itself has none, as an end-of-sequence token has
_DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens


class ApiError(Exception):
    """An answer with an error object. `kind` is the object's `type`; `retry_after_s` becomes a header."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def body(self, *, flat: bool = False) -> bytes:
        """The nested form of vLLM 0.10.2 and newer, or the flat one of SGLang and older vLLM."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"object": "error", **error} if flat else {"error": error})


def bad_request(message: str, *, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param=param)


_OVERLOADED = {
    429: ("TooManyRequestsError", "Too many requests."),
    500: ("InternalServerError", "Internal server error"),
    503: ("Service Unavailable", "The engine is currently busy"),
}


def failure(status: int, *, sglang: bool, retry_after_s: int | None) -> ApiError:
    """What a failing engine of that flavour answers with `status` 429, 500 or 503."""
    kind, message = _OVERLOADED[status]
    if sglang:
        kind = str(status)
        message = "The request queue is full." if status == 503 else message
    return ApiError(status, kind, message, retry_after_s=retry_after_s)


TokenId = Annotated[int, msgspec.Meta(ge=0)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class SimDirective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Field `sim_directive`: how this prompt's state gets to a simulated replica, see `directives.Directive`."""

    path: Path = Path.LOCAL
    source: str | None = None
    request_id: str | None = None
    keep: bool = False

    def directive(self, own_id: str) -> Directive:
        """As engines take it; `own_id` is what this request's state is kept under. Raises ApiError 400."""
        try:
            return Directive(self.path, self.source, self.request_id or self._default_id(own_id), self.keep)
        except ValueError as exc:
            raise bad_request(f"sim_directive: {exc}.", param="sim_directive") from exc

    def _default_id(self, own_id: str) -> str | None:
        return None if self.path is Path.HAND_OFF else own_id


class KvSource(msgspec.Struct):
    """A peer to read: host and port of its transfer socket, and a name for this read."""

    kv_request_id: str
    remote_host: str
    remote_port: int


class KvTransfer(msgspec.Struct):
    """Field `kv_transfer_params`, as far as it is simulated."""

    remote_kv_source: KvSource | None = None


class _Common(msgspec.Struct, kw_only=True):
    """Fields both generating routes share. Unknown fields are ignored, as vLLM does."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    request_id: str | None = None
    rid: str | None = None
    sim_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    sim_directive: SimDirective = SimDirective()
    kv_transfer_params: KvTransfer | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(_Common, kw_only=True):
    prompt: msgspec.Raw


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        """The message's text. Raises ApiError for parts that are not text."""
        if isinstance(self.content, list):
            if any(part.type != "text" or part.text is None for part in self.content):
                raise bad_request("Only text parts can be simulated.", param="messages")
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class ChatBody(_Common, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


COMPLETION = msgspec.json.Decoder(CompletionBody)
CHAT = msgspec.json.Decoder(ChatBody)
TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_IDS = msgspec.json.Decoder(list[TokenId])
_TEXT = msgspec.json.Decoder(str)
_MANY = msgspec.json.Decoder(list[str | list[TokenId]])


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """The body, checked. Raises ApiError 400 for broken JSON and for wrong types."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise bad_request(f"Invalid request body: {exc}") from exc
    except msgspec.DecodeError as exc:
        raise bad_request(f"JSON decode error: {exc}") from exc


def decode_prompt(raw: msgspec.Raw) -> str | list[int]:
    """One prompt: a string, a list of ids, or a list holding one of these. Raises ApiError 400."""
    text = bytes(raw)
    if text[:1] == b'"':
        return str(decode(_TEXT, text))
    try:
        return _IDS.decode(text)
    except msgspec.DecodeError:
        pass
    try:
        many = _MANY.decode(text)
    except msgspec.DecodeError as exc:
        raise bad_request(
            "prompt must be a string, a list of token ids, or a list of one such prompt.", param="prompt"
        ) from exc
    if len(many) != 1:
        raise bad_request(f"This simulated server answers one prompt a request, not {len(many)}.", param="prompt")
    return many[0]


def output_limit(body: CompletionBody | ChatBody, *, room_tokens: int) -> int:
    """The client's limit on output tokens, or the route's default. Raises ApiError 400 for a limit below 1."""
    asked = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    if asked is None:
        return max(1, room_tokens) if isinstance(body, ChatBody) else _DEFAULT_COMPLETION_TOKENS
    if asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", param="max_tokens")
    return asked


def usage(*, prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    """The usage object; `cached` None leaves prompt_tokens_details out."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one answer that its tokens do not change."""

    answer_id: str
    created: int
    model: str
    chat: bool


def _event(shape: Shape, choices: list[dict[str, Any]], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if shape.chat else "text_completion"
    head = {"id": shape.answer_id, "object": kind, "created": shape.created, "model": shape.model}
    return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"


def _choice(shape: Shape, text: str, reason: str | None) -> dict[str, Any]:
    if shape.chat:
        return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}


class StreamText:
    """The events of one stream, encoded once: a token costs a look-up and not an encoding."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        more: dict[str, Any] = {} if shape.chat else {"usage": None}
        self.token = _event(shape, [_choice(shape, FILLER, None)], **more)
        self.opening = b""
        if shape.chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            self.opening = _event(shape, [role])

    def last(self, reason: str) -> bytes:
        """The event of the last token."""
        text = "" if reason == "stop" else FILLER
        more: dict[str, Any] = {} if self._shape.chat else {"usage": None}
        return _event(self._shape, [_choice(self._shape, text, reason)], **more)

    def usage(self, counts: dict[str, Any]) -> bytes:
        return _event(self._shape, [], usage=counts)


DONE = b"data: [DONE]\n\n"


def whole(shape: Shape, *, tokens: int, reason: str, counts: dict[str, Any]) -> bytes:
    """The body of an answer that is not streamed."""
    text = FILLER * (tokens - 1 if reason == "stop" else tokens)
    choice: dict[str, Any] = {"index": 0}
    if shape.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": reason, "stop_reason": None}
    return msgspec.json.encode(
        {
            "id": shape.answer_id,
            "object": "chat.completion" if shape.chat else "text_completion",
            "created": shape.created,
            "model": shape.model,
            "choices": [choice],
            "usage": counts,
        }
    )
