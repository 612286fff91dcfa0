"""Small fleets with exact steps and small traffic, for tests of bounds."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from loadtest.traffic import TrafficRow
from sim_backends import fleet as fleet_file
from sim_backends.fleet import Fleet

BLOCK = 64  # tokens behind an id and in a cache block: short prompts with prefixes in them


def fleet_text(*cards: str, block_tokens: int = BLOCK, speed: float = 1.0, **engine: Any) -> str:
    """The default fleet with these cards and exact steps."""
    plain = msgspec.to_builtins(fleet_file.built(replicas=len(cards), cards=list(cards), speed=speed))
    plain |= {"engine": {"jitter": 0.0, **engine}, "block_tokens": block_tokens}
    return json.dumps({key: value for key, value in plain.items() if value is not None})


def a_fleet(*cards: str, **settings: Any) -> Fleet:
    return fleet_file.parse(fleet_text(*cards, **settings), source="test")


def a_row(at_s: float = 0.0, *, tokens: int, ids: list[int] | None = None, output: int = 1) -> TrafficRow:
    known = list(range(-(-tokens // BLOCK))) if ids is None else ids
    return TrafficRow(at_s=at_s, input_length=tokens, output_length=output, hash_ids=known)


def random_rows(seed: int, *, requests: int, longest: int, gap_s: float, output: int = 1) -> list[TrafficRow]:
    """Conversations that grow: each prompt extends an earlier one or starts anew; some arrive together."""
    chance = random.Random(f"{seed}/rows")
    fresh = iter(range(10**6))
    prompts: list[list[int]] = []
    rows: list[TrafficRow] = []
    at_s = 0.0
    for _ in range(requests):
        at_s += chance.choice([0.0, chance.expovariate(1.0 / gap_s)])
        base = chance.choice(prompts) if prompts and chance.random() < 0.6 else []
        kept = base[: chance.randrange(len(base) + 1)]
        ids = kept + [next(fresh) for _ in range(chance.randrange(1, longest // BLOCK))]
        prompts.append(ids)
        cut = chance.randrange(BLOCK)
        rows.append(a_row(at_s, tokens=len(ids) * BLOCK - cut, ids=ids, output=chance.randrange(1, output + 1)))
    return rows


def unlike(at_s: float, tokens: int, number: int, *, output: int = 1) -> TrafficRow:
    """A prompt that shares nothing with those of other numbers."""
    return a_row(
        at_s, tokens=tokens, ids=[number * 1000 + block for block in range(-(-tokens // BLOCK))], output=output
    )
