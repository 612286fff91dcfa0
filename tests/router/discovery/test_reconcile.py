"""Lists in, steps out: exactly the wanted replicas become members, whatever was there."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.discovery.reconcile import SPARE, Row, Stage, Steps, merged, reconcile
from router.fleet import ReplicaSpec


def a_replica(name: str, *, url: str | None = "", card: str | None = None, events: str | None = None) -> ReplicaSpec:
    """url : "" is one of its own"""
    return ReplicaSpec(name=name, url=f"http://{name}:8000" if url == "" else url, card=card, events=events)


def members(*replicas: ReplicaSpec, spare: int = 0) -> list[Row]:
    return [*(Row(Stage.MEMBER, replica) for replica in replicas), *[SPARE] * spare]


def done(rows: list[Row], steps: Steps) -> list[Row]:
    """The rows once the steps are done, with those that leave still there."""
    after = list(rows)
    for number in steps.left:
        after[number] = Row(Stage.LEAVING, rows[number].replica)
    for number, replica in (steps.returned | steps.changed | steps.joined).items():
        after[number] = Row(Stage.MEMBER, replica)
    return after


def wanted_again(rows: list[Row]) -> list[ReplicaSpec]:
    return [row.replica for row in rows if row.stage is Stage.MEMBER and row.replica is not None]


A, B, C = a_replica("a"), a_replica("b"), a_replica("c")


def test_nothing_is_to_be_done_when_all_is_as_wanted() -> None:
    assert not reconcile([B, A], members(A, B, spare=2))


def test_who_is_new_takes_the_first_spare_row() -> None:
    assert reconcile([A, C], members(A, spare=2)).joined == {1: C}


def test_who_is_not_listed_leaves() -> None:
    assert reconcile([B], members(A, B)).left == [0]


def test_an_entry_without_an_address_is_as_if_it_were_not_listed() -> None:
    assert reconcile([a_replica("a", url=None), B], members(A, B)).left == [0]


def test_who_left_is_no_reason_for_another_step_and_keeps_its_row() -> None:
    steps = reconcile([B, C], [Row(Stage.LEAVING, A), Row(Stage.MEMBER, B)])
    assert (bool(steps), steps.waiting) == (False, [C])


def test_who_comes_back_while_its_last_requests_run_takes_up_its_row() -> None:
    assert reconcile([A], [SPARE, Row(Stage.LEAVING, A)]).returned == {1: A}


def test_another_url_or_card_under_the_same_name_is_another_replica() -> None:
    for other in (a_replica("a", url="http://elsewhere:8000"), a_replica("a", card="H100")):
        steps = reconcile([other], members(A, spare=1))
        assert (steps.left, steps.joined) == ([0], {1: other})


def test_another_event_address_changes_a_replica_that_stays() -> None:
    other = a_replica("a", events="tcp://a:5557")
    steps = reconcile([other, B], members(A, B))
    assert (steps.changed, steps.left, steps.joined) == ({0: other}, [], {})


def test_a_slash_at_the_end_of_a_url_is_no_other_replica() -> None:
    other = a_replica("a", url="http://a:8000/")
    assert reconcile([other], members(A)).left == []


def test_ranks_of_one_server_join_in_their_order_and_only_together() -> None:
    ranks = [a_replica(f"r{rank}", url="http://s:8000") for rank in range(3)]
    assert reconcile(ranks, [SPARE, Row(Stage.MEMBER, A), SPARE, SPARE]).joined == {
        0: ranks[0],
        2: ranks[1],
        3: ranks[2],
    }
    assert reconcile([A, *ranks], members(A, spare=2)).waiting == ranks


def test_a_server_with_other_ranks_is_another_server() -> None:
    ranks = [a_replica(f"r{rank}", url="http://s:8000") for rank in range(3)]
    steps = reconcile(ranks, members(*ranks[:2], spare=3))
    assert (steps.left, steps.joined) == ([0, 1], {2: ranks[0], 3: ranks[1], 4: ranks[2]})


def test_sources_are_joined_and_the_first_counts() -> None:
    other_b = a_replica("b", url="http://elsewhere:8000")
    other_a = a_replica("x", url="http://a:8000")
    found, left_out = merged([("file", [A, B]), ("admin", [other_b, other_a, C, a_replica("d", url=None)])])
    assert found == [A, B, C]
    assert left_out == [
        "admin lists 'b', a name that is taken",
        "admin lists http://a:8000, which file lists already",
    ]


REPLICAS = st.lists(
    st.builds(
        a_replica,
        st.sampled_from("abcde"),
        url=st.sampled_from([None, "http://x:1", "http://y:1", "http://z:1", "http://z:1/"]),
        card=st.sampled_from([None, "H100"]),
        events=st.sampled_from([None, "tcp://x:5557"]),
    ),
    max_size=6,
    unique_by=lambda replica: replica.name,
)


@given(st.lists(REPLICAS, max_size=6), st.sets(st.integers(0, 7)))
def test_after_every_list_the_members_are_those_wanted_that_had_room(
    lists: list[list[ReplicaSpec]], freed: set[int]
) -> None:
    """Lists come in any order, some may be lost; rows of those that left become spare at any moment."""
    rows: list[Row] = [SPARE] * 8
    for wanted in lists:
        before = rows
        steps = reconcile(wanted, rows)
        rows = done(rows, steps)
        expected = [replica for replica in wanted if replica.url and replica not in steps.waiting]
        assert sorted(map(msgspec.json.encode, wanted_again(rows))) == sorted(map(msgspec.json.encode, expected))
        assert not reconcile(wanted, rows), "the same list again is nothing to do"
        touched = {*steps.left, *steps.returned, *steps.changed, *steps.joined}
        assert all(rows[number] == before[number] for number in range(8) if number not in touched)
        rows = [SPARE if number in freed and row.stage is Stage.LEAVING else row for number, row in enumerate(rows)]
