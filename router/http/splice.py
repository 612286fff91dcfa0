"""Edits of a body that leave every other byte as it came, and the matching cut in the answer.

Model     the place of one value is found by scanning the outermost object; its bytes are replaced, the rest is copied.
          Of equal keys the last one counts, for engines as for Python, so that one is replaced
Valid     UTF-8 JSON objects; whatever is anything else is left alone, for the engine to refuse
Blind to  what engines do beside the asked: with usage on, some add `"usage": null` to every other event
Source    RFC 8259; `stream_options` of OpenAI's API; WHATWG HTML, server-sent events
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable

import msgspec

from router.prompts.scan import Span, finished, spans_of

EDIT_FIELDS = frozenset({"model", "stream", "stream_options"})
_INCLUDE = frozenset({"include_usage"})
_USAGE_WISH = b'{"include_usage":true}'
_MOST_HELD_BYTES = 64 * 1024  # of an unfinished event: a usage object has some hundred
_EMPTY = re.compile(rb"[ \t\r\n]*\}")
# Atomic groups: CRLF is one line end, never a CR and an LF.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")

Edit = tuple[int, int, bytes]  # first byte to replace, the one after the last, and what comes there
Edits = Generator[None, None, "dict[str, Edit]"]


class _Chunk(msgspec.Struct):
    """What tells an event that holds usage alone."""

    choices: list[msgspec.Raw] | None = None
    usage: dict[str, msgspec.Raw] | None = None


_encode = msgspec.json.Encoder().encode
_text = msgspec.json.Decoder(str)
_chunk = msgspec.json.Decoder(_Chunk)


def edits_of(body: bytes, *, aliases: dict[str, str], asks_usage: bool) -> Edits:
    """The edits that a body needs, by the field they change; yields after each slice of a large one.

    aliases : name that clients use -> name the replicas know
    asks_usage : whether a stream is to end with its usage, although the client did not ask
    """
    try:
        spans = yield from spans_of(body, EDIT_FIELDS)
    except ValueError:
        return {}
    edits: dict[str, Edit] = {}
    if "model" in spans and (edit := renaming(body, spans["model"], aliases)) is not None:
        edits["model"] = edit
    if asks_usage and "stream" in spans and _is_true(body, spans["stream"]):
        wish = asking_usage(body, spans.get("stream_options"))
        if wish is not None:
            edits["stream_options"] = wish
    return edits


def edits_now(body: bytes, *, aliases: dict[str, str], asks_usage: bool) -> dict[str, Edit]:
    """The same at once, for bodies that are not large."""
    edits = edits_of(body, aliases=aliases, asks_usage=asks_usage)
    try:
        while True:
            next(edits)
    except StopIteration as done:
        found: dict[str, Edit] = done.value
        return found


def renaming(body: bytes, model: Span, aliases: dict[str, str]) -> Edit | None:
    """The edit that puts the replicas' name in place of an alias; None for every other name."""
    start, end = model
    try:
        name = aliases.get(_text.decode(body[start:end]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if name is None else (start, end, _encode(name))


def asking_usage(body: bytes, options: Span | None) -> Edit | None:
    """The edit that asks for a stream's usage; None when it is asked for, or the options are no object.

    options : where `stream_options` lies in the body, if it is there
    """
    if options is None:
        return _first_member(body, 0, b'"stream_options":' + _USAGE_WISH)
    start, end = options
    value = body[start:end]
    if value == b"null":
        return start, end, _USAGE_WISH
    if not value.startswith(b"{"):
        return None
    try:
        wish = finished(spans_of(value, _INCLUDE)).get("include_usage")
    except ValueError:
        return None
    if wish is None:
        return _first_member(body, start, b'"include_usage":true')
    said = start + wish[0], start + wish[1]
    return (*said, b"true") if body[said[0] : said[1]] in (b"false", b"null") else None


def with_members(body: bytes, members: dict[str, bytes]) -> bytes:
    """The body with one more member in each of these objects of it, made where they are not there.

    members : name of an object -> `"key":value`. The body's own member of that key, which comes after, counts; what is
        there and is neither an object nor null is left alone, for the engine to refuse
    """
    edits = (_into(body, name, member) for name, member in members.items())
    return spliced(body, [edit for edit in edits if edit is not None])


def _into(body: bytes, name: str, member: bytes) -> Edit | None:
    key = _encode(name)
    try:
        # Bodies are long: looked for where the name occurs. Written with escapes it comes later, and counts.
        there = finished(spans_of(body, frozenset({name}))).get(name) if key in body else None
        if there is None:
            return _first_member(body, 0, key + b":{" + member + b"}")
    except ValueError:
        return None
    start, end = there
    if body[start:end] == b"null":
        return start, end, b"{" + member + b"}"
    return _first_member(body, start, member) if body[start : start + 1] == b"{" else None


def spliced(body: bytes, edits: Iterable[Edit]) -> bytes:
    """The body with those edits made."""
    parts: list[bytes] = []
    at = 0
    for start, end, new in sorted(edits):
        parts += (body[at:start], new)
        at = end
    return b"".join((*parts, body[at:]))


def _first_member(body: bytes, start: int, member: bytes) -> Edit:
    """The edit that puts a member at the front of the object that opens at or after `start`."""
    inside = body.index(b"{", start) + 1
    return inside, inside, member if _EMPTY.match(body, inside) else member + b","


def _is_true(body: bytes, span: Span) -> bool:
    return body[span[0] : span[1]] == b"true"


class UsageSwallower:
    """Takes the event that holds usage alone (`"choices": []`) out of a stream, for a client that did not ask for it.

    Every other byte passes, in order, as soon as its event is complete. An event larger than 64 KiB passes as it comes;
    so does everything that cannot be read: a client rather sees an event too many than one too few.
    """

    __slots__ = ("_ended_by_cr", "_held", "_passing", "_swallowed_last", "swallowed")

    def __init__(self) -> None:
        self.swallowed = 0  # events
        self._held = b""  # the unfinished event
        self._passing = False  # the event under way is too large to be held
        self._ended_by_cr = False  # the last event did, and an LF that belongs to it may still come
        self._swallowed_last = False

    def feed(self, piece: bytes) -> bytes:
        """The next bytes of the body without their framing; returns what passes on now."""
        if not piece:
            return b""
        passed: list[bytes] = []
        if self._ended_by_cr and piece.startswith(b"\n"):
            passed += [] if self._swallowed_last else [b"\n"]
            piece = piece[1:]
        self._ended_by_cr = False
        data = self._held + piece if self._held else piece
        at = 0
        for blank in _BLANK_LINE.finditer(data, max(0, len(self._held) - 3)):
            event, at = data[at : blank.end()], blank.end()
            self._swallowed_last = not self._passing and _is_usage_alone(event)
            self._passing = False
            if self._swallowed_last:
                self.swallowed += 1
            else:
                passed.append(event)
        self._ended_by_cr = at == len(data) and data.endswith(b"\r")
        self._held = self._to_hold(data[at:], passed)
        return b"".join(passed)

    def _to_hold(self, rest: bytes, passed: list[bytes]) -> bytes:
        """What of an unfinished event is held; of one too large only an end that may be half a blank line."""
        if not self._passing and len(rest) <= _MOST_HELD_BYTES:
            return rest
        self._passing = True
        passed.append(rest[:-3])
        return rest[-3:]

    def end(self) -> bytes:
        """What is still held when the answer ends."""
        held, self._held = self._held, b""
        return held


def _is_usage_alone(event: bytes) -> bool:
    if b'"usage"' not in event:
        return False
    lines = [line[5:] for line in _LINE_END.split(event) if line.startswith(b"data:")]
    try:
        chunk = _chunk.decode(b"\n".join(lines))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return chunk.choices == [] and chunk.usage is not None
