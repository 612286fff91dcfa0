from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from estimators.hit_probability import HitProbability
from estimators.links import LinkTable
from estimators.paths import COLUMN, Path
from estimators.routes import Held, Routes
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from estimators.whereabouts import Whereabouts

ROWS, PROMPT = 3, 1000.0
NOTHING_BY_TIER = np.full((4, ROWS), np.nan)
HOST, DISK, REMOTE, PEER = (COLUMN[path] for path in (Path.HOST, Path.DISK, Path.REMOTE, Path.PEER))

blocks = st.lists(st.integers(0, 70), min_size=ROWS, max_size=ROWS)


def whereabouts(*, engine_decides: bool = True, minimum_fetch_tokens: int = 1) -> Whereabouts:
    """Everything there can be: a store, peers and tiers."""
    every = range(ROWS)
    table = LinkTable(bytes_per_s=[1e9] * (1 + 3 * ROWS))
    routes = Routes(
        table=table,
        store=[[0] for _ in every],
        host=[[1 + row] for row in every],
        disk=[[1 + ROWS + row] for row in every],
        egress=[1 + 2 * ROWS + row for row in every],
    )
    return Whereabouts(
        routes=routes,
        costs=costs_of(QWEN3_8B),
        minimum_fetch_tokens=minimum_fetch_tokens,
        engine_decides=engine_decides,
    )


def holding(hbm: list[int], host: list[int], disk: list[int], store: int) -> Held:
    """Each place has at least what the ones before it have."""
    columns = np.maximum.accumulate(np.array([hbm, host, disk], dtype=np.int32), axis=0)
    return Held(columns[0], store, columns[1], columns[2])


@given(hbm=blocks, host=blocks, disk=blocks, store=st.integers(0, 70), least=st.sampled_from([1, 200]))
def test_an_engine_that_decides_takes_exactly_one_path(
    hbm: list[int], host: list[int], disk: list[int], store: int, least: int
) -> None:
    where, held = whereabouts(minimum_fetch_tokens=least), holding(hbm, host, disk, store)
    reused = where.reused_tokens(held, where.peers(held, 0.0), block_tokens=16, prompt=PROMPT)
    possible = where.possible(reused, reused[0] == 0.0, where.moved_bytes(reused), None)
    assert possible.sum(axis=0).tolist() == [1] * ROWS


@given(hbm=blocks, host=blocks, disk=blocks, store=st.integers(0, 70))
def test_what_the_places_move_is_what_is_reused_beyond_hbm(
    hbm: list[int], host: list[int], disk: list[int], store: int
) -> None:
    where, held = whereabouts(), holding(hbm, host, disk, store)
    reused = where.reused_tokens(held, where.peers(held, 0.0), block_tokens=16, prompt=PROMPT)
    moved = where.moved_bytes(reused)
    tiers = moved[HOST - REMOTE] + moved[DISK - REMOTE]
    size = costs_of(QWEN3_8B).kv_bytes
    assert np.allclose(tiers, size(reused[DISK] - reused[0]))
    assert np.allclose(tiers + moved[0], size(reused[REMOTE] - reused[0]))
    assert np.allclose(tiers + moved[PEER - REMOTE], size(reused[PEER] - reused[0]))
    assert np.allclose(moved[-1], size(min(store * 16.0, PROMPT - 1)))
    assert reused.max() < PROMPT


@given(hbm=blocks, host=blocks, disk=blocks, store=st.integers(0, 70))
def test_that_all_is_there_or_the_store_helps_is_never_more_than_certain(
    hbm: list[int], host: list[int], disk: list[int], store: int
) -> None:
    where, held = whereabouts(), holding(hbm, host, disk, store)
    peers = where.peers(held, 0.0)
    reused = where.reused_tokens(held, peers, block_tokens=16, prompt=PROMPT)
    hits = HitProbability([f"r{row}" for row in range(ROWS)])
    hit, stored = where.hits(hits, held, reused, reused[0] == 0.0, peers, 0.0)
    assert np.all((hit > 0.0) & (stored >= 0.0) & (hit + stored <= 1.0 + 1e-12))
    assert np.all(hit[COLUMN[Path.RECOMPUTE]] == 1.0)
    assert np.all(hit[DISK] <= hit[HOST])
    assert np.all(hit[HOST] <= hit[COLUMN[Path.LOCAL]])
