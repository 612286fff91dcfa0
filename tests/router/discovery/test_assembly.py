"""What a configuration says of replicas that come and go, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli.serve import followed
from router.config import RouterConfig, fleet_of
from router.discovery.assembly import Discovery, rows_for
from router.discovery.config import DiscoveryConfig
from router.errors import ConfigError
from router.rows import members

URL, NAME = "http://127.0.0.1:9", "dns://pool.invalid:8000"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (RouterConfig(worker_urls=[URL]), []),
        (RouterConfig(worker_urls=[URL, NAME]), [NAME]),
        (RouterConfig(worker_urls=[URL], admin_key_env="KEY"), ["POST /replicas"]),
    ],
)
def test_check_names_what_replicas_come_and_go_by(config: RouterConfig, says: list[str]) -> None:
    assert followed(config, fleet_of(config)) == says


def test_a_fleet_file_is_followed_unless_it_is_to_be_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"replicas: [{{name: a, url: '{URL}'}}]")
    for watches, says in ((True, ["the fleet file"]), (False, [])):
        config = RouterConfig(fleet=str(path), discovery=DiscoveryConfig(watch_fleet=watches))
        assert followed(config, fleet_of(config)) == says


@pytest.mark.parametrize("url", ["dns://pool", "dns://:8000", "dns://pool:8000/v1", "dns://pool:0", "dns://u@pool:1"])
def test_a_name_that_cannot_be_looked_up_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="it looks like dns://name:8000"):
        fleet_of(RouterConfig(worker_urls=[url]))


def test_more_replicas_than_there_may_be_are_refused() -> None:
    urls = [URL, URL + "1"]
    with pytest.raises(ConfigError, match=r"discovery\.max_replicas is 1"):
        fleet_of(RouterConfig(worker_urls=urls, discovery=DiscoveryConfig(max_replicas=1)))


@pytest.mark.parametrize(
    ("replicas", "most", "grows", "rows"),
    [
        (3, None, False, 3),
        (0, None, False, 1),
        (1, None, True, 8),
        (9, None, True, 18),
        (3, 5, True, 5),
        (3, 3, False, 3),
    ],
)
def test_there_is_room_for_as_many_as_may_come(replicas: int, most: int | None, grows: bool, rows: int) -> None:
    assert rows_for(replicas, most, grows=grows) == rows


async def test_a_fleet_that_cannot_grow_has_no_spare_rows_and_one_that_can_has() -> None:
    for key, rows in ((None, 1), ("KEY", 8)):
        config = RouterConfig(worker_urls=[URL], admin_key_env=key)
        fleet = await Discovery(config, fleet_of(config), clock=lambda: 0.0).first()
        assert (len(fleet.replicas), len(members(fleet))) == (rows, 1)
