"""A real Prometheus server scrapes a running router: every query of dashboard and alerts has an answer.

The server is Debian's package `prometheus`; without it the tests that need it are skipped and say so.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from math import isnan
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from router.config import ArmConfig, ExperimentConfig, LoadConfig, PolicyConfig, RouterConfig
from router.fleet import Fleet, completed
from router.gateway import Gateway
from tests.router.field_bench import PATIENCE_S, simulated, until, urls_of

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "tfirst.rules.yml"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="needs Debian's package prometheus: apt-get install prometheus"
)
MODEL = "Qwen/Qwen3-8B"
SCRAPE_S = 0.2
WINDOW = "10s"  # of rates: many scrapes, none of them before the router began

# What only happens to a router that does what this one does not: no prompt is read beside its loop.
NO_NUMBER = {"histogram_quantile(0.99, sum by (le) (rate(tfirst_prompt_read_seconds_bucket[$__rate_interval])))"}


def panel_queries() -> Iterator[str]:
    for panel in json.loads((DEPLOY / "grafana" / "tfirst.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def left_side(expr: str) -> str:
    """What an alert compares with a number."""
    found = re.fullmatch(r"(.*\S)\s+[<>]\s+[\d.]+", " ".join(expr.split()))
    assert found is not None, f"an alert compares one expression with one number: {expr}"
    return found[1]


def queries() -> list[str]:
    return [*panel_queries(), *(left_side(rule["expr"]) for rule in alerts())]


def with_window(query: str) -> str:
    return re.sub(r"\[(\$__rate_interval|\d+m)\]", f"[{WINDOW}]", query)


@asynccontextmanager
async def a_busy_router() -> AsyncIterator[Gateway]:
    """Two arms, priced cards, cache events, and traffic that hits."""
    arms = {"a": ArmConfig(policy=PolicyConfig(name="e2e")), "b": ArmConfig(policy=PolicyConfig(name="ttft"))}
    async with simulated("A100", "A100") as cluster:
        plain = {
            "model": msgspec.to_builtins(cluster.fleet.model),
            "cards": {"A100": {"usd_per_hour": 2.0}},
            "speed": cluster.fleet.speed,
            "replicas": [{"name": f"r{at}", "url": url, "card": "A100"} for at, url in enumerate(urls_of(cluster))],
        }
        gateway = Gateway(
            RouterConfig(
                host="127.0.0.1",
                port=0,
                admin_host="127.0.0.1",
                admin_port=0,
                experiment=ExperimentConfig(arms=arms),
                load=LoadConfig(period_s=0.05),
                inject_usage=True,
                drain_s=0.1,
            ),
            msgspec.convert(completed(plain, Path()), Fleet),
        )
        await gateway.start()
        try:
            await until(lambda: all(gateway._core.dispatcher.is_up(row) for row in (0, 1)))
            yield gateway
        finally:
            await gateway.stop()


async def traffic(gateway: Gateway) -> None:
    """Conversations that share a beginning, and now and then something that is no request, until cancelled."""
    url = f"http://127.0.0.1:{gateway.traffic_port}/v1/completions"
    async with aiohttp.ClientSession() as client:

        async def one(number: int) -> None:
            prompt = [*range(1, 512), 1000 + number]
            body = {"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": 8, "sim_output_tokens": 8}
            async with client.post(url, json=body, headers={"x-session-id": f"s{number % 8}"}) as response:
                await response.read()

        for start in range(0, 100_000, 4):
            await asyncio.gather(*(one(start + step) for step in range(4)))
            async with client.post(url, data=b"{") as response:
                assert response.status == 400


@asynccontextmanager
async def prometheus(target_port: int, folder: Path) -> AsyncIterator[str]:
    """A server that scrapes that port; its URL."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    shipped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    shipped["global"] = {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms", "scrape_timeout": "200ms"}
    shipped["rule_files"] = [str(RULES)]
    shipped["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{target_port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(shipped))
    assert PROMETHEUS is not None
    with (folder / "log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            PROMETHEUS,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        await server.wait()


async def values(client: aiohttp.ClientSession, url: str, query: str) -> list[float]:
    """What a query gives now; nothing while the server does not answer yet."""
    try:
        async with client.get(f"{url}/api/v1/query", params={"query": query}) as response:
            answer = await response.json()
    except (aiohttp.ClientError, ValueError):
        return []
    if answer["status"] != "success":
        assert response.status == 503, f"{query}: {answer}"  # it starts
        return []
    return [float(one["value"][1]) for one in answer["data"]["result"]]


@needs_prometheus
async def test_every_query_of_dashboard_and_alerts_returns_numbers(tmp_path: Path) -> None:
    asked = dict.fromkeys(queries())
    async with a_busy_router() as gateway, prometheus(gateway.admin_port, tmp_path) as url:
        busy = asyncio.ensure_future(traffic(gateway))
        try:
            async with aiohttp.ClientSession() as client:
                open_ = dict(asked)
                for _ in range(int(PATIENCE_S / SCRAPE_S)):
                    for query in list(open_):
                        found = await values(client, url, with_window(query))
                        if found and (query in NO_NUMBER or not all(map(isnan, found))):
                            del open_[query]
                    if not open_ or busy.done():
                        break
                    await asyncio.sleep(SCRAPE_S)
                assert not list(open_)
                async with client.get(f"{url}/api/v1/rules") as response:
                    groups = (await response.json())["data"]["groups"]
                assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
        finally:
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)


@needs_prometheus
def test_alert_rules_and_the_shipped_configuration_are_valid() -> None:
    assert PROMTOOL is not None
    shipped = str(DEPLOY / "prometheus" / "prometheus.yml")
    done = subprocess.run([PROMTOOL, "check", "config", shipped], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
async def test_what_a_router_shows_is_what_prometheus_wants_names_and_labels_to_be() -> None:
    async with a_busy_router() as gateway, aiohttp.ClientSession() as client:
        busy = asyncio.ensure_future(traffic(gateway))
        try:
            await until(lambda: gateway._metrics.requests.totals[("ok",)] > 0)
            async with client.get(f"http://127.0.0.1:{gateway.admin_port}/metrics") as response:
                text = await response.read()
        finally:
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
    assert PROMTOOL is not None
    done = await asyncio.to_thread(subprocess.run, [PROMTOOL, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


FIRES = {
    "TfirstNoReplica": ('tfirst_replica_up{instance="r",replica="a"}', "0x40"),
    "TfirstBreakerOpen": ('tfirst_replica_health{instance="r",replica="a",state="open"}', "1x40"),
    "TfirstLoadUnknown": ('tfirst_signal_age_seconds{instance="r",replica="a"}', "60x40"),
    "TfirstQueueGrows": ('tfirst_queued_requests{instance="r",tenant=""}', "100x40"),
}


@needs_prometheus
@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_when_it_should(alert: str, tmp_path: Path) -> None:
    series, lasting = FIRES[alert]
    case = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": series, "values": lasting}],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                        "eval_time": "9m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
        ],
    }
    (tmp_path / "case.yml").write_text(yaml.safe_dump(case))
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(tmp_path / "case.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_is_wrong_and_what_to_look_at() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_every_panel_has_a_description_and_a_place_of_its_own() -> None:
    panels = json.loads((DEPLOY / "grafana" / "tfirst.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
