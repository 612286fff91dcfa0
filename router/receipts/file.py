"""A file of lines that is rotated: `receipts.jsonl`, then `receipts.jsonl.1` (newer) to `.N` (oldest).

Model     lines go to the end of the file; one that would make it longer than the limit goes to a new one, and the
          oldest is removed. A write that fails leaves whole lines: what it had written of them is taken back
Valid     one writer to a file
Blind to  somebody else who moves the file: it is written on until the next rotation
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class RotatedFile:
    """max_bytes : of one file, > 0; a single longer line is still written. keep : rotated files kept, >= 0"""

    def __init__(self, path: Path, *, max_bytes: int, keep: int) -> None:
        """Open `path` for appending; `OSError` when that is not possible."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: BinaryIO | None = None
        self._size = 0
        self._open()

    def append(self, lines: bytes) -> None:
        """Write whole lines at once.

        Raises
        ------
        OSError : that is not possible; nothing of them is in the file then, and the next call tries anew.
        """
        if self._file is None:
            self._open()
        if self._size and self._size + len(lines) > self._max_bytes:
            self._rotate()
        try:
            self._write(lines)
        except OSError:
            self._take_back()
            raise
        self._size += len(lines)

    def close(self) -> None:
        """Close it; it may be used again."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def _write(self, lines: bytes) -> None:
        assert self._file is not None, "it was opened"
        left = memoryview(lines)
        while left:
            left = left[self._file.write(left) or 0 :]

    def _take_back(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(self._size)
        self.close()

    def _rotate(self) -> None:
        self.close()
        if self._keep == 0:
            self._path.unlink(missing_ok=True)
        for number in range(self._keep - 1, -1, -1):
            source = rotated(self._path, number)
            if source.exists():
                source.replace(rotated(self._path, number + 1))
        self._open()


def rotated(path: Path, number: int) -> Path:
    """The `number`-th file behind `path`, which is number 0."""
    return path.with_name(f"{path.name}.{number}") if number else path


def files_behind(path: Path) -> list[Path]:
    """`path` and what was rotated away from it, oldest first, as far as they exist."""
    number = 1
    while rotated(path, number).exists():
        number += 1
    return [each for each in (rotated(path, back) for back in range(number - 1, -1, -1)) if each.exists()]
