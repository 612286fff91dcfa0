"""A fleet file that changes is taken whole or not at all, and a mended one counts again, even if it is as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.discovery.fleet_file import READ_EVERY_S, FleetFile
from router.discovery.sources import NoList
from router.errors import ConfigError
from router.fleet import Fleet, load_fleet
from tests.router.discovery.clocks import Clock

ONE = 'replicas: [{name: a, url: "http://a:8000"}]'
TWO = 'replicas: [{name: a, url: "http://a:8000"}, {name: b, url: "http://b:8000"}]'
WITH_LINK = ONE + "\nlinks: {net: {gb_s: 10}}"
WITH_CARD = ONE + "\ncards: {H100: {usd_per_hour: %d}}"  # the rest as in our own table


def replace(path: Path, text: str) -> None:
    """Write a file as it should be written: by a rename."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


class Watched:
    """A fleet file and who reads it."""

    def __init__(self, path: Path, text: str = ONE, refuses: str | None = None) -> None:
        self.path = path
        self.clock = Clock()
        self.refuses = refuses
        path.write_text(text)
        self.source = FleetFile(path, load_fleet(path), check=self._check, clock=self.clock)

    def _check(self, fleet: Fleet) -> None:
        if any(replica.name == self.refuses for replica in fleet.replicas):
            raise ConfigError(f"{self.refuses} is refused")

    async def look(self) -> list[str] | str:
        """Names listed, or why there is no list."""
        self.clock.now_s += 1.0
        try:
            return [replica.name for replica in await self.source.read()]
        except NoList as exc:
            return str(exc)

    async def settled(self) -> list[str] | str:
        """The same once a change had a look to settle."""
        await self.look()
        return await self.look()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "fleet.yaml")


async def test_until_a_look_has_settled_the_list_is_what_the_router_was_built_of(watched: Watched) -> None:
    replace(watched.path, TWO)  # after it was read, and before anybody looked
    assert await watched.look() == ["a"]
    assert await watched.look() == ["a", "b"]


async def test_a_change_counts_at_the_second_look(watched: Watched) -> None:
    await watched.look()
    replace(watched.path, TWO)
    assert await watched.look() == ["a"]
    assert await watched.look() == ["a", "b"]


async def test_a_file_that_is_written_while_it_is_looked_at_is_read_when_it_rests(watched: Watched) -> None:
    await watched.look()
    for length in range(1, len(TWO), 9):
        watched.path.write_text(TWO[:length])
        assert await watched.look() == ["a"]
    watched.path.write_text(TWO)
    assert await watched.settled() == ["a", "b"]


BROKEN = {
    "empty": "",
    "half written": TWO[:60],
    "comments only": "# nothing",
    "no mapping": "- a",
    "no replicas": "replicas: []",
    "unknown key": TWO + "\nreplica: []",
    "unknown key of a replica": 'replicas: [{name: a, uri: "http://a:8000"}]',
    "two of one name": 'replicas: [{name: a, url: "http://a:8000"}, {name: a, url: "http://b:8000"}]',
    "one URL that is none": 'replicas: [{name: a, url: "http://a:8000"}, {name: b, url: "b:8000"}]',
    "one without a URL": 'replicas: [{name: a, url: "http://a:8000"}, {name: b}]',
    "unknown card": 'replicas: [{name: a, url: "http://a:8000", card: none_such}]',
    "no text": "replicas: \x00",
    "bad number": ONE + "\nspeed: -1",
    "refused by the router": 'replicas: [{name: evil, url: "http://a:8000"}, {name: b, url: "http://b:8000"}]',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_file_is_refused_whole_and_the_mended_one_counts(tmp_path: Path, text: str) -> None:
    watched = Watched(tmp_path / "fleet.yaml", refuses="evil")
    await watched.look()
    replace(watched.path, text)
    refused = await watched.settled()
    assert isinstance(refused, str)
    assert "\n" not in refused
    assert await watched.settled() == refused
    replace(watched.path, ONE)  # as it was before
    assert await watched.settled() == ["a"]
    replace(watched.path, TWO)
    assert await watched.settled() == ["a", "b"]


async def test_what_nobody_foresaw_is_met_at_every_look_until_the_file_is_another(watched: Watched) -> None:
    await watched.settled()
    watched.source._check = lambda fleet: fleet.replicas[1]  # there is none
    replace(watched.path, ONE + " ")
    await watched.look()
    for _ in range(2):
        with pytest.raises(IndexError):
            await watched.look()
    replace(watched.path, TWO)
    assert await watched.settled() == ["a", "b"]


async def test_bytes_that_are_no_text_are_refused(watched: Watched) -> None:
    await watched.look()
    watched.path.write_bytes(b"replicas: [\xff\xfe]")
    assert isinstance(await watched.settled(), str)


async def test_a_file_that_vanished_is_refused_until_it_is_back(watched: Watched) -> None:
    await watched.look()
    watched.path.unlink()
    assert "No such file" in await watched.settled()
    watched.path.write_text(ONE)
    assert await watched.settled() == ["a"]


async def test_a_file_that_may_not_be_read_is_refused_until_it_may(watched: Watched) -> None:
    """A directory in its place is as unreadable, and that for everybody."""
    await watched.look()
    watched.path.unlink()
    watched.path.mkdir()
    assert "directory" in await watched.settled()
    watched.path.rmdir()
    watched.path.write_text(TWO)
    assert await watched.settled() == ["a", "b"]


@pytest.mark.parametrize("text", [WITH_LINK, ONE + "\nblock_tokens: 32", ONE + "\nspeed: 2", ONE + "\napi_key_env: K"])
async def test_another_change_than_of_replicas_is_refused_and_named(watched: Watched, text: str) -> None:
    await watched.look()
    replace(watched.path, text)
    refused = await watched.settled()
    assert "restart" in refused
    assert f"`{text.splitlines()[1].partition(':')[0]}`" in refused


async def test_a_new_card_is_taken_and_a_changed_one_refused(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "fleet.yaml")
    await watched.look()
    replace(watched.path, WITH_CARD % 2)
    assert await watched.settled() == ["a"]
    watched = Watched(tmp_path / "other.yaml", WITH_CARD % 2)
    await watched.look()
    replace(watched.path, WITH_CARD % 3)
    assert "`cards.H100`" in await watched.settled()


async def test_a_change_that_its_stamp_hides_is_found_in_half_a_minute(watched: Watched) -> None:
    await watched.settled()
    stamp = watched.path.stat()
    watched.path.write_text(ONE.replace("name: a", "name: b"))
    os.utime(watched.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert await watched.look() == ["a"]
    watched.clock.now_s += READ_EVERY_S
    assert await watched.look() == ["b"]


async def test_asked_to_read_anew_it_does_whatever_the_stamp_says(watched: Watched) -> None:
    await watched.settled()
    stamp = watched.path.stat()
    watched.path.write_text(ONE.replace("name: a", "name: b"))
    os.utime(watched.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    watched.source.read_anew()
    assert await watched.look() == ["b"]
