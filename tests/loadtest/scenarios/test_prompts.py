import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from loadtest.scenarios import words
from loadtest.scenarios.arrivals import ramp
from loadtest.scenarios.open_questions import Question, questions
from loadtest.scenarios.prompts import Dialogue, Library, Row, due, read_rows, row_messages, system_text


def common_start(one: str, other: str) -> int:
    """Characters at the beginning that both have."""
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), len(one))


def a_library() -> Library:
    return Library(count=50, tokens=20, exponent=1.0)


def open_questions(*, seed: int = 1, salt: str = "") -> list[Question]:
    rate = ramp(from_rps=5.0, to_rps=5.0, over_s=1.0)
    rng = random.Random(seed)
    return list(questions(rate, most_rps=5.0, until_s=20.0, rng=rng, tokens=lambda usual: int(usual / 10), salt=salt))


def test_each_turn_begins_with_all_that_was_said_before() -> None:
    dialogue = Dialogue("be kind")
    first = list(dialogue.ask("hello"))
    dialogue.answered("good day")
    second = dialogue.ask("how are you")
    assert second[: len(first)] == first
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]


def test_a_salt_makes_texts_that_share_nothing_from_the_start() -> None:
    assert system_text("chat", 30, salt="") == system_text("chat", 30, salt="")
    one, other = (system_text("chat", 30, salt=salt) for salt in ("aa", "bb"))
    assert common_start(one, other) == 0
    assert len(one) == len(other)


def test_the_first_document_is_as_popular_as_zipf_says() -> None:
    """One draw of one document, against its weight; 20,000 draws leave about one per cent of chance."""
    library, rng = a_library(), random.Random(3)
    hot = sum(library.draw(rng, 1) == [0] for _ in range(20_000))
    assert hot / 20_000 == pytest.approx(words.zipf_weights(50, 1.0)[0], rel=0.05)


def test_questions_over_the_same_documents_share_everything_but_the_question() -> None:
    library, rng = a_library(), random.Random(3)
    one, other = (library.question(rng, [2, 5], tokens=8, system="s")[1]["content"] for _ in range(2))
    documents = one.rpartition("\n\n")[0]
    assert one != other
    assert other.startswith(documents + "\n\n")


def test_documents_stand_in_order_of_popularity_so_that_prefixes_are_shared() -> None:
    library, rng = a_library(), random.Random(3)
    drawn = [library.draw(rng, 4) for _ in range(50)]
    assert all(found == sorted(set(found)) and 1 <= len(found) <= 4 for found in drawn)


@pytest.mark.parametrize(("count", "exponent"), [(0, 1.0), (3, -1.0), (3, float("nan"))])
def test_a_popularity_of_nothing_is_refused(count: int, exponent: float) -> None:
    with pytest.raises(ValueError, match="popularity"):
        words.zipf_weights(count, exponent)


def test_an_even_popularity_is_even() -> None:
    assert words.zipf_weights(4, 0.0) == [0.25] * 4


def test_lengths_about_a_mean_have_it() -> None:
    rng = random.Random(5)
    drawn = [words.about(rng, 100.0) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(100.0, rel=0.02)
    assert min(drawn) >= 1


def test_rows_that_share_ids_share_as_much_text() -> None:
    one = row_messages(Row(0.0, 1500, 1, [1, 2, 3]), salt="")[0]["content"]
    other = row_messages(Row(0.0, 2000, 1, [1, 2, 9, 10]), salt="")[0]["content"]
    assert (len(one), len(other)) == (1500 * 4, 2000 * 4)
    assert 2 * 512 * 4 <= common_start(one, other) < 2 * 512 * 4 + 40


def test_a_smaller_size_shortens_ids_and_prompts_alike() -> None:
    row = Row(0.0, 1500, 1, [1, 2, 3])
    assert len(row_messages(row, salt="", size=0.1)[0]["content"]) == 150 * 4


def a_trace(path: Path, *rows: dict[str, Any]) -> Path:
    lines = b"\n".join(
        json.dumps({"input_length": 5, "output_length": 2, "hash_ids": [1]} | row).encode() for row in rows
    )
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_is_read_in_order_with_milliseconds_or_seconds(name: str, tmp_path: Path) -> None:
    rows = read_rows(a_trace(tmp_path / name, {"at_s": 3.0}, {"timestamp": 1500}))
    assert [row.at_s for row in rows] == [1.5, 3.0]
    assert [at_s for at_s, _ in due(rows, 3.0)] == [0.0, 0.5]


def test_a_row_without_a_moment_is_refused_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2"):
        read_rows(a_trace(tmp_path / "t.jsonl", {"at_s": 3.0}, {}))
    (tmp_path / "u.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match="line 1"):
        read_rows(tmp_path / "u.jsonl")


def test_open_questions_are_the_same_for_a_seed_and_differ_only_in_their_salt() -> None:
    assert open_questions() == open_questions()
    assert open_questions(seed=2) != open_questions()
    plain, salted = open_questions(), open_questions(salt="xy")
    assert [one[0] for one in plain] == [one[0] for one in salted]
    assert [one[1][1:] for one in plain] == [one[1][1:] for one in salted]
    assert all(one[1][0]["content"].startswith("xy ") for one in salted)


def test_open_questions_go_on_with_conversations() -> None:
    asked = [one[1] for one in open_questions()]
    longer = [messages for messages in asked if len(messages) > 2]
    assert longer
    assert all(any(messages[:-2] == earlier for earlier in asked) for messages in longer if len(messages) > 3)
