"""Receipts that were damaged: whoever reads them says so in one sentence, or reads on, and never breaks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.cli.main import main
from tests.router.study.test_whatif import receipts_of_turns

REQUESTS = 56  # whatif wants 50
VALUES: Sequence[Any] = (
    *(0, -1, 1, 2**31, 2**63, -(2**70), 0.5, -0.5, 1e12, -1e12, 1e-308, 1e308, -1e308),
    *("", "x", "1", "[red]", "[/red]", ":smile:", "\x1b[31m", "\x9b2J", None, True, [], [0], {}, {"a": 1}),
)
BYTES = b'{}[]",:0-e\\\n\x00\xff'

READERS: dict[str, Sequence[str]] = {
    "explain": ("explain", "r-3", "--receipts"),
    "receipts": ("receipts",),
    "ab": ("ab",),
    "ab per token": ("ab", "--metric", "per_token", "--json"),
    "ab failures": ("ab", "--metric", "failures"),
    "whatif": ("whatif", "--policy", "e2e", "--draws", "2"),
    "replay": ("replay", "--format", "receipts", "--policy", "e2e", "--no-bounds", "--jobs", "1", "--trace"),
}
TRIES = {"whatif": 4, "replay": 4}  # these play what they read
USUAL_TRIES = 15


def whole_lines() -> list[dict[str, Any]]:
    """Receipts of an experiment with two arms, as plain values."""
    receipts = receipts_of_turns(REQUESTS)
    for index, receipt in enumerate(receipts):
        receipt.arm, receipt.arm_share, receipt.unit = "ab"[index % 2], 0.5, f"u{index // 3}"
    return [msgspec.to_builtins(receipt) for receipt in receipts]


LINES = [msgspec.json.encode(line) for line in whole_lines()]


def damaged(chance: random.Random) -> bytes:
    """The lines with one to three of them damaged: another value somewhere, other bytes, or a cut."""
    lines = list(LINES)
    for _ in range(chance.randint(1, 3)):
        index = chance.choice((0, 3, chance.randrange(len(lines))))  # the first, and the one that is explained
        how = chance.choice((with_another_value, with_another_value, with_other_bytes, cut))
        lines[index] = how(lines[index], chance)
    return b"\n".join(lines)


def with_another_value(line: bytes, chance: random.Random) -> bytes:
    try:
        plain = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):  # damaged before
        return line
    inside: Any = plain
    while True:
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        if not keys:
            return line
        key = chance.choice(list(keys))
        if isinstance(inside[key], dict | list) and chance.random() < 0.8:
            inside = inside[key]
            continue
        inside[key] = chance.choice(VALUES)
        return msgspec.json.encode(plain)


def with_other_bytes(line: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(line) + 1)
    rubbish = bytes(chance.choice(BYTES) for _ in range(chance.randint(0, 3)))
    return line[:at] + rubbish + line[at + chance.randint(0, 3) :]


def cut(line: bytes, chance: random.Random) -> bytes:
    return line[: chance.randrange(len(line) + 1)]


@pytest.mark.parametrize("reader", READERS)
def test_damaged_receipts_end_in_a_status_and_at_most_one_sentence(
    reader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, chance = tmp_path / "r.jsonl", random.Random(f"7/{reader}")
    for _ in range(TRIES.get(reader, USUAL_TRIES)):
        path.write_bytes(damaged(chance))
        status = main([*READERS[reader], str(path)])  # what is not foreseen is raised, and fails here
        out, told = capsys.readouterr()
        assert status in (0, 1, 2)
        assert (len(told.splitlines()) == 1) == (status == 2), told
        assert all(line.isprintable() for line in (out + told).split("\n"))


@pytest.mark.parametrize("reader", READERS)
def test_whole_receipts_are_read_by_all(reader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join(LINES))
    assert main([*READERS[reader], str(path)]) == 0
    out, err = capsys.readouterr()
    assert (bool(out), err) == (True, "")
