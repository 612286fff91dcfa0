"""A row that was given up cannot be told from one that nobody ever had, and the other rows never notice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from estimators.routes import Routes
from estimators.view import spare_name
from router.actions import Cause, Ended, Hold, Refuse, Send
from router.admission import AdmissionConfig
from router.assemble import Core, assemble
from router.config import PolicyConfig, RouterConfig
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec
from router.rows import members, with_spares
from tests.builders import a_request
from tests.router.signals.events import MODEL, P, batch, chain_of, stored
from tests.router.test_assemble import PEERS, STORE, TIERS, a_fleet_file

ROWS = 7  # a number that nothing else in a core has, so that what is kept by row can be told by its length
NEW = ReplicaSpec(name="new", url="http://new:8000", card="H20")
OTHER = ReplicaSpec(name="other", url="http://x:8000", card="H20")


def a_core(*sections: str, policy: str = "e2e", rows: int = ROWS, **changes: Any) -> tuple[Fleet, Core]:
    fleet = with_spares(a_fleet_file(*sections), rows)
    config = RouterConfig(policy=PolicyConfig(name=policy))
    return fleet, assemble(config, fleet, on_receipt=lambda receipt: None, **changes)


def up(core: Core, *rows: int, now_s: float = 0.0) -> None:
    for row in rows:
        core.dispatcher.replica_up(row, frozenset({MODEL}), now_s)
        core.names.listed(row, [MODEL], {})


def serve(core: Core, requests: int, *, start_s: float = 1.0, only: str = "", slow: float = 1.0) -> Iterator[Send]:
    """Requests one after another, each answered well; `only` by one replica. The sends, once they are over."""
    now_s, dispatcher = start_s, core.dispatcher
    for number in range(requests):
        chain = chain_of([number, *P], model=MODEL)[: 100 + number]
        request = a_request(
            1700, model=MODEL, request_id=f"r-{start_s}-{number}", chain=chain, block_tokens=16, only=only
        )
        (sent,) = dispatcher.arrived(request, now_s)
        assert isinstance(sent, Send)
        now_s += 0.05 * slow
        dispatcher.first_token(sent, now_s)
        now_s += 0.4 * slow
        dispatcher.finished(
            sent, Ended(200, output_tokens=20, cached_tokens=16 * (number % 3), prompt_tokens=1700), now_s
        )
        now_s += 0.05
        yield sent


def used(core: Core, row: int, *, start_s: float) -> None:
    """All a replica can be told and teach, good and bad."""
    dispatcher, name = core.dispatcher, core.dispatcher.replicas[row].name
    up(core, row, now_s=start_s)
    core.directory.add_source(row, MODEL)
    core.directory.apply(row, batch(stored(P, 5001)), start_s)
    dispatcher.capacity_reported(row, 50_000.0)
    dispatcher.load_reported(row, running=2, waiting=1, sent_s=start_s, now_s=start_s, kv_used_share=0.3)
    assert len(list(serve(core, 60, start_s=start_s + 1, only=name, slow=2.0))) == 60
    (sent,) = dispatcher.arrived(a_request(800, model=MODEL, request_id=f"bad-{row}", only=name), start_s + 100)
    assert isinstance(sent, Send)
    dispatcher.failed(sent, Cause.BROKEN, start_s + 101)
    core.directory.reused(row, chain_of(P, model=MODEL)[:9], 3, start_s + 101)
    dispatcher.drain(row, drained=True)


# What a core keeps for one row


def kept(core: Core, row: int) -> dict[str, Any]:
    """By where it stands: the part of `row` of every array, list, tuple and mapping that has one for each row."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", core)]
    while todo:
        where, thing = todo.pop()
        if id(thing) in seen or isinstance(thing, Routes | str | bytes | type | Enum):
            continue  # routes are numbers of links, different for each row by design, and fixed
        seen.add(id(thing))
        part = of_row(thing, row)
        if part is not None:
            found[where] = plain(part, core.dispatcher.view.names[row], row)
        todo += [(f"{where}.{name}", value) for name, value in parts(thing)]
    return found


def of_row(thing: Any, row: int) -> Any:
    if isinstance(thing, np.ndarray):
        axes = [axis for axis, length in enumerate(thing.shape) if length in (ROWS, ROWS + 1)]
        return thing.take(row, axis=axes[0]) if axes else None
    if isinstance(thing, list | tuple) and len(thing) == ROWS:
        return [thing[row]]
    if isinstance(thing, Mapping) and thing and all(isinstance(key, int) and 0 <= key < ROWS for key in thing):
        return thing.get(row, "nothing")
    if isinstance(thing, set) and thing and all(isinstance(key, int) and 0 <= key < ROWS for key in thing):
        return row in thing
    return None


BY_DESIGN = {
    "_row_offset",
    "_stages",
    "_ways",
    "_where",
    "_fleet",
    "_key",
    "_from_store",
    "_numbers",
    "_moved",
}  # numbers of rows and links, all fixed


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r:.40}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | deque):
        yield from ((f"[{number}]", value) for number, value in enumerate(thing))
    elif isinstance(thing, partial):
        yield from (("func", thing.func), ("args", thing.args))
    elif not isinstance(thing, Callable | np.ndarray):  # type: ignore[arg-type]
        names = [*getattr(thing, "__dict__", ()), *(slot for kind in type(thing).__mro__ for slot in slots(kind))]
        yield from ((name, getattr(thing, name)) for name in names if name not in BY_DESIGN and hasattr(thing, name))


def slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def plain(thing: Any, name: str, row: int, depth: int = 12) -> Any:
    """Comparable values all the way down, with the row's own name and number left open."""
    assert depth, "a state is no deeper than this"
    if isinstance(thing, np.ndarray | np.generic):
        return thing.tobytes()
    if isinstance(thing, str):
        return thing.replace(name, "<name>")
    if isinstance(thing, float) and thing != thing:
        return "NaN"
    if isinstance(thing, int | float | bytes | Enum | type(None)):
        return thing
    if isinstance(thing, Mapping):
        return {str(key): plain(value, name, row, depth - 1) for key, value in thing.items()}
    if isinstance(thing, list | tuple | deque | set | frozenset):
        return [plain(value, name, row, depth - 1) for value in thing]
    return {part: plain(value, name, row, depth - 1) for part, value in parts(thing)} | {"": type(thing).__name__}


SECTIONS = {"plain": (), "store": (STORE,), "all": (STORE, TIERS, PEERS), "room": (STORE, "fetch: {prefetch_gib: 4}\n")}


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS.keys())
def test_a_row_that_was_used_and_freed_is_as_one_that_never_was_used(sections: tuple[str, ...]) -> None:
    _fleet, core = a_core(*sections)
    core.rows.joined(3, NEW, 0.0)
    used(core, 3, start_s=1.0)
    assert kept(core, 3) != kept(core, 4)
    core.rows.left(3, 200.0)
    core.rows.freed(3, NEW.name, 200.0)
    assert kept(core, 3) == kept(core, 4)


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS.keys())
def test_who_takes_a_used_row_finds_it_as_who_takes_a_new_one(sections: tuple[str, ...]) -> None:
    _fleet, core = a_core(*sections)
    core.rows.joined(3, NEW, 0.0)
    used(core, 3, start_s=1.0)
    core.rows.left(3, 200.0)
    core.rows.freed(3, NEW.name, 200.0)
    core.rows.joined(3, OTHER, 201.0)
    core.rows.joined(4, replace_name(OTHER, "another"), 201.0)
    assert kept(core, 3) == kept(core, 4)


def replace_name(replica: ReplicaSpec, name: str) -> ReplicaSpec:
    return msgspec.structs.replace(replica, name=name)


def test_a_core_with_joined_replicas_keeps_of_each_what_one_built_with_them_keeps() -> None:
    fleet, core = a_core(STORE)
    core.rows.joined(3, NEW, 0.0)
    built_of = msgspec.structs.replace(fleet, replicas=[*fleet.replicas[:3], NEW, *fleet.replicas[4:]])
    built = assemble(RouterConfig(), built_of, on_receipt=lambda receipt: None)
    assert without_names(kept(core, 3)) == without_names(kept(built, 3))


def without_names(found: dict[str, Any]) -> dict[str, Any]:
    """One tuple of names may be shared or not, so it is met once or more often."""
    return {where: part for where, part in found.items() if not where.endswith(".names")}


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS.keys())
def test_other_rows_stay_as_they_are_to_the_bit(sections: tuple[str, ...]) -> None:
    _fleet, core = a_core(*sections)
    up(core, 0, 1, 2)
    assert list(serve(core, 40))
    core.rows.joined(3, NEW, 50.0)
    used(core, 3, start_s=51.0)
    before = [kept(core, row) for row in (0, 1, 2)]
    core.rows.left(3, 200.0)
    core.rows.freed(3, NEW.name, 200.0)
    core.rows.joined(3, OTHER, 201.0)
    core.rows.joined(4, NEW, 201.0)
    for row in (0, 1, 2):
        after = kept(core, row)
        assert {where for where in after if after[where] != before[row].get(where)} == set()


def test_the_walk_finds_what_is_kept_for_a_row() -> None:
    """Else the laws above would say nothing."""
    _fleet, core = a_core(STORE, TIERS, PEERS)
    found = " ".join(kept(core, 0))
    for part in (
        "table",
        "booked",
        "_standing",
        "_prefill",
        "_lanes",
        "_copies",
        "_own",
        "learners",
        "_waiting",
        "names",
    ):
        assert part in found


# What a decision sees of rows that are nobody's


@pytest.mark.parametrize("policy", ["e2e", "ttft", "round_robin", "least_request", "prefix_hash"])
def test_spare_rows_change_no_decision(policy: str) -> None:
    """Seven rows, of which four are spare, and three: the same choices, receipts apart."""

    def choices(rows: int) -> list[str]:
        _fleet, core = a_core(STORE, policy=policy, rows=rows)
        up(core, 0, 1, 2)
        return [sent.replica for sent in serve(core, 60)]

    assert choices(ROWS) == choices(3)


def test_who_left_gets_nothing_new_and_its_request_ends_as_it_would() -> None:
    _fleet, core = a_core()
    up(core, 0, 1, 2)
    (sent,) = core.dispatcher.arrived(a_request(800, model=MODEL, only="b"), 1.0)
    assert isinstance(sent, Send)
    core.rows.left(1, 2.0)
    assert {other.replica for other in serve(core, 30, start_s=3.0)} <= {"a", "c"}
    assert not core.rows.is_empty(1)
    core.dispatcher.first_token(sent, 90.0)
    core.dispatcher.finished(sent, Ended(200, output_tokens=4), 91.0)
    assert core.rows.is_empty(1)


def test_who_waits_for_a_replica_that_leaves_is_refused() -> None:
    fleet = with_spares(a_fleet_file(), ROWS)
    config = RouterConfig(admission=AdmissionConfig(max_in_flight=1))
    core = assemble(config, fleet, on_receipt=lambda receipt: None)
    up(core, 0, 1)
    assert [type(*core.dispatcher.arrived(a_request(800, model=MODEL, only="b"), 1.0)) for _ in "12"] == [Send, Hold]
    core.rows.left(1, 2.0)
    due_s = core.dispatcher.next_due_s
    assert due_s is not None
    assert due_s <= 2.0
    (refused,) = core.dispatcher.due(2.0)
    assert isinstance(refused, Refuse)
    assert refused.held is not None


def test_a_probe_of_who_left_brings_nobody_back() -> None:
    _fleet, core = a_core()
    up(core, 0, 1)
    core.rows.left(1, 2.0)
    assert not core.dispatcher.is_up(1)
    (refused,) = core.dispatcher.arrived(a_request(800, model=MODEL, only="b"), 3.0)
    assert isinstance(refused, Refuse)


def test_who_returns_before_its_last_request_ended_keeps_all_it_taught() -> None:
    _fleet, core = a_core()
    up(core, 0, 1)
    list(serve(core, 40, only="b"))
    before = {name: getattr(core.dispatcher.view, name)[1].tolist() for name in ("coefficients", "pace_scale")}
    core.rows.left(1, 50.0)
    core.rows.returned(1, ReplicaSpec(name="b", url="http://h:2", card="A100"))
    assert {name: getattr(core.dispatcher.view, name)[1].tolist() for name in before} == before
    up(core, 1, now_s=51.0)
    (again,) = serve(core, 1, start_s=52.0, only="b")
    assert again.base_url == "http://h:2"


def test_who_comes_back_by_its_name_gets_back_what_it_taught() -> None:
    fleet, core = a_core()
    up(core, 0, 1)
    list(serve(core, 60, only="b", slow=3.0))
    view, b = core.dispatcher.view, fleet.replicas[1]
    learned, pace = view.coefficients[1].copy(), view.pace_scale.item(1)
    core.rows.left(1, 90.0)
    core.rows.freed(1, "b", 90.0)
    assert (view.coefficients[1] == 1.0).all() or (view.coefficients[1] != learned).any()
    core.rows.joined(5, b, 90.0)
    assert view.coefficients[5] == pytest.approx(learned, rel=0.05)
    assert view.pace_scale.item(5) == pytest.approx(pace, rel=0.05)
    assert view.samples[5] > 0


def test_of_another_card_nothing_comes_back() -> None:
    fleet, core = a_core()
    up(core, 0, 1)
    list(serve(core, 60, only="b", slow=3.0))
    core.rows.left(1, 90.0)
    core.rows.freed(1, "b", 90.0)
    core.rows.joined(5, msgspec.structs.replace(fleet.replicas[1], card="H20"), 90.0)
    assert core.dispatcher.view.samples[5] == 0


def test_nothing_of_a_cache_is_believed_once_its_replica_left() -> None:
    _fleet, core = a_core()
    up(core, 0, 1)
    core.directory.add_source(1, MODEL)
    core.directory.apply(1, batch(stored(P, 5001)), 1.0)
    assert core.directory.match(chain_of(P, model=MODEL)).hbm_blocks[1] > 0
    core.rows.left(1, 2.0)
    assert core.directory.match(chain_of(P, model=MODEL)).hbm_blocks[1] == 0
    assert core.directory.blocks() == []


def test_a_drained_replica_is_up_and_gets_nothing_until_it_is_not_drained() -> None:
    _fleet, core = a_core(policy="round_robin")
    up(core, 0, 1)
    core.dispatcher.drain(1, drained=True)
    assert {sent.replica for sent in serve(core, 30)} == {"a"}
    assert core.dispatcher.is_up(1)
    core.dispatcher.drain(1, drained=False)
    assert {sent.replica for sent in serve(core, 30, start_s=60.0)} == {"a", "b"}


def test_a_fleet_of_nobody_is_unavailable_rather_than_without_the_model() -> None:
    fleet = with_spares(Fleet(replicas=[]), ROWS)
    core = assemble(RouterConfig(), fleet, on_receipt=lambda receipt: None)
    (refused,) = core.dispatcher.arrived(a_request(800, model=MODEL), 1.0)
    assert isinstance(refused, Refuse)
    assert refused.status == 503
    core.rows.joined(0, ReplicaSpec(name="x", url="http://x:1"), 2.0)
    up(core, 0, now_s=3.0)
    (sent,) = core.dispatcher.arrived(a_request(800, model=MODEL), 4.0)
    assert isinstance(sent, Send)


def test_a_card_that_is_not_known_is_refused_and_nothing_has_changed() -> None:
    _fleet, core = a_core()
    before = kept(core, 3)
    with pytest.raises(ConfigError, match="none_such"):
        core.rows.joined(3, msgspec.structs.replace(NEW, card="none_such"), 1.0)
    assert kept(core, 3) == before


def test_members_are_who_is_not_nobody() -> None:
    fleet, _core = a_core()
    assert [replica.name for replica in members(fleet).values()] == ["a", "b", "c"]
    assert fleet.replicas[3].name == spare_name(3)
