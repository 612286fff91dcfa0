from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.directing.directions import directions_of
from router.errors import ConfigError
from router.fleet import Fleet, load_fleet
from tests.builders import a_fleet

PARTS: dict[str, Any] = {
    "fetch": {"by": "directed"},
    "links": {"net": {"gb_s": 10}},
    "peers": {"link": "net"},
    "store": {"network": "net", "host": "net"},
    "tiers": {"host": {"capacity_gib": 8, "link": "net"}},
    "lmcache": {"controller": "http://c:9000", "coordinator": "http://c:9300"},
    "replicas": [{"name": "a", "url": "http://10.0.0.1:8000"}, {"name": "b", "url": "https://10.0.0.2"}],
}


def load(folder: Path, **changes: Any) -> Fleet:
    parts = {key: value for key, value in {**PARTS, **changes}.items() if value is not None}
    path = folder / "fleet.yaml"
    path.write_bytes(msgspec.yaml.encode(parts))
    return load_fleet(path)


def test_a_replica_may_be_told_otherwise_than_the_others(tmp_path: Path) -> None:
    own = {"name": "c", "url": "http://10.0.0.3:8000", "told": {}}
    fleet = load(tmp_path, told={"peer": "header"}, replicas=[*PARTS["replicas"], own])
    assert [fleet.told_of(replica).peer for replica in fleet.replicas] == ["header", "header", None]
    directions = directions_of(fleet, view := a_fleet("A100", "A100", "A100"), aside=False)
    assert directions is not None
    assert view.told is not None
    assert view.told.peer.tolist() == [True, True, False]
    assert view.told.asks_store.all()


def test_others_read_a_replica_where_its_url_says_or_the_file_does(tmp_path: Path) -> None:
    rows = [
        *PARTS["replicas"],
        {"name": "c", "url": "http://h:1", "told": {"peer": "body", "read_at": "[fd00::3]:7777"}},
    ]
    fleet = load(tmp_path, told={"peer": "body"}, replicas=rows)
    directions = directions_of(fleet, a_fleet("A100", "A100", "A100"), aside=False)
    assert directions is not None
    places = [(one.host, one.port) for one in directions.listeners]
    assert places == [("10.0.0.1", 8000), ("10.0.0.2", 443), ("fd00::3", 7777)]


def test_a_file_that_says_nothing_leaves_engines_alone(tmp_path: Path) -> None:
    view = a_fleet("A100", "A100")
    assert directions_of(load(tmp_path), view, aside=False) is None
    assert directions_of(load(tmp_path, fetch={"by": "engine"}, told={}), view, aside=False) is None
    assert view.told is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"told": {"peer": "header"}, "peers": None}, "no `peers` section"),
        ({"told": {"store": "prefetch"}, "store": None}, "no `store` section"),
        ({"told": {"store": "prefetch"}, "tiers": None}, "no `tiers` section"),
        ({"told": {"own": "pin"}, "lmcache": None}, "lmcache.controller"),
        ({"told": {"peer": "move"}, "lmcache": {}}, "lmcache.controller"),
        ({"told": {"store": "prefetch"}, "lmcache": {"controller": "http://c"}}, "lmcache.coordinator"),
        ({"told": {"peer": "header"}, "fetch": {"by": "engine"}}, "must be directed"),
        ({"told": {"peer": "body", "read_at": "nowhere"}}, "host:port"),
        ({"told": {"peer": "body", "read_at": "h:70000"}}, "host:port"),
        ({"told": {"peer": "shout"}}, "peer"),
        ({"lmcache": {"controller": "ftp://c"}}, "ftp"),
        ({"lmcache": {"timeout_s": 0}}, "timeout_s"),
    ],
)
def test_what_cannot_be_told_is_refused_in_a_sentence(tmp_path: Path, changes: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path, **changes)
