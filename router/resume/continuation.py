"""Whether a stream could go on from another replica, and the body that makes it do so.

Model     what was sent becomes prompt: text behind the text of a prompt, ids behind its ids, in a conversation the
          beginning of an assistant's message that is to be continued. Limits shrink by the tokens sent. Every other
          byte of the body stays as the client wrote it
Valid     vLLM and SGLang, /v1/completions and /v1/chat/completions
Blind to  a tokenizer that cuts prompt and sent text differently where they meet: with text the next replica may see
          other ids than the first one made, with ids never
Source    `continue_final_message` and `add_generation_prompt` of vLLM (it refuses both being true) and SGLang (renders
          the turns before, then adds the text); their default of 16 tokens on /v1/completions
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from router.http.splice import Edit, spliced
from router.prompts.scan import Span, finished, spans_of
from router.resume.log import StreamLog
from router.resume.reasons import WhyNot

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_DEFAULT_COMPLETION_TOKENS = 16
_STRUCTURED = ("structured_outputs", "json_schema", "regex", "ebnf", "structural_tag")
_GUIDED = tuple(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar", "json_object"))
_TRANSFER = ("kv_transfer_params", "bootstrap_host", "bootstrap_room")
_OF_IDS = b"0123456789, \t\r\n"
_MARKS_OF_THOUGHT = ("<think>", "</think>")
_EDITED = frozenset(
    {"prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens"}
    | {"continue_final_message", "add_generation_prompt"}
)


class _Asked(msgspec.Struct):
    """What decides it, whatever the types; null is the same as absent."""

    stream: Any = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    suffix: Any = None
    tools: Any = None
    functions: Any = None
    tool_choice: Any = None
    audio: Any = None
    modalities: Any = None
    stream_options: Any = None
    stop: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = None
    stop_regex: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    truncate_prompt_tokens: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    prompt_embeds: Any = None
    input_embeds: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    kv_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_room: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()

    @property
    def wants_usage(self) -> bool:
        return isinstance(self.stream_options, dict) and self.stream_options.get("include_usage") is True

    @property
    def limit(self) -> int | None:
        for limit in (self.max_completion_tokens, self.max_tokens):
            if _is_count(limit):
                return int(limit)
        return None

    @property
    def stops(self) -> list[str]:
        stops = self.stop if isinstance(self.stop, list) else [self.stop]
        return [stop for stop in stops if isinstance(stop, str) and stop]


_asked = msgspec.json.Decoder(_Asked)
_encode = msgspec.json.Encoder().encode
_ids = msgspec.json.Decoder(list[int])


class Rest(StrEnum):
    """What of the answer the client still lacks."""

    NOTHING = "nothing"
    DONE = "done"  # the end marker alone: nobody needs to be asked
    USAGE = "usage"  # text and finish reason are there
    FINISH = "finish"  # all tokens that were allowed are there, the event that says so is not
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What another replica is to be asked. body : empty when `rest` needs nobody"""

    body: bytes
    rest: Rest


def why_not_of_request(path: str, body: bytes) -> WhyNot | None:
    """Why a stream of this request could not go on elsewhere; None when it could. A seed or a temperature is no
    reason: the rest is drawn anew, behind the same beginning.

    path : without its query
    """
    if path not in (COMPLETIONS, CHAT):
        return WhyNot.API
    try:
        asked = _asked.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return WhyNot.BODY
    for why_not, found in _findings(asked):
        if found:
            return why_not
    if path == COMPLETIONS and not _is_one_prompt(asked.prompt):
        return WhyNot.PROMPT_FORM
    return WhyNot.BODY if path == CHAT and bytes(asked.messages)[:1] != b"[" else None


def _findings(asked: _Asked) -> list[tuple[WhyNot, bool]]:
    """Every reason with whether the request gives it, the plainest first."""
    given = {name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False, 0, "", [], {})}
    options = asked.stream_options if isinstance(asked.stream_options, dict) else {}
    logprobs = (asked.logprobs, asked.prompt_logprobs)  # 0 asks for those of the chosen tokens
    limits = (asked.max_tokens, asked.max_completion_tokens, asked.min_tokens)  # engines take "9" and 9.0 for 9 too
    plain_format = asked.response_format in (None, {"type": "text"})
    return [
        (WhyNot.NOT_A_STREAM, asked.stream is not True),
        (WhyNot.TOOLS, bool(given & {"tools", "functions"}) and asked.tool_choice != "none"),
        (WhyNot.LOGPROBS, any(wish is not None and wish is not False for wish in logprobs)),
        (WhyNot.SEVERAL_CHOICES, asked.n not in (None, 1) or asked.best_of not in (None, 1)),
        (WhyNot.SEVERAL_CHOICES, "use_beam_search" in given),
        (WhyNot.STRUCTURED, not plain_format or bool(given & {*_STRUCTURED, *_GUIDED})),
        (WhyNot.ECHO, "echo" in given),
        (WhyNot.SUFFIX, "suffix" in given),
        (WhyNot.AUDIO, "audio" in given or asked.modalities not in (None, ["text"])),
        (WhyNot.RUNNING_USAGE, options.get("continuous_usage_stats") not in (None, False)),
        (WhyNot.PROMPT_FORM, bool(given & {"prompt_embeds", "input_embeds"})),
        (WhyNot.TRUNCATION, "truncate_prompt_tokens" in given),
        (WhyNot.PENALTIES, bool(given & {"presence_penalty", "frequency_penalty"})),
        (WhyNot.TRANSFER, bool(given & set(_TRANSFER))),
        (WhyNot.STOP_AT_CUT, "stop_regex" in given),  # how much of it has matched cannot be told
        (WhyNot.BODY, any(limit is not None and not _is_count(limit) for limit in limits)),
        (WhyNot.CONTINUES, "continue_final_message" in given or asked.add_generation_prompt is False),
    ]


def why_not_of_sent(path: str, body: bytes, log: StreamLog, *, template_strips: bool = True) -> WhyNot | None:
    """Why what was sent cannot be gone on from. Ask when a stream breaks, of a request that could be resumed.

    A stop string may straddle the cut: the next replica looks for it in its own output alone, and would not see it.
    """
    if log.why_not is not None or log.finished:
        return log.why_not
    text, asked = log.text, _asked.decode(body)
    if any(_ends_with_beginning(text, stop) for stop in asked.stops):
        return WhyNot.STOP_AT_CUT
    if path != CHAT:
        needs_ids = bytes(asked.prompt)[:1] == b"[" and text != ""
        return WhyNot.IDS_UNKNOWN if needs_ids and log.ids is None else None
    if any(mark in text for mark in _MARKS_OF_THOUGHT):
        return WhyNot.REASONING
    return WhyNot.SPACE_AT_EDGE if template_strips and text != text.strip() else None


def continuation(path: str, body: bytes, log: StreamLog) -> Continuation:
    """What another replica is to be asked, once neither `why_not_of_request` nor `why_not_of_sent` speaks against it.

    body : as the first replica got it, so with the usage the router may have asked for

    Raises
    ------
    ValueError : the body is not one JSON object
    """
    asked = _asked.decode(body)
    rest = _rest(path, asked, log)
    if rest in (Rest.NOTHING, Rest.DONE):
        return Continuation(b"", rest)
    spans = finished(spans_of(body, _EDITED))
    edits = [*_limits(path, asked, spans, body, log, rest), *_prompt(path, spans, body, log)]
    return Continuation(spliced(body, edits), rest)


def _rest(path: str, asked: _Asked, log: StreamLog) -> Rest:
    if log.done:
        return Rest.NOTHING
    if log.finished:
        return Rest.USAGE if asked.wants_usage and not log.usage_sent else Rest.DONE
    limit = _limit(path, asked)
    return Rest.FINISH if limit is not None and log.tokens >= limit else Rest.TEXT


def _limit(path: str, asked: _Asked) -> int | None:
    return _DEFAULT_COMPLETION_TOKENS if asked.limit is None and path == COMPLETIONS else asked.limit


def _limits(path: str, asked: _Asked, spans: dict[str, Span], body: bytes, log: StreamLog, rest: Rest) -> list[Edit]:
    """Limits without what was sent; a single token where only the end of the answer is wanted."""
    limit = _limit(path, asked)
    wanted: dict[str, bytes] = {}
    if rest is not Rest.TEXT:
        wanted["max_tokens"] = b"1"
    elif limit is not None and log.tokens:
        wanted["max_tokens"] = b"%d" % (limit - log.tokens)
    if "max_tokens" in wanted and _is_count(asked.max_completion_tokens):
        wanted["max_completion_tokens"] = wanted["max_tokens"]
        if not _is_count(asked.max_tokens):
            del wanted["max_tokens"]
    if _is_count(asked.min_tokens) and (log.tokens or rest is not Rest.TEXT):
        left = asked.min_tokens - log.tokens if rest is Rest.TEXT else 0
        wanted["min_tokens"] = b"%d" % max(0, left)
    return _set(body, spans, wanted)


def _prompt(path: str, spans: dict[str, Span], body: bytes, log: StreamLog) -> list[Edit]:
    """The sent output behind the prompt; nothing when there is none yet."""
    if not log.text and not log.token_ids:
        return []
    if path == CHAT:
        end = spans["messages"][1] - 1
        comma = b"" if body[spans["messages"][0] + 1 : end].strip() == b"" else b","
        message = comma + _encode({"role": "assistant", "content": log.text})
        if not log.text:
            return []
        flags = {"continue_final_message": b"true", "add_generation_prompt": b"false"}
        return [(end, end, message), *_set(body, spans, flags)]
    start, end = spans["prompt"]
    if log.ids is not None and (prompt_ids := _prompt_ids(body[start:end], log)) is not None:
        return [(start, end, _encode(prompt_ids + log.ids))]
    assert body[start : start + 1] == b'"', "a prompt of ids goes on from ids alone"
    return [(end - 1, end - 1, _encode(log.text)[1:-1])]


def _prompt_ids(prompt: bytes, log: StreamLog) -> list[int] | None:
    """Ids of the prompt as the first replica read it, if it said so or the client gave them."""
    return _ids.decode(prompt) if prompt.startswith(b"[") else log.prompt_ids


def _set(body: bytes, spans: dict[str, Span], values: dict[str, bytes]) -> list[Edit]:
    """Members with those values: in place where the body has them, else at the front of the object."""
    edits = [(*spans[key], value) for key, value in values.items() if key in spans]
    new = b"".join(b'"%b":%b,' % (key.encode(), value) for key, value in values.items() if key not in spans)
    front = body.index(b"{") + 1
    return [*edits, (front, front, new)] if new else edits


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_one_prompt(prompt: msgspec.Raw) -> bool:
    """Whether it is one text, or one list of ids; decoding a long list only for that would hold the loop.

    >>> [_is_one_prompt(msgspec.Raw(raw)) for raw in (b'"a"', b"[1, 2]", b"[]", b'["a"]', b"[[1]]")]
    [True, True, False, False, False]
    """
    raw = bytes(prompt)
    if raw[:1] != b"[":
        return raw[:1] == b'"'
    inside = raw[1:-1].strip()
    return inside != b"" and not inside.translate(None, _OF_IDS)


def _ends_with_beginning(text: str, stop: str) -> bool:
    """Whether `text` ends with a beginning of `stop` that is not all of it.

    >>> _ends_with_beginning("one\\n", "\\n\\n"), _ends_with_beginning("one", "\\n\\n")
    (True, False)
    """
    return any(text.endswith(stop[:length]) for length in range(1, len(stop)))
