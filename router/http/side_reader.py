"""What the relay learns from an answer as it passes: its id, its first token, its usage, an error inside a 200.

Model     a reader sees a copy of the body in arbitrary pieces and keeps a bounded part of it: of a stream the
          unfinished event until the first token, and the last 16 KiB; of any other answer up to 256 KiB
Valid     UTF-8 JSON, plain or in server-sent events with LF, CRLF or CR line ends
Blind to  usage further than 16 KiB from a stream's end, or in a longer answer: unknown, not zero
Source    WHATWG HTML, server-sent events; usage and error objects of OpenAI, Anthropic, vLLM and SGLang
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

_TAIL_BYTES = 16 * 1024  # of a stream, kept for its usage; thousands of streams hold one each
_EVENT_BYTES = 64 * 1024  # of an unfinished first event; an error object is never that long
_JSON_BYTES = 256 * 1024
_MOST_TOKENS = 2**31
# Events that open a stream, or a part of one, before any of its output (Responses and Messages APIs).
_OPENING = (
    *(b"response.created", b"response.queued", b"response.in_progress", b"response.output_item.added"),
    *(b"response.content_part.added", b"message_start", b"content_block_start", b"ping"),
)
_OPENING_NAMES = frozenset(_OPENING)
_OPENING_TYPES = tuple(b'"%b"' % name for name in _OPENING)
_OPENING_BYTES = 256  # where an event has no name, its type stands near its start
_ID_BYTES = 4096  # of a JSON answer, where its id stands
_STORED_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,250})"')
_ANY_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,250})"')
_DATA = b"\ndata:"
_LAST_EVENTS = 8  # looked at when a stream ends: usage, an error and [DONE] are among them


@dataclass(slots=True)
class Learned:
    """Read from an answer's end. Unknown stays None."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    stream_error: bool = False
    events: int = field(default=0, compare=False)  # of a stream, from its first token on: counted, not said


HeardId = Callable[[bytes], object]  # told an answer's id, at most once, as soon as it has come


class SideReader(Protocol):
    """Reads along. It may raise on anything; the relay then goes on without it."""

    def feed(self, piece: bytes) -> bool:
        """Take the next body bytes. True once, when the first token has arrived."""
        ...

    def learned(self) -> Learned:
        """What the whole answer said; asked for once, after its last byte."""
        ...


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None  # Responses and Messages APIs, from here on
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None

    def fill(self, learned: Learned) -> None:
        """Add what is still unknown."""
        if learned.prompt_tokens is None:
            learned.prompt_tokens = _count(self.input_tokens if self.prompt_tokens is None else self.prompt_tokens)
        if learned.output_tokens is None:
            said = self.output_tokens if self.completion_tokens is None else self.completion_tokens
            learned.output_tokens = _count(said)
        if learned.cached_tokens is None:
            details = self.prompt_tokens_details or self.input_tokens_details
            learned.cached_tokens = _count(self.cache_read_input_tokens if details is None else details.cached_tokens)


class _Meta(msgspec.Struct):
    """Usage in SGLang's own API, which counts up from chunk to chunk."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def fill(self, learned: Learned) -> None:
        """Add what is still unknown."""
        if learned.prompt_tokens is None:
            learned.prompt_tokens = _count(self.prompt_tokens)
        if learned.output_tokens is None:
            learned.output_tokens = _count(self.completion_tokens)
        if learned.cached_tokens is None:
            learned.cached_tokens = _count(self.cached_tokens)


class _Inner(msgspec.Struct):
    """The answer inside an event that wraps it."""

    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    object: str | None = None
    response: _Inner | None = None  # Responses API
    message: _Inner | str | None = None  # Messages API; a text in the flat form of errors
    meta_info: _Meta | None = None  # SGLang's own API

    def is_error(self) -> bool:
        inner = self.response.error if self.response is not None else b""
        return self.object == "error" or _says(self.error) or _says(inner)

    def fill(self, learned: Learned) -> None:
        """Add what is still unknown, from wherever this API puts its usage."""
        if self.usage is not None:
            self.usage.fill(learned)
        if self.meta_info is not None:
            self.meta_info.fill(learned)
        for part in (self.response, self.message):
            if isinstance(part, _Inner) and part.usage is not None:
                part.usage.fill(learned)


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    finish_reason: Any = None

    @property
    def opens(self) -> bool:
        """Whether it says whose turn it is, and nothing else."""
        delta = self.delta
        if delta is None or "role" not in delta or self.finish_reason is not None:
            return False
        return not any(value for key, value in delta.items() if key != "role")


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None


_decode = msgspec.json.Decoder(_Answer).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamReader:
    """Reads a stream of server-sent events."""

    __slots__ = ("_awaiting_token", "_events", "_first", "_tail")

    def __init__(self, heard_id: HeardId | None = None) -> None:
        self._awaiting_token = True
        self._events = 0  # data lines so far; those before the first token are taken off when it comes
        self._first = FirstEvent(heard_id)
        self._tail = bytearray(b"\n")  # so that the first line follows a line end too

    def feed(self, piece: bytes) -> bool:
        tail = self._tail
        before = len(tail)
        tail += piece
        self._events += tail.count(_DATA, max(0, before - len(_DATA) + 1))  # also one that the cut split
        is_first = self._awaiting_token and self._first.seen_in(piece)
        if is_first:
            self._awaiting_token = False
            self._events -= self._first.passed
        if len(tail) > 2 * _TAIL_BYTES:  # trimmed in big steps, so that a piece costs an append
            del tail[:-_TAIL_BYTES]
        return is_first

    def learned(self) -> Learned:
        learned = Learned()
        tail = bytes(self._tail[-_TAIL_BYTES:])
        if _tells(tail):
            for event in reversed(_events(tail)[-_LAST_EVENTS:]):
                _read_event(event, learned)
        done = tail.count(b"\ndata: [DONE]")
        learned.events = 0 if self._awaiting_token else max(1, self._events - done)
        return learned


class FirstEvent:
    """Finds the end of the first event that carries output.

    No comment does, nor [DONE], an error object, or what opens an answer: its role, its id, its first part.
    """

    __slots__ = ("_data", "_heard_id", "_line", "_name", "passed")

    def __init__(self, heard_id: HeardId | None = None) -> None:
        self.passed = 0  # data lines of events that were passed over
        self._heard_id = heard_id
        self._name = b""  # of the unfinished event
        self._line = bytearray()  # the unfinished line
        self._data: list[bytes] = []  # data lines of the unfinished event

    def seen_in(self, piece: bytes) -> bool:
        """Take the next bytes. True when they complete such an event, or fill the limit without an end."""
        line_may_end = b"\n" in piece or b"\r" in piece or self._line.endswith(b"\r")
        self._line += piece
        if line_may_end:
            for text in self._finished_lines():
                if self._ends_event(text):
                    return True
        return len(self._line) + sum(map(len, self._data)) > _EVENT_BYTES and self._holds_data()

    def _finished_lines(self) -> list[bytes]:
        """Take all whole lines off. A CR at the very end may be half of a CRLF, so it waits."""
        lines = bytes(self._line).splitlines(keepends=True)
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        self._line = bytearray(rest)
        return [line.rstrip(b"\r\n") for line in lines]

    def _ends_event(self, line: bytes) -> bool:
        if line.startswith(b"data:"):
            self._data.append(line[5:].strip())
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()
        elif not line:
            name, self._name = self._name, b""
            lines = len(self._data)
            if lines:
                data, self._data = b"\n".join(self._data), []
                self._look_for_id(data)
                if data != b"[DONE]" and not _opens(name, data) and not _is_error(data):
                    return True
                self.passed += lines
        return False

    def _look_for_id(self, data: bytes) -> None:
        if self._heard_id is not None and (found := id_in(data)):
            self._heard_id(found)
            self._heard_id = None

    def _holds_data(self) -> bool:
        """Whether an event over the limit carries data; any other line that long is dropped."""
        if self._data or self._line.startswith(b"data:"):
            return True
        self._line.clear()
        return False


class JsonReader:
    """Reads an answer that is one JSON object."""

    __slots__ = ("_body", "_heard_id", "_too_long")

    def __init__(self, heard_id: HeardId | None = None) -> None:
        self._body = bytearray()
        self._heard_id = heard_id
        self._too_long = False

    def feed(self, piece: bytes) -> bool:
        if self._too_long or len(self._body) + len(piece) > _JSON_BYTES:
            self._look_for_id(bytes(self._body[:_ID_BYTES]) + piece[:_ID_BYTES])
            self._too_long = True
            self._body.clear()
        else:
            self._body += piece
        return False

    def learned(self) -> Learned:
        learned = Learned()
        if self._heard_id is not None:
            self._look_for_id(bytes(self._body[:_ID_BYTES]))
        if self._body[:1] == b"{" and _tells(self._body):  # a batch is a list, without sums
            _decode(self._body).fill(learned)
        return learned

    def _look_for_id(self, beginning: bytes) -> None:
        heard_id, self._heard_id = self._heard_id, None
        if heard_id is not None and (found := id_in(beginning)):
            heard_id(found)


def id_in(beginning: bytes) -> bytes:
    """The id an answer gives itself, from its first bytes; b"" when they hold none.

    A stored response's is looked for first: other ids may stand before it. Quotes inside texts are escaped, so no text
    can be taken for it.

    >>> id_in(b'{"type":"response.created","response":{"id":"resp_1","tools":[]}}')
    b'resp_1'
    """
    found = _STORED_ID.search(beginning) or _ANY_ID.search(beginning)
    return found[1] if found is not None else b""


def _count(said: int | None) -> int | None:
    """A number of tokens; what cannot be one is unknown."""
    return said if said is not None and 0 <= said <= _MOST_TOKENS else None


def _tells(data: bytes | bytearray) -> bool:
    """Whether anything in there can be of interest."""
    return b'"usage"' in data or b'"error"' in data or b'"meta_info"' in data


def _events(tail: bytes) -> list[bytes]:
    """Data of each event, the first possibly cut."""
    text = tail.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return [_data_of(event) for event in text.split(b"\n\n")]


def _data_of(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def _read_event(data: bytes, learned: Learned) -> None:
    """Later events are read first, so an earlier one only fills what they left open."""
    if not _tells(data):
        return
    try:
        answer = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return  # cut by the tail's limit, or not ours to understand
    learned.stream_error = learned.stream_error or answer.is_error()
    answer.fill(learned)


def _opens(name: bytes, data: bytes) -> bool:
    """Whether an event comes before any output of the answer, or of one part of it."""
    if name in _OPENING_NAMES or any(mark in data[:_OPENING_BYTES] for mark in _OPENING_TYPES):
        return True
    if b'"choices"' not in data or (b'"role"' not in data and b"[]" not in data):
        return False
    try:
        choices = _decode_chunk(data).choices
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return choices is not None and all(choice.opens for choice in choices)


def _is_error(data: bytes) -> bool:
    if b'"error"' not in data:
        return False
    try:
        return _decode(data).is_error()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _says(error: msgspec.Raw | bytes) -> bool:
    """Whether an `error` member is there and not null."""
    return bytes(error) not in (b"", b"null")
