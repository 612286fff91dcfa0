"""A DNS name is as many replicas as it has addresses, and a resolver that fails is not a fleet that is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from router.discovery.names import Name, Names, addresses_of, at_address, name_of
from router.discovery.sources import NoList
from router.fleet import ReplicaSpec
from tests.router.discovery.clocks import Clock

POOL = ReplicaSpec(name="pool", url="dns://pool:8000", card="H100", events="tcp://{address}:5557")
OTHER = ReplicaSpec(name="x", url="http://x:8000")


class Resolver:
    """Answers as told; None: never."""

    def __init__(self, *addresses: str) -> None:
        self.answer: Sequence[str] | NoList | None = addresses
        self.questions = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.questions += 1
        if self.answer is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(self.answer, NoList):
            raise self.answer
        assert self.answer is not None
        return self.answer


class Looking:
    def __init__(self, *addresses: str) -> None:
        self.resolver = Resolver(*addresses)
        self.clock = Clock()
        self.names = Names(grace_s=10.0, keep_s=300.0, timeout_s=0.001, every_s=0.0, lookup=self.resolver)

    async def at(self, now_s: float, *replicas: ReplicaSpec) -> list[str | None]:
        """URLs at that time, after one look-up."""
        self.clock.now_s = now_s
        self.said = await self.names.look_up(replicas or (POOL,), self.clock)
        return [replica.url for replica in self.names.expanded(replicas or (POOL,), now_s)]


async def test_an_entry_becomes_a_replica_for_each_address() -> None:
    looking = Looking("10.0.0.2", "10.0.0.1")
    assert await looking.at(0.0, OTHER, POOL) == ["http://x:8000", "http://10.0.0.1:8000", "http://10.0.0.2:8000"]


async def test_an_address_that_an_answer_lacks_is_gone_after_the_grace() -> None:
    looking = Looking("10.0.0.1", "10.0.0.2")
    await looking.at(0.0)
    looking.resolver.answer = ["10.0.0.1"]
    assert len(await looking.at(9.0)) == 2
    assert await looking.at(10.0) == ["http://10.0.0.1:8000"]


async def test_a_name_without_addresses_is_gone_after_the_grace() -> None:
    looking = Looking("10.0.0.1")
    await looking.at(0.0)
    looking.resolver.answer = []
    assert len(await looking.at(5.0)) == 1
    assert await looking.at(11.0) == []


async def test_a_failed_look_up_keeps_the_last_answer_for_a_bounded_time_and_is_said_once() -> None:
    looking = Looking("10.0.0.1")
    await looking.at(0.0)
    looking.resolver.answer = NoList("look-up of pool: no resolver")
    assert len(await looking.at(1.0)) == 1
    assert looking.said == ["look-up of pool: no resolver"]
    assert len(await looking.at(300.0)) == 1
    assert looking.said == []
    assert await looking.at(301.0) == []
    looking.resolver.answer = ["10.0.0.1"]
    assert len(await looking.at(302.0)) == 1


async def test_a_resolver_that_hangs_is_a_failure_and_is_not_asked_twice() -> None:
    looking = Looking("10.0.0.1")
    await looking.at(0.0)
    looking.resolver.answer = None
    for now_s in (1.0, 2.0, 3.0):
        assert len(await looking.at(now_s)) == 1
    assert looking.resolver.questions == 2
    await looking.names.stop()


async def test_a_name_is_asked_about_no_oftener_than_said() -> None:
    looking = Looking("10.0.0.1")
    looking.names = Names(every_s=5.0, lookup=looking.resolver)
    for now_s in (0.0, 1.0, 4.9, 5.0, 6.0):
        assert len(await looking.at(now_s)) == 1
    assert looking.resolver.questions == 2


async def test_a_name_that_is_not_listed_any_more_is_forgotten() -> None:
    looking = Looking("10.0.0.1")
    await looking.at(0.0)
    await looking.at(1.0, OTHER)
    assert looking.names.known == {}


async def test_before_the_first_answer_there_is_nobody() -> None:
    looking = Looking()
    looking.resolver.answer = NoList("down")
    assert await looking.at(0.0) == []


def test_a_replica_at_an_address_is_called_by_it_and_keeps_what_its_entry_says() -> None:
    found = at_address(POOL, "10.0.0.5", 8000)
    assert (found.name, found.url, found.card) == ("10.0.0.5:8000", "http://10.0.0.5:8000", "H100")
    assert (found.events, found.replay) == ("tcp://10.0.0.5:5557", None)


def test_an_address_of_the_sixth_version_is_put_in_brackets() -> None:
    found = at_address(POOL, "fd00::5", 8000)
    assert (found.name, found.url, found.events) == ("[fd00::5]:8000", "http://[fd00::5]:8000", "tcp://[fd00::5]:5557")


@pytest.mark.parametrize(
    ("url", "name"),
    [("dns://pool:8000", Name("pool", 8000)), ("http://pool:8000", None), ("dns://pool", None), (None, None)],
)
def test_only_a_dns_url_with_a_port_is_a_name(url: str | None, name: Name | None) -> None:
    assert name_of(ReplicaSpec(name="x", url=url)) == name


async def test_the_systems_resolver_gives_numeric_addresses() -> None:
    assert "127.0.0.1" in await addresses_of("localhost", 8000)


@pytest.mark.parametrize(
    ("code", "fails"), [(socket.EAI_NONAME, False), (socket.EAI_AGAIN, True), (socket.EAI_FAIL, True)]
)
async def test_a_name_that_does_not_exist_is_an_answer_and_an_unanswered_question_is_none(
    monkeypatch: pytest.MonkeyPatch, code: int, fails: bool
) -> None:
    async def getaddrinfo(*question: object, **how: object) -> object:
        raise socket.gaierror(code, "so it is")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    if fails:
        with pytest.raises(NoList, match="so it is"):
            await addresses_of("pool", 8000)
    else:
        assert await addresses_of("pool", 8000) == []


async def test_a_name_that_no_resolver_can_be_asked_about_is_a_failure() -> None:
    with pytest.raises(NoList):
        await addresses_of("a" * 300, 8000)
