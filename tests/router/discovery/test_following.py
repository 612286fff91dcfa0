"""The loop asks for whole lists again and again: lost, late or broken news changes nothing for longer than one look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import pytest

from router.discovery.edits import Edits
from router.discovery.following import Following
from router.discovery.names import Names
from router.discovery.sources import Flags, NoList, Source
from router.fleet import ReplicaSpec
from tests.router.discovery.clocks import Clock

A = ReplicaSpec(name="a", url="http://a:8000")
B = ReplicaSpec(name="b", url="http://b:8000")


class Registry:
    """A source that answers as told: a list, an exception, or None for never."""

    every_s = 1.0

    def __init__(self, *replicas: ReplicaSpec, name: str = "registry") -> None:
        self.name = name
        self.answer: Sequence[ReplicaSpec] | Exception | None = replicas

    async def read(self) -> Sequence[ReplicaSpec]:
        if self.answer is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer


class Looks:
    """A loop that looks only when told, and what it wanted each time."""

    def __init__(self, *sources: Source) -> None:
        self.clock = Clock()
        self.edits = Edits(check=lambda replica: None, room=lambda: 9)
        self.following = Following(
            sources, names=Names(), edits=self.edits, clock=self.clock, look_every_s=3600.0, read_limit_s=0.01
        )
        self.applied: asyncio.Queue[tuple[list[str], Collection[str]]] = asyncio.Queue()

    def apply(self, wanted: list[ReplicaSpec], drained: Collection[str]) -> None:
        self.applied.put_nowait(([replica.name for replica in wanted], drained))

    async def look(self) -> list[str]:
        self.clock.now_s += 1.0
        self.following.look()
        wanted, _ = await self.applied.get()
        return wanted


@asynccontextmanager
async def looking(*sources: Source) -> AsyncIterator[Looks]:
    looks = Looks(*sources)
    await looks.following.first()
    looks.following.start(looks.apply)
    await looks.applied.get()
    try:
        yield looks
    finally:
        await looks.following.stop()


async def test_the_first_list_is_known_before_anything_starts() -> None:
    looks = Looks(Flags([A]), Registry(B))
    assert await looks.following.first() == [A, B]


@pytest.mark.parametrize("turns", range(6))
async def test_an_end_right_behind_a_wish_to_look_is_an_end(turns: int) -> None:
    looks = Looks(Flags([A]))
    looks.following.start(looks.apply)
    await looks.applied.get()
    await asyncio.sleep(0)
    looks.following.look()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await looks.following.stop()


async def test_a_source_that_fails_at_the_start_lists_nobody_until_it_answers() -> None:
    registry = Registry()
    registry.answer = NoList("not yet")
    async with looking(Flags([A]), registry) as looks:
        assert await looks.look() == ["a"]
        registry.answer = [B]
        assert await looks.look() == ["a", "b"]


async def test_who_was_deleted_without_an_event_is_gone_at_the_next_look() -> None:
    registry = Registry(A, B)
    async with looking(registry) as looks:
        registry.answer = [B]
        assert await looks.look() == ["b"]


async def test_an_entry_whose_address_became_null_is_gone_at_the_next_look() -> None:
    registry = Registry(A, B)
    async with looking(registry) as looks:
        registry.answer = [ReplicaSpec(name="a", url=None), B]
        assert await looks.look() == ["b"]


@pytest.mark.parametrize("failure", [NoList("the watch is down"), OSError("reset"), KeyError("items"), None])
async def test_a_source_that_fails_or_hangs_keeps_its_last_list_and_is_asked_again(failure: Exception | None) -> None:
    registry = Registry(A, B)
    async with looking(Flags([]), registry) as looks:
        registry.answer = failure
        assert await looks.look() == ["a", "b"]
        report = looks.following.reports()[1]
        assert report.failure
        assert report.replicas == 2
        registry.answer = [B]
        assert await looks.look() == ["b"]
        assert looks.following.reports()[1].failure is None


async def test_a_failure_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(A)
    with caplog.at_level(logging.INFO, logger="router.discovery.following"):
        async with looking(registry) as looks:
            registry.answer = NoList("half written")
            for _ in range(3):
                await looks.look()
            registry.answer = [A]
            await looks.look()
    assert [record.message for record in caplog.records] == [
        "the list of replicas from the registry stays as it was: half written",
        "the list of replicas from the registry counts again",
    ]


async def test_an_edit_counts_at_once() -> None:
    async with looking(Flags([A, B])) as looks:
        looks.edits.remove({"name": "a"})
        looks.edits.drain({"name": "b"})
        looks.following.apply_now()
        assert await looks.applied.get() == (["b"], {"b"})


async def test_an_entry_that_another_source_stands_before_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with looking(Flags([A]), Registry(ReplicaSpec(name="a", url="http://other:1"))) as looks:
        for _ in range(3):
            assert await looks.look() == ["a"]
        assert len(looks.following.left_out) == 1
    assert caplog.text.count("a replica is left out") == 1


async def test_an_apply_that_fails_does_not_end_the_looks(caplog: pytest.LogCaptureFixture) -> None:
    async with looking(Flags([A])) as looks:
        done = asyncio.Event()

        def fails(wanted: list[ReplicaSpec], drained: Collection[str]) -> None:
            done.set()
            raise RuntimeError("unforeseen")

        looks.following._apply = fails
        looks.following.look()
        await done.wait()
        looks.following._apply = looks.apply
        assert await looks.look() == ["a"]
    assert "trying again" in caplog.text


async def test_names_are_looked_up_at_every_look() -> None:
    answers = [["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]]

    async def lookup(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    following = Following(
        [Flags([ReplicaSpec(name="pool", url="dns://pool:8000")])],
        names=Names(lookup=lookup, every_s=0.0),
        edits=Edits(check=lambda replica: None, room=lambda: 9),
        clock=Clock(),
    )
    assert [replica.name for replica in await following.first()] == ["10.0.0.1:8000"]
    assert [replica.name for replica in await following.first()] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert following.reports()[1].source == "dns pool:8000"
