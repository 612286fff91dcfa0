"""The table and the index against dictionaries and sets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.tiers import Tier
from router.blocks import table
from router.blocks.chain_index import ChainIndex, as_hashes
from router.blocks.table import BlockTable

# Few keys that share their low bits, so that buckets fill up; 0 is the key that marks a free place.
KEYS = st.one_of(
    st.integers(0, 60),
    st.integers(0, 40).map(lambda n: n << 16),
    st.integers(0, 2**64 - 1).filter(lambda key: key != table._ZERO),  # the number 0 is kept under
)
STEPS = st.lists(st.tuples(st.sampled_from(["one", "many", "drop", "drop many"]), st.lists(KEYS, max_size=70)))


def check(table: BlockTable, model: dict[int, int]) -> None:
    assert len(table) == len(model)
    assert set(table.keys().tolist()) == model.keys()
    asked = [*model, 61, 2**63 + 5]
    positions = table.find_many(as_hashes(asked)).tolist()
    assert positions == [table.find(key) for key in asked]
    assert positions == table.find_runs(as_hashes(asked)).tolist()
    for key, position in zip(asked, positions, strict=True):
        assert (position >= 0) == (key in model)
        assert position < 0 or table.views[0][position] == model[key]
    assert len({position for position in positions if position >= 0}) == len(model)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_table_is_a_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    table, model = BlockTable(np.uint64, np.uint8), dict[int, int]()
    for value, (kind, keys) in enumerate(steps, 1):
        if kind == "one":
            for key in keys:
                position = table.insert(key)
                assert (position < 0) == (key not in model)
                table.views[0][~position if position < 0 else position] = value
                model[key] = value
        elif kind == "many":
            new = list(dict.fromkeys(key for key in keys if key not in model))
            positions = table.insert_many(as_hashes(new))
            assert not table.columns[0][positions].any()  # a new key starts with zeros
            table.columns[0][positions] = value
            model.update(dict.fromkeys(new, value))
        else:
            held = list(dict.fromkeys(key for key in [*keys, *list(model)[:9]] if key in model))
            if kind == "drop":
                for key in held:
                    table.remove(table.find(key))
            else:
                table.remove_many(table.find_many(as_hashes(held)))
            for key in held:
                del model[key]
        check(table, model)


@pytest.mark.parametrize("count", range(1, 40))
def test_a_run_that_ends_with_the_room_there_is_has_no_row_beyond_it(count: int) -> None:
    table = BlockTable(np.uint64, most=1)
    keys = as_hashes(range(1, count + 1))
    for key in keys.tolist():
        table.insert(key)
        assert table.find_runs(keys).tolist() == table.find_many(keys).tolist()


def test_columns_keep_their_values_while_the_table_grows_and_shrinks() -> None:
    table, chance = BlockTable(np.uint64, np.uint32), np.random.default_rng(4)
    keys = np.unique(chance.integers(0, 2**64, 5000, dtype=np.uint64))
    for start in range(0, len(keys), 611):
        positions = table.insert_many(keys[start : start + 611])
        table.columns[0][positions] = keys[start : start + 611] >> np.uint64(1)
    late = table.add_column(np.uint16)
    table.columns[late][table.find_many(keys)] = (keys & np.uint64(0xFFFF)).astype(np.uint16)
    table.remove_many(table.find_many(keys[::2]))
    left = keys[1::2]
    positions = table.find_many(left)
    assert (table.columns[0][positions] == left >> np.uint64(1)).all()
    assert (table.columns[late][positions] == left & np.uint64(0xFFFF)).all()
    assert sorted(table.where(late, int(left[7] & np.uint64(0xFFFF))).tolist()) == sorted(
        positions[left & np.uint64(0xFFFF) == left[7] & np.uint64(0xFFFF)].tolist()
    )
    assert table.nbytes > 0
    table.clear()
    assert (len(table), table.find(int(left[0]))) == (0, -1)


def test_what_comes_and_goes_takes_no_more_memory() -> None:
    table, chance = BlockTable(np.uint64, np.uint32), np.random.default_rng(4)
    window: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []
    sizes = []
    for _ in range(60):
        window.append(chance.integers(0, 2**64, 500, dtype=np.uint64))
        table.insert_many(window[-1])
        if len(window) > 8:
            table.remove_many(table.find_many(window.pop(0)))
            sizes.append(table.nbytes)
    assert max(sizes) <= 1.1 * min(sizes)


# The index

HOLDERS = 70  # more than one column of bits
ADDS = st.lists(
    st.tuples(st.integers(0, HOLDERS - 1), st.integers(0, 7), st.sampled_from([Tier.HBM, Tier.HOST])), max_size=60
)


def leading(index: ChainIndex, tier: Tier, chain: list[int]) -> list[int]:
    return [int(count) for count in index.leading(tier, index.positions(chain))]


def position(index: ChainIndex, block: int) -> int:
    return int(index.positions([block])[0])


@settings(max_examples=60, deadline=None)
@given(ADDS, st.lists(st.integers(0, 100), max_size=40), st.booleans())
def test_the_index_finds_the_prefix_a_walk_finds(
    adds: list[tuple[int, int, Tier]], drops: list[int], one_by_one: bool
) -> None:
    index, model = ChainIndex(HOLDERS, most=1), Counter[tuple[int, int, Tier]]()
    chain = [10 + block for block in range(8)]
    for tier in (Tier.HBM, Tier.HOST):
        those = [(holder, chain[block]) for holder, block, of in adds if of is tier]
        for holder, block in those:
            model[holder, block, tier] += 1
            if one_by_one:
                index.add(tier, holder, block, block + 1)
        if not one_by_one and those:
            holders, blocks = (np.array(column, dtype=np.uint64) for column in zip(*those, strict=True))
            index.add_many(tier, holders.astype(np.uint32), blocks, blocks + np.uint64(1))
    held = [add for add, count in model.items() for _ in range(count)]
    gone = [held[drop % len(held)] for drop in drops] if held else []
    for tier in (Tier.HBM, Tier.HOST):
        those = [(holder, block) for holder, block, of in Counter(gone) & model if of is tier]
        if one_by_one:
            for holder, block in those:
                index.discard(tier, holder, position(index, block))
        elif those:
            holders, blocks = (np.array(column, dtype=np.uint64) for column in zip(*those, strict=True))
            at = np.array([position(index, block) for block in blocks.tolist()])
            index.discard_many(tier, holders.astype(np.uint32), at)
        for holder, block in those:
            model[holder, block, tier] -= 1
    for tier in (Tier.HBM, Tier.HOST):
        want = []
        for holder in range(HOLDERS):
            count = 0
            while count < 8 and model[holder, chain[count], tier] > 0:
                count += 1
            want.append(count)
        assert leading(index, tier, chain) == want
        somebody = {block for (_holder, block, of), count in model.items() if of is tier and count > 0}
        assert index.blocks[tier] == len(somebody)
        together = next((depth for depth, block in enumerate(chain) if block not in somebody), 8)
        assert index.leading_any(tier, index.positions(chain)) == together
    both = (Tier.HBM, Tier.HOST)
    for holder, count in enumerate(index.leading_together(both, index.positions(chain)).tolist()):
        there = [any(model[holder, block, tier] > 0 for tier in both) for block in chain]
        assert count == (there.index(False) if False in there else 8)
    assert [index.has_any(tier) for tier in both] == [index.blocks[tier] > 0 for tier in both]
    assert set(index.blocks_held()) == {block for (_h, block, _t), count in model.items() if count > 0}


def test_a_long_chain_is_found_to_its_end_wherever_it_ends() -> None:
    index, chain = ChainIndex(2, most=1), list(range(1, 5001))
    blocks = as_hashes(chain)
    index.add_many(Tier.HBM, np.zeros(5000, dtype=np.uint32), blocks, blocks)
    for end in (1, 511, 512, 513, 2500, 4999):
        index.add_many(Tier.HOST, np.ones(end, dtype=np.uint32), blocks[:end], blocks[:end])
        assert leading(index, Tier.HOST, chain) == [0, end]
        assert leading(index, Tier.HBM, [*chain[:end], *range(10**6, 10**6 + 5000 - end)]) == [end, 0]
        index.discard_many(Tier.HOST, np.ones(end, dtype=np.uint32), index.positions(blocks[:end]))
    index.discard(Tier.HBM, 0, position(index, 3))
    assert leading(index, Tier.HBM, chain) == [2, 0]
    assert leading(index, Tier.HBM, []) == [0, 0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 15, 16, 40, 700]), max_size=12), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_a_chain_announced_in_pieces_is_found_wherever_the_pieces_lie(pieces: list[int], seed: int, at: float) -> None:
    index, chance = ChainIndex(1, most=1), np.random.default_rng(seed)
    holder = np.zeros(sum(pieces), dtype=np.uint32)
    other = chance.integers(1, 2**63, 64, dtype=np.uint64)  # its rows are taken again, so that pieces are torn apart
    index.add_many(Tier.HBM, holder[:1].repeat(64), other, other)
    index.discard_many(Tier.HBM, holder[:1].repeat(64), index.positions(other))
    chain = chance.integers(1, 2**63, sum(pieces), dtype=np.uint64)
    parts = np.split(chain, np.cumsum(pieces)[:-1]) if pieces else []
    for number in chance.permutation(len(parts)).tolist():
        index.add_many(Tier.HBM, holder[: len(parts[number])], parts[number], parts[number])
    positions = index.positions(chain)
    assert (index.blocks_at(positions) == chain).all()
    assert len(positions) == len(chain)
    if pieces:
        gap = min(int(at * len(chain)), len(chain) - 1)
        index.discard(Tier.HBM, 0, int(positions[gap]))
        assert index.positions(chain).tolist() == positions[:gap].tolist()
        assert index.positions(chain.tolist()).tolist() == positions[:gap].tolist()


def test_keys_inserted_together_lie_side_by_side_where_others_did_before() -> None:
    table, chance = BlockTable(np.uint64), np.random.default_rng(4)
    keys = chance.integers(1, 2**63, 192, dtype=np.uint64)
    first = table.insert_many(keys[:64])
    table.insert_many(keys[64:128])
    table.remove_many(first[::-1])  # engines give up the end of a prompt first
    assert table.insert_many(keys[128:]).tolist() == first.tolist()
    assert table.find_run(keys[128:]).tolist() == first.tolist()
    assert table.find_run(np.concatenate((keys[130:140], keys[:1]))).tolist() == first[2:12].tolist()
    assert table.find_run(keys[:9]).tolist() == []


def test_the_key_zero_is_found_like_any_other() -> None:
    table = BlockTable(np.uint8)
    table.insert_many(as_hashes([7, 0, 9]))
    assert table.find_many(as_hashes([0, 7, 9])).tolist() == [2, 1, 3]
    assert (table.find_run(as_hashes([0, 9])).tolist(), table.key_at(2)) == ([2], 0)
    table.remove(2)
    assert (table.find(0), sorted(table.keys().tolist())) == (-1, [7, 9])


def test_arrays_and_lists_of_hashes_give_the_same() -> None:
    index = ChainIndex(1, most=1)
    for block in (5, 2**64 - 1):
        index.add(Tier.HBM, 0, block, 7)
    chain = [5, 2**64 - 1, 6]
    assert leading(index, Tier.HBM, chain) == [2]
    assert index.leading(Tier.HBM, index.positions(np.array(chain, dtype=np.uint64))).tolist() == [2]
    assert (index.engine_hash(5), index.engine_hash(6)) == (7, None)
