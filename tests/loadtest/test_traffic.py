from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.replay.bounds import ideal_busy_s
from loadtest.replay.slices import DEMO_LOAD, TraceRow, cut, sample_conversations, spread_arrivals
from loadtest.traffic import TOKENS_PER_ID, TrafficRow, prompt_tokens, read_traffic, write_traffic
from sim_backends import fleet as fleet_file

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
FLEET = fleet_file.read(DEMO / "fleet.yaml")


def a_row(hash_ids: list[int], length: int | None = None) -> TrafficRow:
    return TrafficRow(
        at_s=0.0, input_length=length or len(hash_ids) * TOKENS_PER_ID, output_length=9, hash_ids=hash_ids
    )


def a_trace() -> list[TraceRow]:
    """Six conversations of up to three turns, two requests at each coarse timestamp, block 0 common to all."""
    rows = []
    for turn in range(3):
        for talk in range(6):
            ids = [0, *range(100 * (talk + 1), 100 * (talk + 1) + 2 + turn)]
            rows.append(TraceRow(3000 * (turn * 3 + talk // 2), 512 * len(ids) - 5, 10, ids))
    return rows


def test_equal_hash_ids_are_equal_tokens_and_different_ones_are_not() -> None:
    first, second = prompt_tokens(a_row([0, 7, 8])), prompt_tokens(a_row([0, 7, 9]))
    assert first[:1024] == second[:1024]
    assert not set(zip(first[1024:], second[1024:], strict=True)) <= {(t, t) for t in first}


def test_the_last_id_is_cut_to_the_length() -> None:
    assert len(prompt_tokens(a_row([1, 2, 3], length=1030))) == 1030


def test_tokens_are_valid_for_any_current_model() -> None:
    tokens = prompt_tokens(a_row([10**6, 0, 182_790]))
    assert all(0 <= token < 150_000 for token in tokens)


def test_the_same_rows_are_written_as_the_same_bytes(tmp_path: Path) -> None:
    rows = [a_row([1, 2]), a_row([1, 3])]
    write_traffic(tmp_path / "a.gz", rows)
    write_traffic(tmp_path / "b.gz", rows)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert read_traffic(tmp_path / "a.gz") == rows


def test_whole_conversations_are_sampled_in_their_order() -> None:
    trace = a_trace()
    taken = sample_conversations(trace, 7, seed=3)
    assert taken == sorted(taken)
    talks = {trace[index].hash_ids[1] for index in taken}
    assert [i for i, row in enumerate(trace) if row.hash_ids[1] in talks] == taken
    assert taken != sample_conversations(trace, 7, seed=4)


def test_arrivals_keep_their_order_and_stay_between_their_timestamps() -> None:
    trace = a_trace()
    arrivals = spread_arrivals(trace, seed=1)
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) > len({row.timestamp for row in trace})
    for row, at_s in zip(trace, arrivals, strict=True):
        assert row.timestamp / 1000 <= at_s <= row.timestamp / 1000 + 3.0


@pytest.mark.parametrize("load", [0.25, 0.5, 0.9])
def test_the_cut_has_the_stated_ideal_load(load: float) -> None:
    trace = a_trace()
    rows = cut(trace, FLEET, requests=len(trace), load=load, seed=1)
    assert ideal_busy_s(FLEET, trace) / rows[-1].at_s == pytest.approx(load, rel=1e-4)


def test_ideal_work_counts_a_shared_prefix_once_and_the_block_with_the_last_token_each_time() -> None:
    """Of a prompt seen before a last full block is computed again, and what is no full block too."""
    for length, left in ((1024, 16), (1023, 15), (1025, 1)):
        once, new = (ideal_busy_s(FLEET, [TraceRow(0, tokens, 1, [1, 2, 3])]) for tokens in (length, left))
        again = ideal_busy_s(FLEET, [TraceRow(0, length, 1, [1, 2, 3])] * 2) - once
        assert new < again < 1.5 * new  # beside what the rest attends to


def test_the_shipped_slice_is_what_it_says() -> None:
    rows = read_traffic(DEMO / "traffic.jsonl.gz")
    assert 440 <= len(rows) <= 460
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    assert all(len(row.hash_ids) == -(-row.input_length // TOKENS_PER_ID) for row in rows)
    assert ideal_busy_s(FLEET, rows) / rows[-1].at_s == pytest.approx(DEMO_LOAD, rel=1e-4)
    assert "Apache" in (DEMO / "NOTICE").read_text()
