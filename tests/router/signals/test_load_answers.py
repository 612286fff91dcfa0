from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.signals.load import Load, pick
from router.signals.load_answers import loads_of_get_load, loads_of_v1, stat_of
from router.signals.wire import BadFrame
from tests.router.signals.events import VECTORS, vector


def recorded(name: str) -> bytes:
    return (VECTORS / f"{name}.json").read_bytes()


def test_v1_loads_tells_each_rank() -> None:
    assert loads_of_v1(recorded("sglang_v1_loads")) == {
        "0": Load(
            running=7,
            waiting=3,
            waiting_tokens=4096,
            kv_usage=0.24,
            used_tokens=120000,
            max_tokens=500000,
            max_running=256,
            cache_hit_rate=0.61,
            prefill_tokens=987654,
            prefill_busy_s=12345678 * 1e-6,
        )
    }


def test_get_load_counts_running_and_waiting_together_and_is_told_apart() -> None:
    assert loads_of_get_load(recorded("sglang_get_load_legacy")) == {
        "0": Load(running=7, waiting=3, used_tokens=140000)
    }
    only_total = json.dumps([{"dp_rank": 1, "num_reqs": 5}]).encode()
    assert loads_of_get_load(only_total) == {"1": Load()}, "without the queue the rest cannot be told from it"


def test_the_load_socket_says_the_same_as_v1_loads() -> None:
    rank, load = stat_of(vector("load_sglang_0.5.23_loadstat"))
    (polled,) = loads_of_v1(recorded("sglang_v1_loads")).values()
    polled.cache_hit_rate = None  # the socket does not say
    assert (rank, load) == ("0", polled)


def test_an_older_socket_without_the_later_items_is_read() -> None:
    payload = msgspec.msgpack.encode(["LoadStat", 7, 3, 120000, 500000, 2])
    assert stat_of(payload) == (
        "2",
        Load(running=7, waiting=3, used_tokens=120000, max_tokens=500000, kv_usage=0.24),
    )


@pytest.mark.parametrize("items", [[], ["LoadStat", 1], ["Other", 1, 2, 3, 4, 5], {"a": 1}, 7])
def test_a_payload_that_is_no_report_raises(items: object) -> None:
    with pytest.raises(BadFrame):
        stat_of(msgspec.msgpack.encode(items))


def test_two_ranks_are_read_apart_and_summed_together() -> None:
    body = json.dumps(
        {"loads": [{"dp_rank": rank, "num_running_reqs": rank + 1, "num_waiting_reqs": 5 * rank} for rank in (0, 1)]}
    ).encode()
    loads = loads_of_v1(body)
    assert (pick(loads, "1").waiting, pick(loads, None).running, pick(loads, None).waiting) == (5, 3, 5)


@pytest.mark.parametrize("value", [-1, 1.5, "7", True, [1]])
def test_a_value_that_means_nothing_is_unknown_and_counted(value: Any) -> None:
    loads = loads_of_v1(json.dumps({"loads": [{"token_usage": value, "num_running_reqs": 0}]}).encode())
    assert loads == {"0": Load(running=0, anomalies=1)}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"loads": 5}', b'{"loads": [null, 7]}', b"[" * 100_000])
def test_an_answer_that_is_no_report_names_no_rank(body: bytes) -> None:
    assert loads_of_v1(body) == {}
    assert loads_of_get_load(body) == {}


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e300000", "-" + "9" * 400, "1e301"])
def test_a_number_no_engine_could_mean_is_unknown_and_counted(number: str) -> None:
    for answered in (
        loads_of_v1(b'{"loads": [{"num_running_reqs": %s, "token_usage": %s}]}' % ((number.encode(),) * 2)),
        loads_of_get_load(b'[{"num_waiting_reqs": %s, "num_tokens": %s}]' % ((number.encode(),) * 2)),
    ):
        load = answered.get("0", Load(anomalies=2))  # the decoder may refuse the whole
        assert load == Load(anomalies=2)


def test_entries_that_name_no_rank_are_ranks_of_their_own() -> None:
    entries = [{"num_running_reqs": 1}, {"num_running_reqs": 2}]
    loads = loads_of_v1(json.dumps({"loads": entries}).encode())
    assert pick(loads, None).running == 3
    waiting = [{"num_waiting_reqs": 1}, {"num_waiting_reqs": 2}]
    assert pick(loads_of_get_load(json.dumps(waiting).encode()), None).waiting == 3


@pytest.mark.parametrize("entries", [[{"dp_rank": 1}, {}], [{}, {"dp_rank": 0}], [{"dp_rank": 0}, {}], [{}, {}]])
def test_an_entry_that_names_no_rank_takes_no_other_s_place(entries: list[dict[str, int]]) -> None:
    entries = [{**entry, "num_running_reqs": 1 + 8 * place} for place, entry in enumerate(entries)]
    loads = loads_of_v1(json.dumps({"loads": entries}).encode())
    assert set(loads) == {"0", "1"}
    assert pick(loads, None).running == 10
    for entry in entries:
        if "dp_rank" in entry:
            assert loads[str(entry["dp_rank"])].running == entry["num_running_reqs"]
    assert set(loads_of_get_load(json.dumps(entries).encode())) == set(loads)
