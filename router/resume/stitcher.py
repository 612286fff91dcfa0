"""The second answer's events, rewritten so that the client sees one stream.

Model     names (`id`, `created`, `model`) become the first answer's, a second role is taken out, usage is put together.
          Only those bytes change: every other one of an event stays as the replica sent it
Valid     the answer to a `Continuation` of the same log; LF or CRLF line ends
          completion_tokens are exact where the log's are, or where the prompt's own length is known; else they are the
          least that can have been sent, and prompt_tokens the most. Their sum is right up to how the joint is tokenised
Blind to  cached_tokens of the first answer, which died before it said them: they become null, which is not zero
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.prompts.scan import finished, spans_of
from router.resume.continuation import Rest
from router.resume.events import DONE, EventSplitter, data_of
from router.resume.log import StreamLog
from router.resume.reasons import WhyNot

_PLACES = frozenset({"id", "created", "model", "choices", "usage", "prompt_token_ids"})
_LARGEST_COUNT = 2**31


class _Chunk(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None


_chunk = msgspec.json.Decoder(_Chunk)
_encode = msgspec.json.Encoder().encode


def broken_event(why_not: WhyNot | None = None) -> bytes:
    """The last event before a visible cut. No end marker follows it.

    why_not : what kept the stream from going on; None: no other replica could take it
    """
    reason = "no other replica could continue it" if why_not is None else f"it cannot be continued ({why_not.value})"
    message = f"The replica failed during this stream, and {reason}."
    error = {"message": message, "type": "StreamBroken", "param": why_not and why_not.value, "code": 502}
    return b"data: %b\n\n" % _encode({"error": error})


class Stitcher:
    """Rewrites one further answer. Made before the log sees any of it; the log is fed what this returns."""

    __slots__ = (
        "_names",
        "_prompt_tokens",
        "_rest",
        "_role_sent",
        "_sent_any",
        "_splitter",
        "_tokens",
        "_tokens_exact",
        "_unseen",
    )

    def __init__(self, log: StreamLog, rest: Rest, *, prompt_tokens: int | None = None) -> None:
        """prompt_tokens : of the client's own prompt, if it was counted; None: unknown"""
        self._names = dict(log.names)
        self._role_sent = log.role_sent
        self._tokens = log.tokens
        self._tokens_exact = log.tokens_exact
        self._unseen = int(log.unseen_end)  # counted, but not in the prompt that goes on
        self._sent_any = log.text != "" or log.tokens > 0
        self._rest = rest
        self._prompt_tokens = len(log.prompt_ids) if log.prompt_ids is not None else prompt_tokens
        self._splitter = EventSplitter()

    def feed(self, piece: bytes) -> bytes:
        """The next bytes of the further answer's body; returns whole events for the client."""
        return b"".join(map(self._rewritten, self._splitter.feed(piece)))

    def end(self) -> bytes:
        """What is held when the further answer ends well. When it breaks, that is dropped."""
        held, self._splitter.held = self._splitter.held, b""
        return held

    def _rewritten(self, event: bytes) -> bytes:
        data = data_of(event)
        if not data or data == DONE:
            return event
        try:
            chunk = _chunk.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return event  # not ours to understand: the log stops at it
        if chunk.choices is None:
            return event
        values = self._values(chunk)
        return b"" if values is None else _with(event, data, values)

    def _values(self, chunk: _Chunk) -> dict[str, bytes] | None:
        """New JSON of members, for those the event has; None: the client does not get the event."""
        values = dict(self._names)
        if self._sent_any:
            values["prompt_token_ids"] = b"null"
        if chunk.usage is not None:
            values["usage"] = _encode(self._usage(chunk.usage))
        if not chunk.choices:
            return values
        choices = self._choices(chunk.choices)
        if not choices and chunk.usage is None:
            return None
        if choices != chunk.choices:
            values["choices"] = _encode(choices)
        return values

    def _choices(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._rest is Rest.USAGE:
            return []
        if self._rest is Rest.FINISH:
            return [_finish_alone(choice) for choice in choices if choice.get("finish_reason") is not None]
        kept = [self._without_opening(choice) for choice in choices]
        return [choice for choice in kept if choice is not None]

    def _without_opening(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """A choice without what only the first answer says; None when nothing else is in it."""
        if self._sent_any and choice.get("prompt_token_ids") is not None:
            choice = {**choice, "prompt_token_ids": None}
        delta = choice.get("delta")
        if not self._role_sent or not isinstance(delta, dict) or "role" not in delta:
            return choice
        rest = {key: value for key, value in delta.items() if key != "role"}
        if choice.get("finish_reason") is None and not any(rest.values()) and not choice.get("token_ids"):
            return None
        return {**choice, "delta": rest}

    def _usage(self, said: dict[str, Any]) -> dict[str, Any]:
        """One usage of both answers; what cannot be read stays as it was said."""
        prompt, output = _count(said.get("prompt_tokens")), _count(said.get("completion_tokens"))
        if not self._sent_any or prompt is None or output is None:
            return said
        sent = self._tokens
        if not self._tokens_exact and self._prompt_tokens is not None:
            sent = max(sent, prompt - self._prompt_tokens + self._unseen)
        own = max(0, prompt - sent + self._unseen) if self._prompt_tokens is None else self._prompt_tokens
        made = sent + (output if self._rest is Rest.TEXT else 0)
        joined = said | {"prompt_tokens": own, "completion_tokens": made, "total_tokens": own + made}
        return joined | {"prompt_tokens_details": None} if "prompt_tokens_details" in said else joined


def _finish_alone(choice: dict[str, Any]) -> dict[str, Any]:
    """A last event without its token: the limit was reached before it, which is what it says."""
    done = {**choice, "finish_reason": "length"}
    if "text" in done:
        done["text"] = ""
    if "delta" in done:
        done["delta"] = {"content": ""}
    for key in ("stop_reason", "token_ids", "prompt_token_ids", "matched_stop"):
        if key in done:
            done[key] = [] if key == "token_ids" else None
    return done


def _with(event: bytes, data: bytes, values: dict[str, bytes]) -> bytes:
    """The event with those members; it is left alone when its data is spread over lines."""
    start = event.find(data)
    if start < 0:
        return event
    parts, at = [event[:start]], 0
    for (first, last), key in sorted((span, key) for key, span in finished(spans_of(data, _PLACES)).items()):
        if key in values:
            parts += (data[at:first], values[key])
            at = last
    return b"".join((*parts, data[at:], event[start + len(data) :]))


def _count(value: Any) -> int | None:
    """A number of tokens; None for whatever cannot be one."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT
    return value if is_count else None
