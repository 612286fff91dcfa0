"""Traffic as a file of requests, and the prompts made from it.

A trace holds no text, only one id for each 512 tokens of a prompt: equal ids mean equal tokens. So a prompt is made
by spelling every id as the same 512 token ids each time; prefixes are shared exactly as they were in the service the
trace was taken from.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec

TOKENS_PER_ID = 512
VOCABULARY = 150_000  # token ids stay below it, so that any current model accepts them
_MULTIPLIER = 2_654_435_761  # Knuth's multiplicative hash, to spread neighbouring ids


class TrafficRow(msgspec.Struct, frozen=True):
    """One request. at_s : seconds after the first, on cards of normal speed; lengths in tokens."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_traffic(path: Path) -> list[TrafficRow]:
    """Rows of a gzipped JSON-lines file, in order of arrival."""
    decoder = msgspec.json.Decoder(TrafficRow)
    with gzip.open(path) as lines:
        return [decoder.decode(line) for line in lines]


def write_traffic(path: Path, rows: list[TrafficRow]) -> None:
    """Write `rows`; the same rows give the same bytes."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
        for row in rows:
            packed.write(encoder.encode(row) + b"\n")


def prompt_tokens(row: TrafficRow) -> list[int]:
    """Token ids of the prompt of `row`, `input_length` of them; the last id's tokens are cut."""
    tokens: list[int] = []
    for hash_id in row.hash_ids:
        first = hash_id * TOKENS_PER_ID
        tokens += [(first + i) * _MULTIPLIER % 2**32 % VOCABULARY for i in range(TOKENS_PER_ID)]
    return tokens[: row.input_length]
