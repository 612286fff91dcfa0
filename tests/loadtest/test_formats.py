from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from loadtest.replay.formats import FORMATS, BadTrace, read_trace

MOONCAKE = (
    '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [70, 7, 9]}\n'
    '{"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [70, 8]}\n'
)
TRAFFIC = '{"at_s": 2.5, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}\n'
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132,'
    ' "type": "text", "turn": 1, "hash_ids": [1089, 1090, 6326]}\n'
    '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 56, "output_length": 9,'
    ' "type": "text", "turn": 2, "hash_ids": [1089, 1090, 6327, 18446744073709551615]}\n'
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,0,0,0,Conversation log\n118,GPT-4,417,276,693,API log\n"
)
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
RECEIPTS = (
    '{"schema":1,"request_id":"a","arrived_at":1764460800.5,"model":"m","prompt_tokens":90,"output_tokens":7}\n'
    '{"schema":1,"request_id":"b","arrived_at":1764460802.0,"model":"m","prompt_tokens":80,"output_tokens":null}\n'
    '{"schema":1,"request_id":"c","arrived_at":1764460803.0,"model":"m","prompt_tokens":70,"output_tokens":6}\n'
)


def a_file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "first", "block_tokens"),
    [
        ("mooncake", MOONCAKE, (0.0, 1030, 5, [0, 1, 2]), 512),
        ("traffic", TRAFFIC, (0.0, 700, 3, [0, 1]), 512),
        ("bailian", BAILIAN, (0.0, 40, 132, [0, 1, 2]), 16),
        ("burstgpt", BURSTGPT, (0.0, 472, 18, []), 512),
        ("azure", AZURE_2023, (0.0, 374, 44, []), 512),
        ("azure", AZURE_2024, (0.0, 2162, 5, []), 512),
        ("receipts", RECEIPTS, (0.0, 90, 7, []), 512),
        ("receipts", RECEIPTS.replace('"output_tokens":7', '"output_tokens":null,"events":9'), (0.0, 90, 9, []), 512),
    ],
)
def test_each_format_is_known_by_its_first_line(
    tmp_path: Path, name: str, text: str, first: tuple[float, int, int, list[int]], block_tokens: int
) -> None:
    trace = read_trace(a_file(tmp_path, text))
    row = trace.rows[0]
    assert (row.at_s, row.input_length, row.output_length, row.hash_ids) == first
    assert (trace.format, trace.block_tokens, trace.has_prefixes) == (name, block_tokens, bool(first[3]))


def test_every_format_is_tested_above() -> None:
    assert set(FORMATS) == {"mooncake", "traffic", "bailian", "burstgpt", "azure", "receipts"}


def test_times_are_seconds_from_the_first_request(tmp_path: Path) -> None:
    assert [row.at_s for row in read_trace(a_file(tmp_path, MOONCAKE)).rows] == [0.0, 3.0]
    assert [row.at_s for row in read_trace(a_file(tmp_path, BAILIAN)).rows] == [0.0, pytest.approx(1.386)]
    assert [row.at_s for row in read_trace(a_file(tmp_path, BURSTGPT)).rows] == [0.0, 113.0]
    assert [row.at_s for row in read_trace(a_file(tmp_path, AZURE_2023)).rows] == [0.0, pytest.approx(4.314579)]


def test_equal_ids_stay_equal_and_large_ones_become_small(tmp_path: Path) -> None:
    rows = read_trace(a_file(tmp_path, BAILIAN)).rows
    assert [row.hash_ids for row in rows] == [[0, 1, 2], [0, 1, 3, 4]]


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    for text in (BURSTGPT, RECEIPTS):
        trace = read_trace(a_file(tmp_path, text))
        assert (len(trace.rows), trace.left_out) == (2, 1)


@pytest.mark.parametrize("damaged", ['{"schema":1,"request_id":"b","arr', '{"arrived_at":1e99,"prompt_tokens":80}'])
def test_a_line_of_receipts_that_is_none_is_left_out_and_counted(tmp_path: Path, damaged: str) -> None:
    first, _second, third = RECEIPTS.splitlines()
    trace = read_trace(a_file(tmp_path, "\n".join((first, damaged, third))))
    assert ([row.input_length for row in trace.rows], trace.left_out) == ([90, 70], 1)


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    backwards = "\n".join(reversed(MOONCAKE.splitlines())) + "\n"
    assert [row.input_length for row in read_trace(a_file(tmp_path, backwards)).rows] == [1030, 600]


def test_a_gzipped_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert read_trace(packed) == read_trace(a_file(tmp_path, MOONCAKE))


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    assert read_trace(a_file(tmp_path, BAILIAN), "mooncake").block_tokens == 512


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("hello\nworld\n", "its first line is that of no known trace"),
        ('{"prompt": "hi"}\n', "its first line is that of no known trace"),
        ("a,b,c\n1,2,3\n", "its first line is that of no known trace"),
        (MOONCAKE + '{"timestamp": "x"}\n', "line 3"),
        (AZURE_2024 + "yesterday,5,5\n", "Invalid isoformat string"),
        (BURSTGPT.splitlines()[0] + "\n5,ChatGPT,many,1,1,x\n", "invalid literal for int"),
        (BURSTGPT.splitlines()[0] + "\n45,ChatGPT,0,0,0,x\n", "no row has both a prompt and an output"),
        (BURSTGPT.splitlines()[0] + "\n", "no line of it is in the format 'burstgpt'"),
        (TRAFFIC.replace("700", "7000000000"), "a length in it is more than 2,147,483,648 tokens"),
        (RECEIPTS.replace('"schema":1', '"schema":2'), "receipts of schema 2: this version reads schema 1"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = a_file(tmp_path, text)
    with pytest.raises(BadTrace) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"trace {path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        read_trace(tmp_path / "nowhere")
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(MOONCAKE.encode())[:-9])
    with pytest.raises(BadTrace, match="gzip"):
        read_trace(broken)


def test_a_forced_format_that_does_not_fit_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="no line of it is in the format 'receipts'"):
        read_trace(a_file(tmp_path, TRAFFIC), "receipts")
    with pytest.raises(BadTrace, match="column 'Timestamp' is missing"):
        read_trace(a_file(tmp_path, AZURE_2024), "burstgpt")
