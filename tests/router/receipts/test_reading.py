"""Receipts read back: rotated files, cut lines, other versions."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError
from router.receipts import Receipt
from router.receipts.reading import NoReceipt, decoded, find_receipt, read_receipts
from tests.router.receipts.builders import a_candidate, a_receipt

LINE = msgspec.json.encode(a_receipt())


def text_of(*indices: int) -> bytes:
    return b"".join(msgspec.json.encode(a_receipt(index, arrived_at=float(index))) + b"\n" for index in indices)


def test_what_was_rotated_away_is_read_too_and_all_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for name, indices in (("r.jsonl.2", (0, 2)), ("r.jsonl.1", (1, 3)), ("r.jsonl", (4,))):
        (tmp_path / name).write_bytes(text_of(*indices))
    assert [receipt.request_id for receipt in read_receipts([path]).receipts] == [f"r-{index}" for index in range(5)]


def test_a_line_that_was_cut_off_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text_of(0) + LINE[:40] + b"\n\xff\xfe\n\n" + text_of(1))
    kept = read_receipts([path])
    assert ([receipt.request_id for receipt in kept.receipts], kept.unreadable) == (["r-0", "r-1"], 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no receipt in it"),
        (b"hello\n", "no line is a receipt"),
        (LINE.replace(b'"schema":1', b'"schema":7'), "schema 7"),
        (b"\n" + LINE[:60], "the first is none: Input data was truncated"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_sentence(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=says):
        read_receipts([path])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl: there is no such file"):
        read_receipts([tmp_path / "absent.jsonl"])


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert decoded(LINE[:-1] + b',"mood":"good"}') == a_receipt()


def test_a_choice_that_is_not_among_the_candidates_is_no_receipt() -> None:
    with pytest.raises(NoReceipt, match="candidate 1 was chosen of 1"):
        decoded(msgspec.json.encode(a_receipt(chosen=1)))


@given(st.binary(max_size=80), st.integers(0, len(LINE)))
def test_rubbish_is_a_receipt_or_none_or_of_another_schema(rubbish: bytes, at: int) -> None:
    with suppress(NoReceipt, ConfigError):
        assert isinstance(decoded(LINE[:at] + rubbish + LINE[at:]), Receipt)


@pytest.mark.parametrize("said", ["0", "-1", "2", '"1"', "1.5", "null", "true"])
def test_a_schema_that_was_never_written_is_one_clear_sentence(said: str) -> None:
    with pytest.raises(ConfigError, match=r"^receipts of schema .+: this version reads schema 1$"):
        decoded(LINE.replace(b'"schema":1', b'"schema":' + said.encode()))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": 10**12},
        {"prompt_tokens": -1},
        {"arrived_at": 1e300},
        {"first_token_s": 1e308},
        {"output_tokens": 2**70},
        {"probability": 0.0},
        {"block_tokens": 0},
        {"candidates": [a_candidate(queue_s=-1e308)]},
        {"candidates": [a_candidate(hit_probability=1.5)]},
    ],
)
def test_numbers_that_cannot_be_true_make_a_line_no_receipt(changes: dict[str, Any]) -> None:
    with pytest.raises(NoReceipt, match=r"Expected `(int|float)`"):
        decoded(msgspec.json.encode(a_receipt(**changes)))


def test_gzipped_files_are_read_as_others_are(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text_of(2))
    (tmp_path / "r.jsonl.1").write_bytes(gzip.compress(text_of(0, 1)))
    assert [receipt.request_id for receipt in read_receipts([path]).receipts] == ["r-0", "r-1", "r-2"]
    assert find_receipt([path], "r-1").request_id == "r-1"


@pytest.mark.parametrize("keep", [3, 15, 60])
def test_a_gzipped_file_that_is_not_whole_is_one_clear_sentence(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(text_of(0, 1))[:keep])
    with pytest.raises(ConfigError, match="it is not a whole gzip file"):
        read_receipts([path])


def test_of_a_request_id_that_came_twice_the_last_receipt_is_found(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text_of(0, 1) + msgspec.json.encode(a_receipt(0, status=7)) + b"\n")
    assert find_receipt([path], "r-0").status == 7
    with pytest.raises(ConfigError, match=r"no receipt of request 'r-9'$"):
        find_receipt([path], "r-9")


def test_a_damaged_line_of_the_request_looked_for_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text_of(0) + msgspec.json.encode(a_receipt(1, first_token_s=1e99)) + b"\n")
    says = r"no receipt of request 'r-1'; a line that names it is no receipt: Expected `float` .+ `\$\.first_token_s`"
    with pytest.raises(ConfigError, match=says):
        find_receipt([path], "r-1")
