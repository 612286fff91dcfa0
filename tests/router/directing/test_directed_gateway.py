"""Peers named with the request, from a whole router to simulated engines, over real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.config import PolicyConfig
from router.fleet import load_fleet
from tests.router.directing.gateway_bench import HELD, MODEL, bench
from tests.router.test_gateway import running
from tests.sim_backends.builders import prompt


def told_peer(way: str, **more: Any) -> dict[str, Any]:
    fetch = {"by": "directed", "discipline": "overlapped", "minimum_tokens": 64}
    return {"fetch": fetch, "told": {"peer": way, "store": "never"}, "store": None, **more}


@pytest.mark.parametrize("way", ["header", "body"])
async def test_a_prompt_that_a_slow_replica_holds_is_read_from_it_by_a_fast_one(tmp_path: Path, way: str) -> None:
    async with bench(tmp_path, {"card": "A100"}, {"card": "OLD"}, **told_peer(way)) as use:
        await use.direct(1, HELD)
        await use.known("hbm")
        status, replica, answer = await use.ask([*HELD, *prompt(1500, start=60_000)])
        assert (status, replica) == (200, "r0")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(HELD)
        assert use.fetched(0)["peer"] == len(HELD)
        await use.hints(**{f"{way}_told": 1, f"{way}_worked": 1})
        assert f'tfirst_hints_total{{kind="{way}_worked"}} 1.0' in await use.router.metrics()
    receipt = json.loads(use.receipts.read_text().splitlines()[-1])
    assert receipt["directed"] == way
    assert receipt.get("edited", []) == ([] if way == "header" else ["kv_transfer_params"])
    assert receipt["candidates"][receipt["chosen"]]["path"] == "peer"


async def test_clients_cannot_name_a_peer_to_read(tmp_path: Path) -> None:
    async with bench(tmp_path, {"card": "A100"}, {"card": "A100"}, **told_peer("header"), seen=1) as use:
        await use.direct(1, HELD)
        other = (use.cluster.fleet.replicas[1].url or "").removeprefix("http://")
        body = {"model": MODEL, "prompt": HELD, "max_tokens": 1}
        field = {"x-kv-cache-source-host-port": other}
        async with use.session.post(f"{use.router.traffic}/v1/completions", json=body, headers=field) as response:
            assert response.status == 200
        assert use.fetched(0) == {}


async def test_engines_that_do_not_listen_are_told_no_more_and_answer_all_the_same(tmp_path: Path) -> None:
    """The router names peers in the body; the engines listen to the head."""
    sections = told_peer("header")
    async with bench(tmp_path, {"card": "A100"}, {"card": "OLD"}, **sections) as use:
        fleet_text = (tmp_path / "fleet.yaml").read_text().replace("peer: header", "peer: body")
        (tmp_path / "deaf.yaml").write_text(fleet_text)
        async with running(fleet=load_fleet(tmp_path / "deaf.yaml"), policy=PolicyConfig(name="ttft")) as deaf:
            use.router = deaf
            for number in range(4):
                there = prompt(4000, start=5000 * (number + 1))
                await use.direct(1, there)
                await use.known("hbm", (number + 1) * (4000 // 16) + number * (1500 // 16))
                status, replica, _ = await use.ask([*there, *prompt(1500, start=60_000)])
                assert (status, replica) == (200, "r0")
            await use.hints(body_failed=4, body_rest=1)
            shown = await deaf.fleet()
            assert shown["directions"]["resting"] == {"r0": "body"}
