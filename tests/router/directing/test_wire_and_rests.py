"""Bytes of tellings and of answers to them; when what fails is left alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.directing import wire
from router.directing.rests import FIRST_REST_S, LONGEST_REST_S, MOST_FAILURES, Rests
from router.directing.wire import BadReply

IDS = b"[1, 2,\n3]"


def test_a_peer_is_named_by_host_and_port_also_under_ipv6() -> None:
    assert wire.source_field("10.0.0.5", 8000) == (b"x-kv-cache-source-host-port", b"10.0.0.5:8000")
    assert wire.source_field("fd00::5", 8000)[1] == b"[fd00::5]:8000"
    member = json.loads(b"{" + wire.source_member("fd00::5", 7777, 'r"1') + b"}")
    assert member == {
        "remote_kv_source": {"kv_request_id": 'r"1', "remote_host": "fd00::5", "remote_port": 7777},
    }


def test_lmcache_gets_the_bodies_of_its_own_examples() -> None:
    moved = json.loads(wire.move_body(IDS, source="i1", target="i2", location="LocalCPUBackend"))
    assert moved == {
        "old_position": ["i1", "LocalCPUBackend"],
        "new_position": ["i2", "LocalCPUBackend"],
        "copy": True,
        "tokens": [1, 2, 3],
    }
    pinned = json.loads(wire.pin_body(IDS, instance="i1", location="LocalCPUBackend"))
    assert pinned == {"instance_id": "i1", "location": "LocalCPUBackend", "tokens": [1, 2, 3]}
    loaded = json.loads(wire.prefetch_body(IDS, instance="i1", model="m", world_size=2, salt="s"))
    assert loaded == {
        "instance_id": "i1",
        "model_name": "m",
        "world_size": 2,
        "cache_salt": "s",
        "token_ids": [1, 2, 3],
    }


def test_names_cannot_leave_their_place_in_a_path() -> None:
    assert wire.prefetch_path("a/../b", "x?y#z") == "/cache/prefetches/a%2F..%2Fb/x%3Fy%23z"


def test_answers_say_what_was_found_and_what_it_is_called() -> None:
    assert wire.found_tokens(b'{"event_id": "Move1", "num_tokens": 12}') == 12
    assert wire.prefetch_id(b'{"request_id": "abc", "chunks": 2, "status": "submitted"}') == "abc"
    assert wire.prefetch_id(b'{"chunks": 0, "status": "noop"}') is None


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b"{}", b'{"num_tokens": "12"}', b'{"num_tokens": -1}', b"\xff", b"[" * 100_000]
)
def test_rubbish_is_no_answer(answer: bytes) -> None:
    with pytest.raises(BadReply):
        wire.found_tokens(answer)
    with pytest.raises(BadReply):
        wire.prefetch_id(answer)


@given(st.binary(max_size=60))
def test_no_answer_does_more_than_be_refused(answer: bytes) -> None:
    for read in (wire.found_tokens, wire.prefetch_id):
        try:
            read(answer)
        except BadReply:
            continue


# Rests


def failed(rests: Rests, times: int, now_s: float) -> list[bool]:
    return [rests.failed(now_s) for _ in range(times)]


def test_failures_in_a_row_begin_a_rest_and_a_success_between_them_does_not() -> None:
    rests = Rests()
    assert failed(rests, MOST_FAILURES - 1, 0.0) == [False] * (MOST_FAILURES - 1)
    rests.worked()
    assert failed(rests, MOST_FAILURES, 1.0) == [False] * (MOST_FAILURES - 1) + [True]
    assert not rests.usable(1.0 + FIRST_REST_S - 0.01)
    assert rests.usable(1.0 + FIRST_REST_S)


def test_rests_grow_to_a_limit_and_what_fails_during_one_is_not_counted() -> None:
    rests, now_s, lengths_s = Rests(most=1), 0.0, []
    for _ in range(8):
        assert rests.failed(now_s)
        assert not rests.failed(now_s + 0.1)
        lengths_s.append(rests.until_s - now_s)
        now_s = rests.until_s
    assert lengths_s[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert lengths_s[-1] == max(lengths_s) == LONGEST_REST_S
    rests.worked()
    rests.failed(now_s)
    assert rests.until_s - now_s == FIRST_REST_S
