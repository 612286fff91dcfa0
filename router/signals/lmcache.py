"""LMCache's two look-ups, as bytes: what to ask, and what an answer surely says of the leading tokens of a prompt.

Model     controller: POST /lookup {"tokens"} -> {"layout_info": {instance: [location, end]}}. It walks chunks up to the
          first miss and writes for each chunk only the first instance that has it, so an instance's entry is its last
          chunk and not a prefix: only an instance that is alone in the answer, or whose entry ends with the first
          chunk, surely holds all tokens up to its end.
          coordinator: POST /directory/lookup {"token_ids", "model_name", ...} -> each chunk's placements, for each rank
          of the model. An instance holds a chunk when it holds it for all ranks; an older incarnation holds nothing
Valid     LMCache 0.5.6: the controller of in-process LMCache, the coordinator of its multiprocess servers; prompts
          from position 0, whole chunks only
Blind to  the controller's model: its answer is about tokens alone, so ask one controller for each model. Where one
          instance has a prompt in memory and on disk, the location is that of its last chunk
Errors    only towards fewer tokens; an answer that does not fit the question is `BadAnswer`
Source    recorded exchanges in tests/vectors; LMCache's controller and coordinator schemas
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from estimators.tiers import Tier

CONTROLLER_PATH = "/lookup"
COORDINATOR_PATH = "/directory/lookup"
CHUNK_TOKENS = 256  # LMCache's default

# Other backends exist; what tier they are is not known, so what they hold counts for nothing.
_LOCATIONS = {"LocalCPUBackend": Tier.HOST, "LocalDiskBackend": Tier.DISK}
_TIERS = {"l1": Tier.HOST, "l2": Tier.DISK}


class BadAnswer(ValueError):
    """An answer that is not one to the question; the message says why."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Leading tokens of a prompt that one holder surely has.

    instance : LMCache's name of the holder; None for a pool that all instances share
    tier : HOST or DISK of an instance; REMOTE for a shared pool
    tokens : > 0; the controller may count an unfinished last chunk
    """

    instance: str | None
    tier: Tier
    tokens: int


class _Controller(msgspec.Struct, frozen=True):
    layout_info: dict[str, tuple[str, int]]


class _Key(msgspec.Struct, frozen=True):
    chunk_hash_hex: str
    kv_rank: int = 0
    object_group_id: int = 0


class _Placement(msgspec.Struct, frozen=True):
    instance_id: str
    tier: str
    incarnation: int = 0
    shared: bool = False


class _Result(msgspec.Struct, frozen=True):
    key: _Key
    placements: list[_Placement]


class _Coordinator(msgspec.Struct, frozen=True):
    chunks: int
    results: list[_Result]


_CONTROLLER = msgspec.json.Decoder(_Controller)
_COORDINATOR = msgspec.json.Decoder(_Coordinator)


# Controller


def controller_question(tokens: Sequence[int]) -> bytes:
    """Body of POST /lookup."""
    return msgspec.json.encode({"tokens": list(tokens)})


def controller_answer(body: bytes, *, tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> list[Holding]:
    """What the instances in an answer surely hold.

    tokens : in the question; chunk_tokens : LMCache's chunk, >= 1

    Raises
    ------
    BadAnswer : no such answer, or it speaks of more tokens than were asked about
    """
    try:
        layout = _CONTROLLER.decode(body).layout_info
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadAnswer(f"not an answer of LMCache's controller: {exc}") from exc
    holdings = []
    for instance, (location, end) in layout.items():
        if not 0 < end <= tokens:
            raise BadAnswer(f"instance {instance} has {end} of {tokens} tokens")
        tier = _LOCATIONS.get(location)
        is_sure = len(layout) == 1 or end <= chunk_tokens
        if tier is not None and is_sure:
            holdings.append(Holding(instance, tier, end))
    return holdings


# Coordinator


def coordinator_question(tokens: Sequence[int], *, model: str, ranks: int = 1, salt: str = "") -> bytes:
    """Body of POST /directory/lookup.

    model : as LMCache's servers name it; ranks : world size of one engine, >= 1
    """
    return msgspec.json.encode(
        {"token_ids": list(tokens), "model_name": model, "world_size": ranks, "cache_salt": salt}
    )


def coordinator_answer(
    body: bytes,
    *,
    tokens: int,
    ranks: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
    incarnations: dict[str, int] | None = None,
) -> list[Holding]:
    """What instances and shared pools hold, each tier of each alone and without a gap.

    tokens, ranks : as in the question
    incarnations : highest seen of each instance, kept by the caller from answer to answer and brought up to date here

    Raises
    ------
    BadAnswer : no such answer, or its chunks are not those of the question (another chunk size)
    """
    try:
        answer = _COORDINATOR.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadAnswer(f"not an answer of LMCache's coordinator: {exc}") from exc
    if answer.chunks != tokens // chunk_tokens:
        raise BadAnswer(f"{answer.chunks} chunks for {tokens} tokens: its chunks are not of {chunk_tokens} tokens")
    newest = {} if incarnations is None else incarnations
    for placement in (each for result in answer.results for each in result.placements):
        newest[placement.instance_id] = max(placement.incarnation, newest.get(placement.instance_id, 0))
    chunks = _by_chunk(answer, ranks)
    leading: dict[tuple[str | None, Tier], int] = {}
    for number, parts in enumerate(chunks):
        holders = set.intersection(*(_holders(part, newest) for part in parts))
        for holder in holders:
            if leading.get(holder, 0) == number:
                leading[holder] = number + 1
    return [Holding(instance, tier, count * chunk_tokens) for (instance, tier), count in leading.items()]


def _by_chunk(answer: _Coordinator, ranks: int) -> list[list[_Result]]:
    """Results of each chunk, in order. Chunk hashes are chained, so none comes twice in one prompt."""
    chunks: dict[str, list[_Result]] = {}
    for result in answer.results:
        chunks.setdefault(result.key.chunk_hash_hex, []).append(result)
    parts = [sorted((one.key.kv_rank, one.key.object_group_id) for one in results) for results in chunks.values()]
    whole = all(part == parts[0] and len({rank for rank, _ in part}) == ranks for part in parts)
    if len(chunks) != answer.chunks or not whole:
        raise BadAnswer(f"{len(answer.results)} results do not make {answer.chunks} whole chunks")
    return list(chunks.values())


def _holders(result: _Result, newest: Mapping[str, int]) -> set[tuple[str | None, Tier]]:
    holders: set[tuple[str | None, Tier]] = set()
    for placement in result.placements:
        tier = _TIERS.get(placement.tier)
        if placement.incarnation < newest[placement.instance_id]:
            continue
        if placement.shared:
            holders.add((None, Tier.REMOTE))
        elif tier is not None:
            holders.add((placement.instance_id, tier))
    return holders


# What a client needs of either


@dataclass(frozen=True, slots=True)
class Controller:
    """The look-up of one model's controller."""

    chunk_tokens: int = CHUNK_TOKENS
    path: str = CONTROLLER_PATH

    def question(self, tokens: Sequence[int], *, salt: str) -> bytes | None:
        """None for a salted prompt: the controller knows tokens only and would answer for the unsalted one."""
        return None if salt else controller_question(tokens)

    def answer(self, body: bytes, *, tokens: int) -> list[Holding]:
        return controller_answer(body, tokens=tokens, chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The look-up of one model at a coordinator; remembers incarnations. model, ranks : see `coordinator_question`."""

    model: str
    ranks: int = 1
    chunk_tokens: int = CHUNK_TOKENS
    path: str = COORDINATOR_PATH
    incarnations: dict[str, int] = field(default_factory=dict)

    def question(self, tokens: Sequence[int], *, salt: str) -> bytes | None:
        return coordinator_question(tokens, model=self.model, ranks=self.ranks, salt=salt)

    def answer(self, body: bytes, *, tokens: int) -> list[Holding]:
        return coordinator_answer(
            body,
            tokens=tokens,
            ranks=self.ranks,
            chunk_tokens=self.chunk_tokens,
            incarnations=self.incarnations,
        )
