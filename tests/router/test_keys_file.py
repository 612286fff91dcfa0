from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.gate import Gate
from router.keys import key_line, new_key
from router.keys_file import KeysFile

ALICE, BOB = new_key(), new_key()


def write(path: Path, text: str) -> None:
    """Replace a file as careful editors do: by a rename."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[tuple[KeysFile, Gate]]:
    write(path, key_line("alice", ALICE))
    gate = Gate()
    file = KeysFile(path, gate)
    file.start()
    try:
        yield file, gate
    finally:
        await file.stop()


def let_in(gate: Gate) -> list[str]:
    assert gate.keys is not None
    return [name for key in (ALICE, BOB) if (name := gate.keys.name_of(key.encode())) is not None]


async def test_a_changed_file_is_in_force_at_the_next_look(tmp_path: Path) -> None:
    async with watching(tmp_path / "keys") as (file, gate):
        file.look()
        assert let_in(gate) == ["alice"]
        write(tmp_path / "keys", key_line("bob", BOB))
        file.look()
        assert let_in(gate) == ["bob"]


async def test_a_file_that_cannot_be_used_changes_nothing_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(tmp_path / "keys") as (file, gate):
        for text in ("", "alice in-the-clear", key_line("bob", BOB)[:-1]):
            write(tmp_path / "keys", text)
            file.look()
            assert (let_in(gate), file.rejected is None) == (["alice"], False)
        (tmp_path / "keys").unlink()
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            file.look()
            file.reload()
        assert len(caplog.records) == 1
        assert (let_in(gate), "No such file" in str(file.rejected)) == (["alice"], True)
        assert "in-the-clear" not in caplog.text


async def test_a_file_put_right_to_what_it_was_is_in_force_again(tmp_path: Path) -> None:
    async with watching(tmp_path / "keys") as (file, gate):
        write(tmp_path / "keys", "half a li")
        file.look()
        write(tmp_path / "keys", key_line("alice", ALICE))
        file.look()
        assert (let_in(gate), file.rejected) == (["alice"], None)


async def test_a_file_that_cannot_be_used_at_the_start_stops_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeysFile(tmp_path / "absent", Gate()).start()
