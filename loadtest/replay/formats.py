"""Reads traces of other people's services into one form.

Model     a trace is a list of requests: arrival, lengths, and where it is known one id for each block of the prompt
          (equal ids are equal tokens). Ids are renumbered from 0, so that any hash fits
Valid     mooncake  JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512 tokens
          traffic   JSON lines, our own slices: at_s, input_length, output_length, hash_ids of 512 tokens
          bailian   JSON lines: chat_id, parent_chat_id, timestamp in s, lengths, type, turn, hash_ids of 16 tokens
          burstgpt  CSV: Timestamp in s, Model, Request tokens, Response tokens, Total tokens, Log Type
          azure     CSV: TIMESTAMP as date and time, ContextTokens, GeneratedTokens
          receipts  JSON lines of `tfirst serve --receipts`: arrived_at, prompt_tokens, output_tokens or events
          each gzipped or not; lengths up to 2^31 tokens
Blind to  models, request types and failures: a row without prompt or output is left out and counted; so is a line of
          receipts that cannot be read, such as a killed process leaves
Source    github.com/kvcache-ai/Mooncake, github.com/alibaba-edu/qwen-bailian-usagetraces-anon,
          github.com/HPMLL/BurstGPT, github.com/Azure/AzurePublicDataset; all by their documentation
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.traffic import TrafficRow
from router.errors import ConfigError
from router.receipts.reading import check_schema
from router.receipts.schema import SCHEMA, Seconds, Tokens

Line = TypeVar("Line", bound=msgspec.Struct)

GZIP_MAGIC = b"\x1f\x8b"
MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16


class BadTrace(ValueError):
    """The file cannot be read as a trace; the message is one sentence."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"trace {path}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Trace:
    """All requests of a file in order of arrival, times in seconds from the first.

    block_tokens : tokens behind each id of `hash_ids`
    has_prefixes : whether the file says what prompts share; without it `hash_ids` are empty
    left_out : rows without prompt or output, and lines that are none
    """

    rows: list[TrafficRow]
    format: str
    block_tokens: int
    has_prefixes: bool
    left_out: int = 0


class MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class TrafficLine(msgspec.Struct):
    at_s: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class BailianLine(msgspec.Struct):
    chat_id: int | str
    parent_chat_id: int | str
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int | str]


class ReceiptLine(msgspec.Struct):
    arrived_at: Seconds
    prompt_tokens: Tokens
    schema: object = SCHEMA
    output_tokens: Tokens | None = None
    events: Tokens | None = None  # of a stream; counted for tokens where it has no usage


Seen = tuple[float, int, int, list[int | str] | list[int]]  # seconds, prompt, output, ids


def _mooncake(lines: Iterable[str]) -> Iterator[Seen]:
    for line in _decoded(lines, MooncakeLine):
        yield line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids


def _traffic(lines: Iterable[str]) -> Iterator[Seen]:
    for line in _decoded(lines, TrafficLine):
        yield line.at_s, line.input_length, line.output_length, line.hash_ids


def _bailian(lines: Iterable[str]) -> Iterator[Seen]:
    for line in _decoded(lines, BailianLine):
        yield line.timestamp, line.input_length, line.output_length, line.hash_ids


def _receipts(lines: Iterable[str]) -> Iterator[Seen | None]:
    """None for a line that is no receipt: readers of receipts pass such lines over."""
    decoder = msgspec.json.Decoder(ReceiptLine)
    for line in lines:
        if line and not line.isspace():
            try:
                one = decoder.decode(line)
            except msgspec.DecodeError:
                yield None
            else:
                check_schema(one.schema)
                yield one.arrived_at, one.prompt_tokens, one.output_tokens or one.events or 0, []


def _burstgpt(lines: Iterable[str]) -> Iterator[Seen]:
    for row in csv.DictReader(lines):
        yield float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]), []


def _azure(lines: Iterable[str]) -> Iterator[Seen]:
    for row in csv.DictReader(lines):
        moment = datetime.fromisoformat(row["TIMESTAMP"])
        if moment.tzinfo is None:  # the releases of 2023 have none, those of 2024 say +00:00
            moment = moment.replace(tzinfo=UTC)
        yield moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), []


@dataclass(frozen=True, slots=True)
class Format:
    """How one kind of file is told from others and read. marks : keys or columns that all must be there.

    read : one for each line; None where it is left out
    """

    marks: frozenset[str]
    is_csv: bool
    read: Callable[[Iterable[str]], Iterator[Seen | None]]
    block_tokens: int
    has_prefixes: bool = False


LATEST_S = 1e12  # later is no time; NaN fails the comparison too
LONGEST_TOKENS = 2**31

# Tried in this order: a Bailian line has all marks of a Mooncake line.
FORMATS: dict[str, Format] = {
    "bailian": Format(frozenset(BailianLine.__struct_fields__), False, _bailian, BAILIAN_BLOCK, has_prefixes=True),
    "mooncake": Format(frozenset(MooncakeLine.__struct_fields__), False, _mooncake, MOONCAKE_BLOCK, has_prefixes=True),
    "traffic": Format(frozenset(TrafficLine.__struct_fields__), False, _traffic, MOONCAKE_BLOCK, has_prefixes=True),
    "receipts": Format(frozenset({"arrived_at", "prompt_tokens"}), False, _receipts, MOONCAKE_BLOCK),
    "burstgpt": Format(frozenset({"Timestamp", "Request tokens", "Response tokens"}), True, _burstgpt, MOONCAKE_BLOCK),
    "azure": Format(frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), True, _azure, MOONCAKE_BLOCK),
}


def read_trace(path: Path, format_name: str | None = None) -> Trace:
    """Every usable request of `path`, its format found from its first line unless `format_name` says it.

    Raises
    ------
    BadTrace : the file cannot be read, is no known trace, or a line of it is not what its format says.
    """
    lines = _lines(path)
    if not lines:
        raise BadTrace(path, "it is empty")
    name = format_name or _detect(path, lines[0])
    use = FORMATS[name]
    try:
        read = list(use.read(lines))
    except ConfigError as exc:  # receipts of another schema
        raise BadTrace(path, str(exc)) from exc
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, csv.Error) as exc:
        what = f"column {exc} is missing" if isinstance(exc, KeyError) else str(exc)
        raise BadTrace(path, f"it is not in the format {name!r}: {what}") from exc
    seen = [row for row in read if row is not None]
    if not seen:
        raise BadTrace(path, f"no line of it is in the format {name!r}")
    if not all(0 <= abs(row[0]) < LATEST_S for row in seen):
        raise BadTrace(path, "a time in it is not a finite number of seconds")
    if any(max(row[1], row[2]) > LONGEST_TOKENS for row in seen):
        raise BadTrace(path, f"a length in it is more than {LONGEST_TOKENS:,} tokens")
    seen.sort(key=lambda row: row[0])
    rows = list(_rows(seen))
    if not rows:
        raise BadTrace(path, "no row has both a prompt and an output")
    return Trace(rows, name, use.block_tokens, use.has_prefixes, left_out=len(read) - len(rows))


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig").splitlines()
    except OSError as exc:
        raise BadTrace(path, exc.strerror or "it is not a whole gzip file") from exc
    except (EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise BadTrace(path, f"it is neither text nor a whole gzip file ({exc})") from exc


def _detect(path: Path, first: str) -> str:
    """Name of the format whose marks the first line has."""
    is_csv = not first.lstrip().startswith("{")
    keys = set(next(csv.reader([first]), [])) if is_csv else _keys(first)
    for name, known in FORMATS.items():
        if known.is_csv == is_csv and known.marks <= keys:
            return name
    raise BadTrace(path, f"its first line is that of no known trace; known are {', '.join(FORMATS)}")


def _keys(line: str) -> set[str]:
    try:
        return set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        return set()


def _decoded(lines: Iterable[str], form: type[Line]) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(form)
    for number, line in enumerate(lines, 1):
        if line and not line.isspace():
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as exc:
                raise ValueError(f"line {number}: {exc}") from exc


def _rows(seen: list[Seen]) -> Iterator[TrafficRow]:
    """Rows that ask for something, ids renumbered in order of appearance."""
    number: defaultdict[int | str, int] = defaultdict(count().__next__)
    start_s = seen[0][0] if seen else 0.0
    for at_s, prompt, output, ids in seen:
        if prompt > 0 and output > 0:
            known = [number[key] for key in ids]
            yield TrafficRow(at_s=at_s - start_s, input_length=prompt, output_length=output, hash_ids=known)
