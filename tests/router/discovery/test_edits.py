"""Admin calls change what is wanted, each refusal says what is wrong, and nothing is changed by one that is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.discovery.edits import Edits, Reply
from router.discovery.reconcile import merged
from router.errors import ConfigError
from router.fleet import ReplicaSpec

A = ReplicaSpec(name="a", url="http://a:8000")
B = ReplicaSpec(name="b", url="http://b:8000")
RANKS = [ReplicaSpec(name=f"r{rank}", url="http://s:8000") for rank in range(2)]


class Lists:
    """Edits over one list, looked at after every call."""

    def __init__(self, *listed: ReplicaSpec, room: int = 9) -> None:
        self.listed = list(listed)
        self.room = room
        self.edits = Edits(check=self._check, room=lambda: self.room)
        self.look()

    def _check(self, replica: ReplicaSpec) -> None:
        if "169.254" in (replica.url or ""):
            raise ConfigError("no replica may be there")

    def look(self) -> list[str]:
        found, _ = merged([("file", self.listed), ("admin", self.edits.added)])
        return [replica.name for replica in self.edits.laid_over(found)]

    def call(self, what: str, body: Any) -> tuple[int, list[str]]:
        """Status, and who is wanted then."""
        status, _ = self.answer(what, body)
        return status, self.look()

    def answer(self, what: str, body: Any) -> Reply:
        calls = {"add": self.edits.add, "drain": self.edits.drain}
        return (calls | {"undrain": self.edits.undrain, "remove": self.edits.remove})[what](body)


def test_who_is_added_is_wanted_beside_the_list() -> None:
    assert Lists(A).call("add", {"url": "http://c:8000", "name": "c"}) == (201, ["a", "c"])


def test_who_is_added_without_a_name_is_called_by_its_address() -> None:
    assert Lists(A).call("add", {"url": "http://c:8000/"}) == (201, ["a", "c:8000"])


def test_to_add_the_same_again_changes_nothing() -> None:
    lists = Lists(A)
    assert lists.call("add", {"url": "http://a:8000", "name": "a"}) == (200, ["a"])
    lists.call("add", {"url": "http://c:8000", "name": "c"})
    assert lists.call("add", {"url": "http://c:8000", "name": "c"}) == (200, ["a", "c"])


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"url": "http://elsewhere:8000", "name": "a"}, 409, "another replica is called 'a'"),
        ({"url": "http://a:8000", "name": "x"}, 409, "http://a:8000 is 'a' already"),
        ({"url": "a:8000"}, 400, "not a replica URL"),
        ({"url": "http://a:8000/v1"}, 400, "more than scheme, host and port"),
        ({"url": "ftp://a:8000"}, 400, "not a replica URL"),
        ({"url": "http://a:99999"}, 400, "not a URL"),
        ({"url": "dns://pool:8000"}, 400, "not a replica URL"),
        ({"url": "http://169.254.169.254"}, 400, "no replica may be there"),
        ({"url": 7}, 400, "Expected `str`"),
        ({"url": "http://c:1", "weight": 2}, 400, "unknown field `weight`"),
        ({}, 400, "missing required field `url`"),
        ([], 400, "Expected `object`"),
        (None, 400, "Expected `object`"),
    ],
)
def test_what_cannot_be_added_is_refused_with_a_reason(body: Any, status: int, says: str) -> None:
    lists = Lists(A)
    given_status, answer = lists.answer("add", body)
    assert given_status == status
    assert says in answer["error"]
    assert lists.look() == ["a"]


def test_without_room_nobody_is_added() -> None:
    assert Lists(A, room=0).call("add", {"url": "http://c:8000"}) == (409, ["a"])


def test_who_is_removed_stays_away_while_it_is_listed_and_may_come_anew_after_that() -> None:
    lists = Lists(A, B)
    assert lists.call("remove", {"name": "a"}) == (200, ["b"])
    assert lists.look() == ["b"]
    lists.listed = [B]
    lists.look()
    lists.listed = [A, B]
    assert lists.look() == ["a", "b"]


def test_who_was_removed_can_be_added_back() -> None:
    lists = Lists(A, B)
    lists.call("remove", {"name": "a"})
    assert lists.call("add", {"url": "http://a:8000", "name": "a"}) == (201, ["a", "b"])
    assert lists.edits.added == []


def test_who_was_added_can_be_removed_and_added_again_before_anybody_looks() -> None:
    lists = Lists(A)
    lists.call("add", {"url": "http://c:8000", "name": "c"})
    lists.answer("remove", {"name": "c"})
    lists.answer("add", {"url": "http://c:8000", "name": "c"})
    assert lists.look() == ["a", "c"]


def test_ranks_of_one_server_are_removed_together() -> None:
    assert Lists(A, *RANKS).call("remove", {"name": "r1"}) == (200, ["a"])


def test_who_is_drained_is_wanted_still_and_comes_back() -> None:
    lists = Lists(A, B)
    assert lists.call("drain", {"name": "a"}) == (200, ["a", "b"])
    assert lists.edits.drained == {"a"}
    lists.call("undrain", {"name": "a"})
    assert not lists.edits.drained


def test_a_drained_name_that_is_not_listed_any_more_is_free() -> None:
    lists = Lists(A, B)
    lists.call("drain", {"name": "a"})
    lists.listed = [B]
    lists.look()
    lists.listed = [A, B]
    lists.look()
    assert not lists.edits.drained


@pytest.mark.parametrize("what", ["drain", "undrain", "remove"])
@pytest.mark.parametrize(("body", "status"), [({"name": "x"}, 404), ({}, 400), ({"name": 1}, 400), ("a", 400)])
def test_who_is_not_there_cannot_be_drained_or_removed(what: str, body: Any, status: int) -> None:
    lists = Lists(A)
    assert lists.call(what, body) == (status, ["a"])


CALLS = st.tuples(
    st.sampled_from(["add", "drain", "undrain", "remove"]), st.sampled_from(["a", "b", "c", "d"]), st.booleans()
)


@given(st.lists(CALLS, max_size=12))
def test_whatever_is_called_the_answer_is_true_at_the_next_look(calls: list[tuple[str, str, bool]]) -> None:
    lists = Lists(A, B)
    for what, name, looks in calls:
        body = {"name": name, "url": f"http://{name}:8000"} if what == "add" else {"name": name}
        status, _ = lists.answer(what, body)
        wanted = list(lists.edits._wanted)
        if status in (200, 201):
            assert (name in wanted) is (what != "remove")
            assert (name in lists.edits.drained) is (what == "drain") or what == "add"
        if looks:
            assert sorted(lists.look()) == sorted(wanted)
