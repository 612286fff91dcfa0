"""Text prompts through a router and simulated engines as real processes: are they credited with what engines hold?"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.processes import get_json, get_text, listening, started, wait_for

DEMO = Path(__file__).parents[1] / "loadtest" / "demo"
MODEL = "Qwen/Qwen3-8B"
PATIENCE_S = 20.0


@dataclass
class Router:
    traffic: str
    admin: str
    receipts: Path


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router that asks its engines for tokens, in front of a fast fleet."""
    folder = tmp_path_factory.mktemp("prompts")
    fleet, resolved, log = folder / "fleet.yaml", folder / "resolved.yaml", folder / "router.log"
    fleet.write_text((DEMO / "fleet.yaml").read_text().replace("speed: 8", "speed: 50"))
    config = {"fleet": str(resolved), "port": 0, "admin_port": 0, "host": "127.0.0.1", "admin_host": "127.0.0.1"}
    config |= {"receipts": {"path": str(folder / "receipts.jsonl")}}
    config |= {"prompts": {"source": "tokenize", "timeout_s": 10.0, "forward_tokens": True}}
    (folder / "config.yaml").write_text(json.dumps(config))
    with started(
        folder / "sim.log", "sim", "--fleet", str(fleet), "--port", "0", "--write-fleet", str(resolved)
    ) as sim:
        wait_for(resolved.exists, sim, folder / "sim.log", "the engines")
        with started(log, "serve", "--config", str(folder / "config.yaml")) as process:
            wait_for(lambda: len(listening(log)) == 2, process, log, "the router")
            found = listening(log)

            def all_up() -> bool:
                return all(replica["up"] for replica in get_json(f"{found['admin']}/fleet")["replicas"])

            wait_for(all_up, process, log, "the router's view of the fleet")
            yield Router(found["traffic"], found["admin"], folder / "receipts.jsonl")


def post(router: Router, path: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    headers = {"content-type": "application/json", "x-request-id": request_id}
    request = urllib.request.Request(router.traffic + path, json.dumps({"model": MODEL, **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def receipt(router: Router, request_id: str) -> dict[str, Any]:
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        lines = map(json.loads, router.receipts.read_text().splitlines())
        found = next((line for line in lines if line["request_id"] == request_id), None)
        if found is not None:
            return dict(found)
        time.sleep(0.02)
    raise AssertionError(f"no receipt of {request_id}")


def wait_for_blocks(router: Router, blocks: int) -> None:
    limit = time.monotonic() + PATIENCE_S
    while get_json(f"{router.admin}/fleet")["directory_blocks"]["hbm"] < blocks:
        assert time.monotonic() < limit, "the engines announce what they hold"
        time.sleep(0.02)


def test_the_next_turn_of_a_chat_is_credited_with_the_one_before(router: Router) -> None:
    question = {"role": "user", "content": "why is the sky blue? " * 150}
    first = post(router, "/v1/chat/completions", {"messages": [question], "max_tokens": 4}, "turn-1")
    counted = receipt(router, "turn-1")
    assert (counted["prompt_exact"], counted["prompt_tokens"]) == (True, first["usage"]["prompt_tokens"])
    wait_for_blocks(router, counted["prompt_tokens"] // 16 - 1)
    messages = [question, first["choices"][0]["message"], {"role": "user", "content": "and green grass?"}]
    post(router, "/v1/chat/completions", {"messages": messages, "max_tokens": 4}, "turn-2")
    second = receipt(router, "turn-2")
    held = max(candidate["local_tokens"] for candidate in second["candidates"])
    assert held >= counted["prompt_tokens"] // 16 * 16 - 16


def test_a_completion_goes_on_as_ids_once_the_engine_agrees_and_counts_the_same(router: Router) -> None:
    """The first answer shows that the engine counts alike; from then on it gets ids, and must count them alike."""
    body = {"prompt": "once upon a time " * 100, "max_tokens": 4}
    answers = [post(router, "/v1/completions", body, f"text-{turn}") for turn in range(3)]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    shown = get_json(f"{router.admin}/fleet")["prompts"]
    assert shown["tokens"][MODEL]["text"] == "agrees"
    assert (shown["source"], shown["up"]) == ("tokenize", True)
    metrics = get_text(f"{router.admin}/metrics")
    assert 'tfirst_prompt_tokens_state{form="text",state="agrees"} 1.0' in metrics
    assert "tfirst_prompt_read_seconds_count" in metrics
