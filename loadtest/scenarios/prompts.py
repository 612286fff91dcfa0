"""What users send: conversations that grow, questions over documents, tasks with tools, and rows of a trace.

Model     every text follows from a name, so that two runs with one seed and one salt send the same bytes; what differs
          are the answers that conversations carry along. The salt opens each prompt's first message: another one makes
          texts that no replica has seen, with the same lengths and the same sharing
Valid     results of tools are sent as messages of the user, which every server takes, with or without tool calls
Blind to  chat templates: lengths are of the texts alone
"""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from loadtest.scenarios import words

TOKENS_PER_ID, CHARACTERS_PER_TOKEN = 512, 4

Message = dict[str, str]


class Dialogue:
    """One conversation: each prompt is the last one, its answer, and something new."""

    def __init__(self, system: str) -> None:
        self.messages: list[Message] = [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[Message]:
        """The messages to send next."""
        self.messages.append({"role": "user", "content": text})
        return self.messages

    def answered(self, text: str) -> None:
        """What the model said, as it is sent along from now on."""
        self.messages.append({"role": "assistant", "content": text})


def system_text(name: str, tokens: int, *, salt: str) -> str:
    """The instructions that all users of one application share."""
    return f"{salt} {words.named_text(f'system/{name}', tokens)}".strip()


class Library:
    """Documents of which few are asked about most of the time.

    count : documents, >= 1; exponent : of their popularity (0 even, about 1 as web pages are)
    """

    def __init__(self, *, count: int, tokens: int, exponent: float) -> None:
        self._tokens = tokens
        self._sums = list(itertools.accumulate(words.zipf_weights(count, exponent)))

    def draw(self, rng: random.Random, most: int) -> list[int]:
        """Up to `most` documents, the most popular first; a document drawn twice is one."""
        return sorted(set(rng.choices(range(len(self._sums)), cum_weights=self._sums, k=most)))

    def question(self, rng: random.Random, documents: Sequence[int], *, tokens: int, system: str) -> list[Message]:
        """Messages that ask something about `documents`, which stand before the question."""
        found = [f"[{document}] {words.named_text(f'document/{document}', self._tokens)}" for document in documents]
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": "\n\n".join([*found, words.text(rng, tokens)])},
        ]


class Row(msgspec.Struct, frozen=True):
    """One request of a trace. at_s : seconds since the first; lengths in tokens"""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _RawRow(msgspec.Struct):
    input_length: int
    output_length: int
    hash_ids: list[int]
    at_s: float | None = None
    timestamp: float | None = None  # milliseconds, as Mooncake's traces have it


def read_rows(path: Path) -> list[Row]:
    """Rows of a file of JSON lines, gzipped or not, in order of arrival.

    Raises
    ------
    ValueError : a line is no row, or names no moment; the message has its number.
    """
    decoder = msgspec.json.Decoder(_RawRow)
    rows = []
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                raw = decoder.decode(line)
            except msgspec.DecodeError as exc:
                raise ValueError(f"{path}, line {number}: {exc}") from exc
            at_s = raw.at_s if raw.timestamp is None else raw.timestamp / 1e3
            if at_s is None:
                raise ValueError(f"{path}, line {number}: neither at_s nor timestamp")
            rows.append(Row(at_s, raw.input_length, raw.output_length, raw.hash_ids))
    rows.sort(key=lambda row: row.at_s)
    return rows


def due(rows: Sequence[Row], factor: float) -> Iterator[tuple[float, Row]]:
    """Rows with the seconds after the first at which they are due, `factor` times faster than they were."""
    return ((((row.at_s - rows[0].at_s) / factor), row) for row in rows)


def row_messages(row: Row, *, salt: str, size: float = 1.0) -> list[Message]:
    """A prompt that shares as much with other rows as the trace's did: each id is the same text each time.

    size : lengths are so many times the trace's, ids included
    """
    characters = max(1, round(TOKENS_PER_ID * size)) * CHARACTERS_PER_TOKEN
    text = "".join(words.exact_text(f"{salt}/{hash_id}", characters) for hash_id in row.hash_ids)
    return [{"role": "user", "content": text[: max(1, round(row.input_length * size)) * CHARACTERS_PER_TOKEN]}]
