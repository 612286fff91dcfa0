"""Receipts read back from their files: the one that is written, and those it was rotated to, oldest first.

Model     a line that is no receipt (cut off by a full disk or a killed process, or with numbers that cannot be) is
          passed over and counted
Valid     files of this schema, gzipped or not; fields this version does not know are passed over
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import msgspec

from router.errors import ConfigError
from router.receipts.file import files_behind
from router.receipts.schema import SCHEMA, Receipt

GZIP_MAGIC = b"\x1f\x8b"


class NoReceipt(ValueError):
    """A line is none; the message says why."""


@dataclass(slots=True)
class Kept:
    """What was read. unreadable : lines that are no receipt"""

    receipts: list[Receipt] = field(default_factory=list)
    unreadable: int = 0

    @property
    def passed_over(self) -> str:
        """What a reader says of lines that are no receipts; empty where there are none."""
        return passed_over(self.unreadable)


def passed_over(lines: int) -> str:
    """What a reader says of `lines` that are no receipts; empty where there are none.

    >>> passed_over(1), passed_over(2)
    ('1 line is no receipt and was passed over', '2 lines are no receipts and were passed over')
    """
    if lines == 1:
        return "1 line is no receipt and was passed over"
    return f"{lines} lines are no receipts and were passed over" if lines else ""


def read_receipts(paths: Sequence[Path]) -> Kept:
    """All receipts of `paths`, in order of arrival.

    Raises
    ------
    ConfigError : a file cannot be read, is of another schema, or none of it is a receipt.
    """
    kept, why = Kept(), ""
    for line in _lines(paths):
        try:
            kept.receipts.append(decoded(line))
        except NoReceipt as exc:
            kept.unreadable += 1
            why = why or str(exc)
    if not kept.receipts:
        problem = f"no line is a receipt; the first is none: {why}" if why else "there is no receipt in it"
        raise ConfigError(f"{', '.join(map(str, paths))}: {problem}")
    kept.receipts.sort(key=lambda receipt: receipt.arrived_at)
    return kept


def find_receipt(paths: Sequence[Path], request_id: str) -> Receipt:
    """The last receipt of a request. `ConfigError` when there is none, or a file cannot be read."""
    wanted = msgspec.json.encode(request_id)  # most lines need not be decoded
    found, why = None, ""
    for line in _lines(paths):
        if wanted in line:
            try:
                receipt = decoded(line)
            except NoReceipt as exc:
                why = f"; a line that names it is no receipt: {exc}"
                continue
            if receipt.request_id == request_id:
                found = receipt
    if found is None:
        raise ConfigError(f"{', '.join(map(str, paths))}: no receipt of request {request_id!r}{why}")
    return found


def decoded(line: bytes) -> Receipt:
    """One line as a receipt.

    Raises
    ------
    NoReceipt : it is none.
    ConfigError : it says that it is of a schema this version does not read.
    """
    try:
        receipt = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        check_schema(_said_schema(line))
        raise NoReceipt(str(exc)) from exc
    check_schema(receipt.schema)
    if receipt.chosen is not None and not 0 <= receipt.chosen < len(receipt.candidates):
        raise NoReceipt(f"candidate {receipt.chosen} was chosen of {len(receipt.candidates)}")
    return receipt


def check_schema(said: object) -> None:
    """Raise ConfigError unless a line of schema `said` can be read here."""
    if isinstance(said, bool) or not isinstance(said, int) or not 1 <= said <= SCHEMA:
        raise ConfigError(f"receipts of schema {said!r}: this version reads schema {SCHEMA}")


class _Versioned(msgspec.Struct):
    schema: object = SCHEMA


def _said_schema(line: bytes) -> object:
    """What a line says of its schema, be the rest as it may; our own where it says nothing."""
    try:
        return msgspec.json.decode(line, type=_Versioned).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SCHEMA


def _lines(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        files = files_behind(path)
        if not files:
            raise ConfigError(f"{path}: there is no such file")
        for file in files:
            try:
                with _opened(file) as lines:
                    yield from (line for line in lines if line.strip())
            except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
                raise ConfigError(f"{file}: it is not a whole gzip file ({exc})") from exc
            except OSError as exc:
                raise ConfigError(f"{file}: {exc.strerror}") from exc


def _opened(file: Path) -> gzip.GzipFile | BufferedReader:
    """Its lines, unzipped where it begins as a gzip file does."""
    with file.open("rb") as raw:
        zipped = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return gzip.open(file, "rb") if zipped else file.open("rb")


_DECODER = msgspec.json.Decoder(Receipt)
