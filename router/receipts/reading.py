"""Receipts read back from their files: the one that is written, and those it was rotated to, oldest first.

Model     a line that is no receipt (cut off by a full disk or a killed process) is passed over and counted
Valid     files of this schema; fields this version does not know are passed over
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from router.errors import ConfigError
from router.receipts.file import files_behind
from router.receipts.schema import SCHEMA, Receipt


@dataclass(slots=True)
class Kept:
    """What was read. unreadable : lines that are no receipt"""

    receipts: list[Receipt] = field(default_factory=list)
    unreadable: int = 0

    @property
    def passed_over(self) -> str:
        """What a reader says of lines that are no receipts; empty where there are none."""
        if not self.unreadable:
            return ""
        one = self.unreadable == 1
        lines = "1 line is no receipt and was" if one else f"{self.unreadable} lines are no receipts and were"
        return f"{lines} passed over"


def read_receipts(paths: Sequence[Path]) -> Kept:
    """All receipts of `paths`, in order of arrival.

    Raises
    ------
    ConfigError : a file cannot be read, was written by a newer version, or none of it is a receipt.
    """
    kept = Kept()
    for line in _lines(paths):
        receipt = decoded(line)
        if receipt is None:
            kept.unreadable += 1
        else:
            kept.receipts.append(receipt)
    if not kept.receipts:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: {'no line is a receipt' if kept.unreadable else 'there is no receipt in it'}")
    kept.receipts.sort(key=lambda receipt: receipt.arrived_at)
    return kept


def find_receipt(paths: Sequence[Path], request_id: str) -> Receipt:
    """The last receipt of a request. `ConfigError` when there is none, or a file cannot be read."""
    wanted = msgspec.json.encode(request_id)  # most lines need not be decoded
    found = None
    for line in _lines(paths):
        if wanted in line:
            receipt = decoded(line)
            if receipt is not None and receipt.request_id == request_id:
                found = receipt
    if found is None:
        raise ConfigError(f"{', '.join(map(str, paths))}: no receipt of request {request_id!r}")
    return found


def decoded(line: bytes) -> Receipt | None:
    """One line as a receipt; None when it is none. `ConfigError` when a newer version wrote it."""
    try:
        receipt = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if receipt.schema > SCHEMA:
        raise ConfigError(f"receipts of schema {receipt.schema}: this version reads up to {SCHEMA}")
    if receipt.chosen is not None and not 0 <= receipt.chosen < len(receipt.candidates):
        return None
    return receipt


def _lines(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        files = files_behind(path)
        if not files:
            raise ConfigError(f"{path}: there is no such file")
        for file in files:
            try:
                with file.open("rb") as lines:
                    yield from (line for line in lines if line.strip())
            except OSError as exc:
                raise ConfigError(f"{file}: {exc.strerror}") from exc


_DECODER = msgspec.json.Decoder(Receipt)
