"""Locust itself, headless and with its page, against a small server on loopback.

Locust replaces the standard library's sockets when it is imported, so it never is in the process of the tests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from loadtest.compare import STARTS_LOCUST, main, named_url, scenario_files
from loadtest.scenarios.goodput import Run
from tests.loadtest.scenarios.servers import a_server, busy, cut

ROOT = Path(__file__).parents[3]
WITHOUT_LOCUST = "locust is not installed: pip install 'tfirst[locust]'"
needs_locust = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason=WITHOUT_LOCUST)

SHORT = ["--warm-up-s", "0", "--size", "0.02"]


async def locust(name: str, url: str, *options: str) -> tuple[int, str, str]:
    """Exit status and output of one run."""
    command = [sys.executable, "-c", STARTS_LOCUST, "-f", str(scenario_files()[name]), "--host", url, *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=ROOT)
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout=60)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_every_scenario_states_its_question_seed_arrivals_warm_up_and_mark() -> None:
    for path in scenario_files().values():
        header = path.read_text().split('"""')[1]
        for word in ("Question  ", "Seed      ", "Arrivals  ", "Warm-up   ", "Pass      "):
            assert f"\n{word}" in header, (path, word)
        assert "--host" in header, path


def test_every_kind_of_load_has_a_scenario() -> None:
    assert set(scenario_files()) == {
        "mix",
        "chat",
        "rag",
        "agents",
        "tenants",
        "replay_trace",
        "burst",
        "ramp",
    }


@needs_locust
async def test_an_open_loop_sends_all_it_has_to_send_and_ends(tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    options = ["--headless", "--rows", "12", "--factor", "40", "--exact-length", "--result", str(result), *SHORT]
    async with a_server() as server:
        status, out, err = await locust("replay_trace", f"{server.url}/v1", *options)
    assert status == 0, err
    assert "passes: 90% within deadlines are wanted" in out
    assert len(server.bodies) == 12
    first = server.bodies[0]
    assert (first["model"], first["stream"], first["ignore_eos"]) == ("it", True, True)
    run = msgspec.json.decode(result.read_bytes(), type=Run)
    assert len(run.samples) == 12
    assert all(
        sample.error is None and sample.output_tokens == 2 and sample.cached_tokens == 10 for sample in run.samples
    )
    assert re.search(r"T_first +trace +12 ", err)
    assert re.search(r"inter-token +trace +12 ", err)
    assert re.search(r"end to end +trace +12 ", err)


@needs_locust
@pytest.mark.parametrize(("write", "said"), [(cut, "HTTPParseError"), (busy, "503: not today")])
async def test_what_is_no_answer_is_a_failure_and_the_run_does_not_pass(
    write: Callable[[asyncio.StreamWriter], None], said: str
) -> None:
    async with a_server(write) as server:
        status, out, _ = await locust(
            "replay_trace", server.url, "--headless", "--rows", "3", "--factor", "90", "--model", "m", *SHORT
        )
    assert status == 1
    assert f"first error: {said}" in out
    assert "FAILS" in out


@needs_locust
async def test_a_target_that_names_no_model_ends_the_run_with_a_sentence() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        status, _, err = await locust("chat", url, "--headless", "-t", "5", *SHORT)
    assert status == 2
    assert "give one with --model" in err


@needs_locust
@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "options", "said"),
    [
        ("127.0.0.1:9", ["--model", "m"], "--host http://HOST:PORT"),
        ("http://127.0.0.1:9", ["--model", "m", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        ("http://127.0.0.1:9", ["--model", "m", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY, and that variable"),
    ],
)
async def test_a_run_that_cannot_be_made_ends_with_a_sentence(host: str, options: list[str], said: str) -> None:
    status, out, err = await locust("replay_trace", host, "--headless", *options)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@needs_locust
async def test_the_key_goes_with_every_request_and_with_the_question_for_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-1")
    options = ["--headless", "--rows", "2", "--factor", "90", "--api-key-env", "MY_KEY", *SHORT]
    async with a_server() as server:
        status, _, err = await locust("replay_trace", server.url, *options)
    assert status == 0, err
    assert len(server.heads) == 2
    assert server.looks
    assert all("authorization: bearer sk-1" in head.lower() for head in (*server.heads, *server.looks))


@needs_locust
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mix", "chat", "rag", "agents", "tenants"])
async def test_users_of_a_closed_loop_ask_again_and_carry_their_history(name: str, tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    options = ["--headless", "-u", "12", "-r", "50", "-t", "3", "--result", str(result), "--salt", "xy", *SHORT]
    async with a_server() as server:
        status, _, err = await locust(name, server.url, *options)
    assert status == 0, err
    firsts = [body["messages"][0]["content"] for body in server.bodies]
    assert all(text.startswith("xy ") for text in firsts)
    longest = max(len(body["messages"]) for body in server.bodies)
    assert longest >= 4 or name == "rag"
    assert any("x-tenant: batch" in head.lower() for head in server.heads) == (name == "tenants")


@needs_locust
@pytest.mark.slow
async def test_samples_of_all_workers_come_together_and_their_users_differ(tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    options = ["--headless", "--processes", "2", "-u", "8", "-r", "8", "-t", "4", "--result", str(result), *SHORT]
    async with a_server() as server:
        status, _, err = await locust("chat", server.url, *options)
    assert status == 0, err
    run = msgspec.json.decode(result.read_bytes(), type=Run)
    assert len(run.samples) == len(server.bodies) >= 8
    questions = [body["messages"][-1]["content"] for body in server.bodies]
    assert len(set(questions)) == len(questions)


@needs_locust
@pytest.mark.slow
async def test_one_seed_sends_the_same_requests_again() -> None:
    sent = []
    for _ in range(2):
        async with a_server() as server:
            options = ["--headless", "--rate", "20", "--for-s", "2", *SHORT]
            assert (await locust("burst", server.url, *options))[0] == 0
            sent.append(sorted(json.dumps(body) for body in server.bodies))
    assert sent[0] == sent[1]
    assert len(sent[0]) > 10


@needs_locust
@pytest.mark.slow
async def test_two_addresses_are_compared_in_one_command(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--", "--to-rate", "20", "--for-s", "2", *SHORT]
    async with a_server() as one, a_server(busy) as other:
        names = [f"well={one.url}", f"ill={other.url}"]
        status = await asyncio.to_thread(main, ["ramp", *names, *options, "--model", "it"])
    out = capfd.readouterr().out
    assert status == 0
    assert re.search(r"^ +well +ill +change$", out, re.MULTILINE)
    assert re.search(r"^within deadlines +100% +0\.0% +-100%$", out, re.MULTILINE)
    salts = {body["messages"][0]["content"][:8] for server in (one, other) for body in server.bodies}
    assert len(salts) == 2


@needs_locust
@pytest.mark.slow
async def test_the_page_runs_a_scenario_and_has_its_report() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def page(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    async def page_with(path: str, text: str) -> str:
        """The page, asked again until it has `text`; the caller limits how long."""
        while True:
            try:
                if text in (found := await asyncio.to_thread(page, path)):
                    return found
            except OSError:
                pass  # not up yet
            await asyncio.sleep(0.1)

    async with a_server() as server, asyncio.timeout(60):
        options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--autostart", "--autoquit", "1"]
        run = asyncio.create_task(
            locust("replay_trace", server.url, *options, "--rows", "4", "--factor", "20", "-t", "6", *SHORT)
        )
        assert "Locust" in await page_with("/", "Locust")
        assert "4 requests" in await page_with("/goodput", "4 requests")
        assert (await run)[0] == 0


def test_an_address_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert named_url("a=http://h:1/v1") == ("a", "http://h:1/v1")
    for words in (["http://h:1"], ["a=h:1"], ["a=http://h:1"], ["a=http://h:1", "a=http://h:2"]):
        with pytest.raises(SystemExit):
            main(["chat", *words])
    assert "two addresses" in capsys.readouterr().err
