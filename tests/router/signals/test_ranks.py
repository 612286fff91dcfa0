from __future__ import annotations

import pytest

from router.signals.ranks import configured_addresses, rank_address, row_of_topic, rows_by_url


def test_replicas_that_share_a_url_are_its_ranks_in_listed_order() -> None:
    assert rows_by_url(["http://a", "http://b", None, "http://a/", "http://a"]) == {
        "http://a": [0, 3, 4],
        "http://b": [1],
    }


def test_each_rank_publishes_one_port_higher() -> None:
    assert [rank_address("tcp://*:5557", rank) for rank in range(3)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert rank_address("tcp://[fd00::1]:5557", 1) == "tcp://[fd00::1]:5558"
    assert rank_address("inproc://kv", 2) == "inproc://kv_dp2"
    assert rank_address("ipc:///tmp/kv", 0) == "ipc:///tmp/kv"


@pytest.mark.parametrize("base", ["ipc:///tmp/kv", "tcp://host", "tcp://host:65535", "tcp://*:*", "tcp://host:0"])
def test_an_address_without_a_port_to_add_to_has_no_ranks(base: str) -> None:
    with pytest.raises(ValueError, match="no port for rank 1"):
        rank_address(base, 1)


def test_a_rank_uses_its_own_address_else_that_of_rank_0_shifted() -> None:
    addresses = {0: "tcp://h:5557", 1: None, 2: "tcp://h:7000", 3: None, 4: None}
    assert configured_addresses(addresses, [0, 1, 2, 3]) == {
        0: "tcp://h:5557",
        1: "tcp://h:5558",
        2: "tcp://h:7000",
        3: "tcp://h:5560",
    }
    assert configured_addresses(addresses, [4]) == {}


URLS = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.2:8000"]


@pytest.mark.parametrize(
    ("topic", "rank", "row"),
    [
        ("kv@10.0.0.1:8000@m1", None, 0),
        ("kv@10.0.0.1:8000@org/m1@v2", 0, 0),
        ("kv@10.0.0.1:8000@m1", 1, None),  # listed once: which of its ranks takes a request, nobody knows
        ("kv@10.0.0.2:8000@m1", 0, 1),
        ("kv@10.0.0.2:8000@m1", 1, 2),
        ("kv@10.0.0.2:8000@m1", None, None),
        ("kv@10.0.0.2:8000@m1", 2, None),
        ("kv@10.0.0.9:8000@m1", 0, None),
        ("kv-events", 2, None),  # ranks of different servers are numbered alike
        ("", 0, None),
        ("", -1, None),
        ("", None, None),
    ],
)
def test_a_shared_socket_tells_rows_apart_by_topic_then_by_rank(topic: str, rank: int | None, row: int | None) -> None:
    assert row_of_topic(topic, URLS, [0, 1, 2], rank) == row


@pytest.mark.parametrize(("rank", "row"), [(0, 1), (1, 2), (2, None), (None, None)])
def test_without_a_telling_topic_a_socket_of_one_server_tells_its_ranks_apart(
    rank: int | None, row: int | None
) -> None:
    assert row_of_topic("", URLS, [1, 2], rank) == row
