"""The page in front of the demo's fleet: real requests through a real router, clicked through in a headless Chromium.

With PICTURES=FOLDER in the environment more traffic is played, to slower cards so that what else the machine does shows
less, and FOLDER gets pictures of the page.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest

from loadtest.client import Sample, play
from loadtest.traffic import read_traffic
from router.config import ArmConfig, ExperimentConfig, PolicyConfig, RouterConfig
from router.fleet import load_fleet
from router.gateway import Gateway
from sim_backends import fleet as fleet_file
from sim_backends.cluster import Cluster, ClusterSettings
from tests.router.page.browser import Browser, a_browser, needs_chromium

pytestmark = [needs_chromium, pytest.mark.slow]

DEMO = Path(__file__).parents[3] / "loadtest" / "demo"
PICTURES = os.environ.get("PICTURES")
REQUESTS, SPEED, LISTED = (60, 2.0, 16) if PICTURES else (40, 30.0, 5)
ROW = "[...document.querySelectorAll('#replicas tr')].find((one) => one.textContent.startsWith('{}'))"
FETCHED = (  # the decision with the longest fetch
    "(() => { const rows = [...document.querySelectorAll('#list tr')];"
    " const fetched = (row) => parseFloat(row.querySelector('rect.fetch')?.getAttribute('width') ?? 0);"
    " const row = rows.sort((one, other) => fetched(other) - fetched(one))[0];"
    " row.querySelector('button').id = 'wanted'; return true; })()"
)


@dataclass(frozen=True, slots=True)
class Running:
    """A fleet with a router in front. url_of : replicas by name"""

    traffic: str
    admin: str
    url_of: dict[str, str]

    async def play(self) -> list[Sample]:
        rows = read_traffic(DEMO / "traffic.jsonl.gz")[:REQUESTS]
        return await play(self.traffic, "Qwen/Qwen3-8B", rows, speed=SPEED, on_end=lambda sample: None)

    async def crash(self, name: str) -> None:
        """End a replica for longer than the test takes."""
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.url_of[name]}/sim/restart", json={"down_s": 60}) as response,
        ):
            assert response.status == 200


@asynccontextmanager
async def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """The demo's fleet, two rules compared on it, and an admin key."""
    monkeypatch.setenv("PAGE_TEST_KEY", "s3cret")
    fleet = msgspec.structs.replace(fleet_file.read(DEMO / "fleet.yaml"), speed=SPEED)
    cluster = Cluster(fleet, ClusterSettings(seed=1))
    await cluster.start()
    try:
        fleet_file.write(cluster.fleet, folder / "fleet.yaml")
        arms = {name: ArmConfig(policy=PolicyConfig(name=name), weight=1.0) for name in ("e2e", "ttft")}
        config = RouterConfig(
            host="127.0.0.1",
            port=0,
            admin_host="127.0.0.1",
            admin_port=0,
            admin_key_env="PAGE_TEST_KEY",
            experiment=ExperimentConfig(arms=arms, name="e2e-or-ttft"),
        )
        gateway = Gateway(config, load_fleet(folder / "fleet.yaml"))
        await gateway.start()
        try:
            yield Running(
                f"http://127.0.0.1:{gateway.traffic_port}",
                f"http://127.0.0.1:{gateway.admin_port}/",
                {replica.name: replica.url or "" for replica in cluster.fleet.replicas},
            )
        finally:
            await gateway.stop()
    finally:
        await cluster.stop()


async def keep_picture(browser: Browser, name: str, selector: str | None = None) -> None:
    if PICTURES:
        (Path(PICTURES) / name).write_bytes(await browser.picture(selector))


async def test_a_person_clicks_through_the_page_while_the_demos_traffic_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch) as router, a_browser() as browser:
        await browser.size(1100, 760)
        await browser.prefer("light")
        await browser.open(router.admin)
        await browser.until("summary.textContent.startsWith('All 4 replicas up')")
        await browser.until("!replicas.textContent.includes('never connected')")
        playing = asyncio.create_task(router.play())
        await browser.until("list.textContent.includes('under way')")
        await browser.until(f"document.querySelectorAll('#list tr').length >= {LISTED}")
        await browser.until("!summary.textContent.includes(' 0 in flight')")
        await keep_picture(browser, "page.png")
        await opens_one(browser)
        assert not [sample.error for sample in await playing if sample.error]
        await browser.until(f"document.getElementById('paths-words').textContent.startsWith('{REQUESTS} requests')")
        assert f"Last {REQUESTS} requests: half are within" in await browser.text("#scatter-words")
        await browser.until("!list.textContent.includes('under way')")
        await sees_the_arms(browser)
        await drains_one(browser)
        await router.crash("h20-1")
        await browser.until("summary.textContent.includes('in trouble: h20-1')")
        assert "h20-1" in await browser.text("#replicas tr:first-child")
        assert browser.problems == []


async def opens_one(browser: Browser) -> None:
    """A decision with all its candidates, and the sentence why."""
    await browser.ask(FETCHED)
    taken = await browser.ask("wanted.closest('tr').children[1].title")
    await browser.click("#wanted")
    await browser.until("!opened.hidden")
    assert await browser.text("#opened h2") == await browser.text("#wanted")
    replica, path = taken.split(" · ")
    chosen = await browser.text(".candidates tr.chosen th")
    assert (replica in chosen, path in chosen) == (True, True)
    assert await browser.ask("document.querySelectorAll('.candidates tbody tr').length") >= 4
    assert f" took {replica} by " in await browser.text("#opened .why")
    await keep_picture(browser, "decision.png", "#opened")
    await browser.press("Escape")


async def sees_the_arms(browser: Browser) -> None:
    assert "experiment e2e-or-ttft" in await browser.text("#summary")
    assert "Experiment e2e-or-ttft" in await browser.text("#arms-words")
    await browser.until(
        "[...document.querySelectorAll('#arms-head th')].map((one) => one.textContent).join() === 'e2e,ttft'"
    )
    shares = await browser.ask("[...document.querySelectorAll('#arms-body tr')][1].textContent")
    assert shares == "Share meant50 %50 %"


async def drains_one(browser: Browser) -> None:
    """Only with the key, and back again without being asked for it anew."""
    button = f"{ROW.format('a100-1')}.querySelector('button')"
    await browser.ask(f"{button}.click()")
    await browser.until("drain.open")
    assert await browser.text("#drain-title") == "Drain a100-1?"
    await browser.type("wrong")
    await browser.press("Enter")
    await browser.until("document.getElementById('drain-failed').textContent.includes('key is missing or wrong')")
    browser.problems.clear()  # the answer 401 is one
    await browser.type("s3cret")  # over the wrong one, which is selected
    await browser.press("Enter")
    await browser.until("!drain.open")
    await browser.until(f"{ROW.format('a100-1')}.textContent.includes('drained')")
    assert "3 of 4 replicas in use" in await browser.until("summary.textContent")
    await browser.ask(f"{button}.click()")
    await browser.press("Enter")
    await browser.until("!drain.open")
    await browser.until(f"!{ROW.format('a100-1')}.textContent.includes('drained')")
