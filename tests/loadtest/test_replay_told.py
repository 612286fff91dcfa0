"""Replays of fleets whose file says how replicas are told: engines and estimates follow the same words."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from estimators.paths import COLUMN, Path
from loadtest.replay.fleets import of_text
from loadtest.replay.results import Result
from loadtest.replay.run import Conditions, Replay
from tests.loadtest.test_replay import DEMO, demo_rows

REQUESTS = 150


def played(by: str, told: dict[str, Any] | None, **last: Any) -> tuple[Result, dict[str, int]]:
    """Results, and tokens that the engines fetched and used, by source. last : told the last replica alone"""
    parts = msgspec.yaml.decode((DEMO / "fleet.yaml").read_bytes())
    parts["links"]["nic"] = {"gb_s": 25}
    parts |= {"peers": {"link": "nic"}, "fetch": {**parts.get("fetch", {}), "by": by}}
    parts |= {} if told is None else {"told": told}
    parts["replicas"][-1] |= {"told": last} if last else {}
    run = Replay(of_text(msgspec.yaml.encode(parts).decode(), "f"), Conditions(directed=by == "directed"))
    result = run.run(demo_rows(REQUESTS))
    fetched: dict[str, int] = {}
    for engine in run.world.engines:
        assert engine.fetcher is not None
        for source, tokens in engine.fetcher.fetched_tokens.items():
            fetched[source] = fetched.get(source, 0) + tokens
    return result, fetched


def chosen(result: Result, path: Path) -> int:
    return int((result.path == COLUMN[path]).sum())


def test_replicas_that_are_told_nothing_play_as_engines_that_decide() -> None:
    (told_nothing, fetched), (alone, fetched_alone) = played("directed", {}), played("engine", None)
    assert np.array_equal(told_nothing.row, alone.row)
    assert np.array_equal(told_nothing.first_token_s, alone.first_token_s)
    assert told_nothing.predicted_s == pytest.approx(alone.predicted_s)
    assert fetched == fetched_alone
    assert fetched["store"] > 0


def test_replicas_that_read_peers_alone_fetch_from_nowhere_else() -> None:
    result, fetched = played("directed", {"peer": "header", "store": "never"})
    assert set(fetched) == {"peer"}
    assert chosen(result, Path.PEER) > 0
    assert chosen(result, Path.REMOTE) == 0


def test_replicas_that_read_neither_store_nor_peers_compute() -> None:
    result, fetched = played("directed", {"store": "never"})
    assert fetched == {}
    assert chosen(result, Path.REMOTE) == chosen(result, Path.PEER) == 0


def test_one_replica_may_be_told_otherwise_than_the_others() -> None:
    result, fetched = played("directed", {"store": "never"}, peer="body", store="never")
    read = result.path == COLUMN[Path.PEER]
    last = result.row == result.row.max()
    assert read.any()
    assert not read[~last].any()
    assert fetched["peer"] > 0
