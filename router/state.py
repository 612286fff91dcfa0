"""What a router has learned, kept in a file over a restart.

Model     one JSON file, written whole beside the old one and renamed over it, so that nobody ever reads half of it.
          It knows nothing of what is in it: whoever learned something says itself how to take it over, and how much
          to believe of it at its age
Valid     one router to a file; ages by Unix time
Blind to  a clock that was set back: what seems to come from the future is taken to be new
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

SCHEMA = 1  # raised when what was saved before cannot be read any more


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. saved_at : Unix time; learned : plain values, as they were given"""

    schema: int = SCHEMA
    saved_at: float
    learned: dict[str, Any]

    def age_s(self, now_at: float) -> float:
        """How old it is at `now_at` (Unix time), >= 0."""
        return max(0.0, now_at - self.saved_at)


def save_state(path: Path, learned: dict[str, Any], *, saved_at: float) -> None:
    """Write `learned` to `path` in one step.

    Raises
    ------
    OSError : that is not possible; a file that was there stays as it was.
    TypeError : something in `learned` is no plain value; likewise.
    """
    text = msgspec.json.encode(SavedState(saved_at=saved_at, learned=learned))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def load_state(path: Path) -> SavedState | None:
    """What was saved in `path`; None when there is no such file.

    Raises
    ------
    OSError : it cannot be read.
    ValueError : it holds something else, or was written by another version.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = msgspec.json.decode(text, type=SavedState)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ValueError(f"state file {path} holds no state of a router: {' '.join(str(exc).split())}") from exc
    if state.schema != SCHEMA:
        raise ValueError(f"state file {path} has schema {state.schema}, and this version reads {SCHEMA}")
    return state
