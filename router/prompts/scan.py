"""Finds the fields of a large JSON object without decoding it, a slice at a time.

Model     the outermost object's keys and where each value lies; values are skipped by their brackets and quotes. The
          caller decides what happens between two slices, usually that others get the event loop
Valid     UTF-8; a slice is 64 KiB, or a thousand strings, brackets or keys: about a millisecond
          Numbers and white space of more than a slice are refused; the last of equal keys counts, as in Python
Blind to  errors inside a value: the engine finds those
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from typing import TypeVar

import msgspec

from router.prompts.body import ALL_FIELDS, PLAIN_FIELDS, Body

SLICE_BYTES = 64 * 1024
STRING_STEP_BYTES = 16 * 1024  # of a string, looked at in one go
STEPS_IN_A_SLICE = 1000
LONGEST_KEY_BYTES = 256
LONGEST_PLAIN_BYTES = 64 * 1024  # of a field that is decoded at once; a longer one is left to the engine
_MARK = re.compile(rb'["\[\]{}]')
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^,}\]\s]+")
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # of a string; ends at its quote or in an escape
_BOM = b"\xef\xbb\xbf"

Span = tuple[int, int]  # first byte of a value, and the one after its last
Spans = Generator[None, None, dict[str, Span]]
Found = TypeVar("Found")

_anything = msgspec.json.Decoder()


def spans_of(body: bytes, wanted: frozenset[str] = ALL_FIELDS) -> Spans:
    """Where the values of `wanted` keys lie; yields after each slice.

    Raises
    ------
    ValueError : the body is not one JSON object, as far as its outermost level shows
    """
    return _Scan(body).spans(wanted)


def finished(spans: Spans) -> dict[str, Span]:
    """The result at once, for bodies that are not large."""
    try:
        while True:
            next(spans)
    except StopIteration as done:
        found: dict[str, Span] = done.value
        return found


def body_at(body: bytes, spans: dict[str, Span]) -> Body:
    """The fields at `spans`; long ones are views of the body, not copies. Those of `left_out` are missing."""
    view, found = memoryview(body), Body()
    for key in spans.keys() - left_out(spans):
        start, end = spans[key]
        try:
            setattr(
                found, key, _anything.decode(view[start:end]) if key in PLAIN_FIELDS else msgspec.Raw(view[start:end])
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ValueError(f"`{key}`: {exc}") from exc
    return found


def left_out(spans: dict[str, Span]) -> set[str]:
    """Fields that would have to be decoded at once and are too long for that."""
    return {key for key, (start, end) in spans.items() if key in PLAIN_FIELDS and end - start > LONGEST_PLAIN_BYTES}


class _Scan:
    """One pass over one body."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = len(_BOM) if body.startswith(_BOM) else 0
        self._steps = 0
        self._paused_at = 0

    def spans(self, wanted: frozenset[str]) -> Spans:
        found: dict[str, Span] = {}
        self._expect(b"{")
        if self._next() == b"}":
            return found
        while True:
            if self._pause_due(self._at):
                yield
            key = yield from self._key()
            self._expect(b":")
            self._next()
            start = self._at
            yield from self._skip_value()
            if key is not None and key in wanted:
                found[key] = (start, self._at)
            if self._next() == b"}":
                break
            self._expect(b",")
        self._at += 1
        if self._next():
            raise ValueError(f"unexpected data after the object at byte {self._at}")
        return found

    def _pause_due(self, at: int) -> bool:
        """Count a step that led to byte `at`; whether that makes a slice, and the next one begins."""
        self._steps += 1
        due = self._steps >= STEPS_IN_A_SLICE or at - self._paused_at >= SLICE_BYTES
        if due:
            self._steps, self._paused_at = 0, at
        return due

    def _next(self) -> bytes:
        """The next byte that is no space, without taking it; empty at the end."""
        space = _SPACE.match(self._body, self._at, self._at + SLICE_BYTES)
        assert space is not None, "no space is a match too"
        if space.end() - self._at == SLICE_BYTES:
            raise ValueError(f"too much white space at byte {self._at}")
        self._at = space.end()
        return self._body[self._at : self._at + 1]

    def _expect(self, byte: bytes) -> None:
        if self._next() != byte:
            raise ValueError(f"{byte.decode()!r} expected at byte {self._at}")
        self._at += 1

    def _key(self) -> Generator[None, None, str | None]:
        if self._next() != b'"':
            raise ValueError(f"a key expected at byte {self._at}")
        start = self._at
        yield from self._skip_string()
        if self._at - start > LONGEST_KEY_BYTES:
            return None  # nobody wants it
        try:
            key = _anything.decode(self._body[start : self._at])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return str(key)

    def _skip_value(self) -> Generator[None, None, None]:
        first = self._next()
        if first == b'"':
            yield from self._skip_string()
        elif first in (b"{", b"["):
            yield from self._skip_nested()
        else:
            scalar = _SCALAR.match(self._body, self._at, self._at + SLICE_BYTES)
            if scalar is None or scalar.end() - self._at == SLICE_BYTES:
                raise ValueError(f"a value expected at byte {self._at}")
            self._at = scalar.end()

    def _skip_string(self) -> Generator[None, None, None]:
        """From an opening quote to behind its closing one."""
        body, at = self._body, self._at + 1
        while True:
            inside = _INSIDE.match(body, at, at + STRING_STEP_BYTES)
            assert inside is not None, "nothing is a match too"
            at = inside.end()  # before an escape that reaches over the edge of this step, the next one takes it
            if body[at : at + 1] == b'"':
                self._at = at + 1
                return
            if at + 1 >= len(body):
                raise ValueError("the body ends inside a string")
            if self._pause_due(at):
                yield

    def _skip_nested(self) -> Generator[None, None, None]:
        """From an opening bracket to behind the one that closes it; kinds are not told apart."""
        body, depth = self._body, 0
        while True:
            mark = _MARK.search(body, self._at, self._at + SLICE_BYTES)
            if mark is None:
                self._at += SLICE_BYTES
                if self._at >= len(body):
                    raise ValueError("the body ends inside a list or an object")
                if self._pause_due(self._at):
                    yield
                continue
            self._at = mark.start()
            if self._pause_due(self._at):
                yield
            if mark[0] == b'"':
                yield from self._skip_string()
                continue
            self._at += 1
            depth += 1 if mark[0] in b"[{" else -1
            if depth == 0:
                return


async def in_slices(scan: Generator[None, None, Found]) -> Found:
    """What a scan returns; others get the loop after each of its slices."""
    while True:
        try:
            next(scan)
        except StopIteration as done:
            found: Found = done.value
            return found
        await asyncio.sleep(0)
