"""Builders that name only what a test of the simulated replicas is about."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from sim_backends import fleet as fleet_file
from sim_backends.engine import Engine, Outputs
from sim_backends.fleet import Fleet
from sim_backends.requests import EngineRequest, EngineSettings, Output
from sim_backends.service_times import ServiceTimes
from sim_backends.world import World, build

VECTORS = Path(__file__).parent.parent / "vectors"
_numbers = count()


def vector(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


def vector_bytes(name: str) -> bytes:
    return bytes.fromhex((VECTORS / name).read_text().strip())


def a_fleet(*cards: str, **sections: Any) -> Fleet:
    """The default fleet with these cards; sections as in the file, `engine` jitter 0 unless given."""
    base = fleet_file.built(replicas=len(cards) or 1, cards=list(cards) or ["A100"], speed=1.0)
    plain: dict[str, Any] = msgspec.to_builtins(base)
    plain["engine"] = {"jitter": 0.0, **sections.pop("engine", {})}
    plain.update(sections)
    return fleet_file.parse(json.dumps({k: v for k, v in plain.items() if v is not None}), source="test")


def a_world(
    *cards: str, use_store: bool = True, record_events: bool = False, outputs: Outputs = "all", **sections: Any
) -> World:
    return build(a_fleet(*cards, **sections), use_store=use_store, record_events=record_events, outputs=outputs)


def an_engine(
    *,
    card: str = "A100",
    kv_blocks: int = 1000,
    jitter: float = 0.0,
    seed: int = 0,
    record_events: bool = False,
    outputs: Outputs = "all",
    **settings: Any,
) -> Engine:
    """One card with Qwen3-8B and no store."""
    fleet = a_fleet()
    times = ServiceTimes(fleet.model, fleet.cards[card], speed=1.0, jitter=jitter, rng=random.Random(seed))
    use = EngineSettings(name="e", vocab=fleet.model.vocab, kv_blocks=kv_blocks, seed=seed, **settings)
    return Engine(use, times, record_events=record_events, outputs=outputs)


def prompt(tokens: int, *, start: int = 1000) -> list[int]:
    """Consecutive ids: prompts with different starts share nothing."""
    return list(range(start, start + tokens))


def a_request(
    tokens: list[int] | int = 64, *, output: int = 4, request_id: str | None = None, **more: Any
) -> EngineRequest:
    ids = prompt(tokens) if isinstance(tokens, int) else tokens
    more.setdefault("max_tokens", max(output, 16))
    return EngineRequest(request_id or f"r{next(_numbers)}", ids, output_tokens=output, **more)


def a_block_request(
    ids: list[int], tokens: int, *, output: int = 4, request_id: str | None = None, **more: Any
) -> EngineRequest:
    """A prompt of `tokens` tokens, given by the ids of its full blocks."""
    more.setdefault("max_tokens", max(output, 16))
    name = request_id or f"r{next(_numbers)}"
    return EngineRequest(name, block_ids=ids, prompt_tokens=tokens, output_tokens=output, **more)


def run_out(driven: Engine | World) -> list[Output]:
    """All outputs until nothing is left to do."""
    outputs: list[Output] = []
    due_s = driven.next_due_s()
    while due_s is not None:
        outputs.extend(driven.advance(due_s))
        due_s = driven.next_due_s()
    return outputs


def first_tokens(outputs: list[Output]) -> dict[str, float]:
    """Time of each request's first token, in order of time."""
    return {output.request_id: output.at_s for output in outputs if output.index == 0}
