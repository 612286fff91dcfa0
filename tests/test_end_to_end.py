"""Router and simulated replicas as real processes on real sockets: what a user of the API sees."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.client import Sample, play
from loadtest.demo.processes import Addresses, get_json, get_text, listening, running_fleet, started, wait_for
from loadtest.traffic import read_traffic

DEMO = Path(__file__).parents[1] / "loadtest" / "demo"
MODEL = "Qwen/Qwen3-8B"
PATIENCE_S = 10.0


def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait for the state of another process; the limit only bounds a failure."""
    limit = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end-to-end")


@pytest.fixture(scope="module")
def fleet_file(folder: Path) -> Path:
    """The demo's fleet, much faster still."""
    path = folder / "fleet.yaml"
    path.write_text((DEMO / "fleet.yaml").read_text().replace("speed: 8", "speed: 50"))
    return path


@pytest.fixture(scope="module")
def running(fleet_file: Path, folder: Path) -> Iterator[Addresses]:
    with running_fleet(fleet_file, "e2e", folder) as addresses:
        yield addresses


def post(
    url: str, body: Any, headers: dict[str, str] | None = None, path: str = "/v1/completions"
) -> tuple[int, dict[str, str], bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data=data, headers={"content-type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, response.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, {k.lower(): v for k, v in exc.headers.items()}, exc.read()


def completion(prompt: list[int] | str, **changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 64, "sim_output_tokens": 8, **changes}


def prompt(seed: int, tokens: int = 4096) -> list[int]:
    return [(seed * 7919 + i * 31) % 150_000 for i in range(tokens)]


@contextmanager
def long_stream(url: str, tokens: int, request_id: str = "long") -> Iterator[HTTPResponse]:
    """A stream of that length that has begun; leaving closes its connection whatever is left of it."""
    host, port = url.removeprefix("http://").split(":")
    with closing(HTTPConnection(host, int(port), timeout=PATIENCE_S)) as client:
        body = completion(prompt(10), stream=True, max_tokens=tokens, ignore_eos=True)
        headers = {"content-type": "application/json", "x-request-id": request_id}
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        with closing(client.getresponse()) as response:
            response.read(50)
            yield response


def blocks_known(admin: str) -> list[int]:
    """Blocks the directory knows in replicas' memory and in the store."""
    blocks = get_json(f"{admin}/fleet")["directory_blocks"]
    return [blocks["hbm"], blocks["remote"]]


def receipts(folder: Path, policy: str = "e2e") -> dict[str, dict[str, Any]]:
    """What is written so far; the last line may still be under way."""
    *lines, _ = (folder / f"receipts-{policy}.jsonl").read_text().split("\n")
    return {line["request_id"]: line for line in map(json.loads, lines)}


def receipt_of(folder: Path, request_id: str) -> dict[str, Any]:
    eventually(lambda: request_id in receipts(folder), f"no receipt of {request_id}")
    return receipts(folder)[request_id]


def test_a_stream_arrives_whole_with_usage_and_done(running: Addresses) -> None:
    status, headers, data = post(
        running.traffic, completion(prompt(1), stream=True, stream_options={"include_usage": True})
    )
    events = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    usage = json.loads(events[-2])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4096, 8)
    assert sum(bool(json.loads(event)["choices"]) for event in events[:-1]) >= 8


def test_a_whole_answer_and_a_chat_answer_pass_through(running: Addresses) -> None:
    status, _, data = post(running.traffic, completion("hello"))
    assert (status, json.loads(data)["object"]) == (200, "text_completion")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    status, _, data = post(running.traffic, chat, path="/v1/chat/completions")
    assert (status, json.loads(data)["object"]) == (200, "chat.completion")


def test_the_clients_request_id_comes_back_and_names_the_receipt(running: Addresses, folder: Path) -> None:
    _, headers, data = post(running.traffic, completion(prompt(2), stream=True), {"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    assert b"cmpl-mine-1" in data
    receipt = receipt_of(folder, "mine-1")
    assert receipt["outcome"] == "ok"
    assert receipt["first_token_s"] > 0
    assert len(receipt["candidates"]) == 4
    assert str(prompt(2)[:3])[1:-1] not in json.dumps(receipt)  # no prompt, not even as ids


def test_the_decision_is_explained_when_asked_for(running: Addresses) -> None:
    _, headers, _ = post(running.traffic, completion(prompt(3)), {"x-tfirst-explain": "1"})
    explained = json.loads(headers["x-tfirst-explain"])
    assert explained["policy"] == "e2e"
    assert explained["chosen"]["replica"] == headers["x-tfirst-replica"]
    assert "x-tfirst-explain" not in post(running.traffic, completion(prompt(3)))[1]


def test_a_prompt_seen_before_is_expected_in_its_replicas_memory_and_in_the_store(
    running: Addresses, folder: Path
) -> None:
    first, again = completion(prompt(4), stream=True), completion(prompt(4) + prompt(5, 200), stream=True)
    before = blocks_known(running.admin)
    _, headers, _ = post(running.traffic, first, {"x-request-id": "hit-1"})
    eventually(
        lambda: all(after >= was + 256 for was, after in zip(before, blocks_known(running.admin), strict=True)),
        "the events of the first prompt did not come",
    )
    post(running.traffic, again, {"x-request-id": "hit-2"})
    receipt = receipt_of(folder, "hit-2")
    paths = {c["replica"]: (c["path"], c["local_tokens"], c["fetched_tokens"]) for c in receipt["candidates"]}
    assert paths.pop(headers["x-tfirst-replica"]) == ("local", 4096, 0)
    assert set(paths.values()) == {("remote", 0, 4096)}


def test_each_bad_request_gets_one_clear_sentence(running: Addresses) -> None:
    cases: list[tuple[Any, int, str]] = [
        (b"{broken", 400, "JSON"),
        (completion("x", model="gpt-none"), 404, "gpt-none"),
        ({"model": 7, "prompt": "x"}, 400, "model"),
        (completion("x", max_tokens="many"), 400, "max_tokens"),  # the replica's own answer, relayed
    ]
    for body, expected, word in cases:
        status, headers, data = post(running.traffic, body)
        error = json.loads(data)["error"]
        assert (status, error["code"]) == (expected, expected), body
        assert word in error["message"]
        assert "x-request-id" in headers


def test_models_and_probes_are_answered_by_the_router(running: Addresses) -> None:
    assert [card["id"] for card in get_json(f"{running.traffic}/v1/models")["data"]] == [MODEL]
    for path in ("/health", "/ready", "/version"):
        get_json(running.traffic + path)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get_text(f"{running.traffic}/metrics")


def test_metrics_of_the_router_tell_what_happened(running: Addresses) -> None:
    post(running.traffic, completion(prompt(6), stream=True))
    text = get_text(f"{running.admin}/metrics")
    for line in (
        'tfirst_requests_total{outcome="ok"}',
        'tfirst_replica_up{replica="a100-0"} 1.0',
        "tfirst_first_token_seconds_count",
        "tfirst_decision_seconds_count",
        'tfirst_event_source_state{source="store",state="live"} 1.0',
    ):
        assert line in text


def test_a_client_that_leaves_frees_its_booking_and_stops_the_replica(running: Addresses, folder: Path) -> None:
    with long_stream(running.traffic, 100_000, "left-1"):
        assert get_json(f"{running.admin}/fleet")["in_flight"] == 1
    eventually(lambda: get_json(f"{running.admin}/fleet")["in_flight"] == 0, "the booking stayed")
    assert receipt_of(folder, "left-1")["outcome"] == "cancelled"

    def idle() -> bool:
        pages = [get_text(f"{url}/metrics") for url in running.replicas]
        return all('num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 0' in page for page in pages)

    eventually(idle, "a replica went on generating")


def test_traffic_from_the_trace_is_answered_and_predicted(running: Addresses, folder: Path) -> None:
    rows = read_traffic(DEMO / "traffic.jsonl.gz")[:40]
    ended: list[Sample] = []
    samples = asyncio.run(play(running.traffic, MODEL, rows, speed=50.0, on_end=ended.append))
    assert [sample.error for sample in samples] == [None] * 40
    assert len(ended) == 40
    assert all(s.output_tokens == max(1, row.output_length) for s, row in zip(samples, rows, strict=True))
    assert get_json(f"{running.admin}/fleet")["in_flight"] == 0
    for sample in samples:
        assert receipt_of(folder, sample.request_id)["outcome"] == "ok"


def serving(folder: Path, name: str, *arguments: str) -> Any:
    log = folder / f"{name}.log"
    command = ("serve", "--host", "127.0.0.1", "--port", "0", "--admin-host", "127.0.0.1", "--admin-port", "0")
    return started(log, *command, *arguments), log


def test_plain_worker_urls_find_model_blocks_and_events_by_themselves(running: Addresses, folder: Path) -> None:
    process, log = serving(folder, "plain", "--worker-urls", *running.replicas)
    with process as router:
        wait_for(lambda: len(listening(log)) == 2, router, log, "the router")
        addresses = listening(log)

        def following() -> bool:
            sources = get_json(f"{addresses['admin']}/fleet")["event_sources"]
            return len(sources) == 4 and all(source["state"] in ("live", "silent") for source in sources)

        eventually(following, "event sources were not found")
        post(addresses["traffic"], completion(prompt(8), stream=True))
        _, headers, _ = post(addresses["traffic"], completion(prompt(8) + [1] * 50), {"x-tfirst-explain": "1"})
        assert json.loads(headers["x-tfirst-explain"])["policy"] == "e2e"
        eventually(lambda: blocks_known(addresses["admin"])[0] >= 4096 // 16, "no cache events were followed")
        assert get_json(f"{addresses['admin']}/fleet")["block_tokens"] == 16


class BackgroundServer:
    """A server of the standard library, answering from a thread until closed."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()


def test_an_overloaded_replica_without_a_stand_in_is_relayed_and_leaves_nothing_behind(folder: Path) -> None:
    """The replica's own 503 with its Retry-After reaches the client, its booking ends, and a receipt is written."""

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, b'{"data":[{"id":"m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.reply(503, b'{"error":{"message":"full"}}')

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("retry-after", "7")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as busy, closing(BackgroundServer(busy)):
        file = folder / "receipts-busy.jsonl"
        process, log = serving(
            folder, "busy", "--worker-urls", f"http://127.0.0.1:{busy.server_port}", "--receipts", str(file)
        )
        with process as router:
            wait_for(lambda: len(listening(log)) == 2, router, log, "the router")
            addresses = listening(log)
            eventually(lambda: get_json(f"{addresses['admin']}/fleet")["replicas"][0]["models"] == ["m"], "not up")
            for _ in range(5):
                status, headers, data = post(addresses["traffic"], {"model": "m", "prompt": [1, 2, 3]})
                assert (status, headers["retry-after"], data) == (503, "7", b'{"error":{"message":"full"}}')
            assert get_json(f"{addresses['admin']}/fleet")["in_flight"] == 0
            eventually(lambda: len(receipts(folder, "busy")) == 5, "the receipts were not written")
            assert [line["status"] for line in receipts(folder, "busy").values()] == [503] * 5
            status, _, _ = post(addresses["traffic"], b"{broken")
            assert status == 400
            assert 'tfirst_rejected_requests_total{status="400"} 1.0' in get_text(f"{addresses['admin']}/metrics")


def test_with_no_replica_up_requests_get_a_503_at_once_and_readiness_says_so(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        url = f"http://127.0.0.1:{placeholder.getsockname()[1]}"
    process, log = serving(folder, "alone", "--worker-urls", url)
    with process as router:
        wait_for(lambda: len(listening(log)) == 2, router, log, "the router")
        addresses = listening(log)
        status, headers, data = post(addresses["traffic"], completion("x"))
        assert (status, json.loads(data)["error"]["type"]) == (503, "ServiceUnavailable")
        assert int(headers["retry-after"]) >= 1
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get_text(f"{addresses['admin']}/ready")
        assert get_json(f"{addresses['admin']}/health") == {"status": "ok"}


def test_a_stream_in_progress_is_finished_after_a_signal_and_nobody_new_is_let_in(
    running: Addresses, folder: Path
) -> None:
    process, log = serving(folder, "stopping", "--worker-urls", *running.replicas)
    with process as router:
        wait_for(lambda: len(listening(log)) == 2, router, log, "the router")
        addresses = listening(log)
        eventually(lambda: any(r["up"] for r in get_json(f"{addresses['admin']}/fleet")["replicas"]), "not up")
        with long_stream(addresses["traffic"], 2000) as response:
            router.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(urllib.error.URLError):
            post(addresses["traffic"], completion("x"))
        assert router.wait(timeout=PATIENCE_S) == 0


def test_a_second_signal_cuts_streams_and_ends_at_once(running: Addresses, folder: Path) -> None:
    process, log = serving(folder, "hurry", "--worker-urls", *running.replicas)
    with process as router:
        wait_for(lambda: len(listening(log)) == 2, router, log, "the router")
        addresses = listening(log)
        eventually(lambda: any(r["up"] for r in get_json(f"{addresses['admin']}/fleet")["replicas"]), "not up")
        with long_stream(addresses["traffic"], 120_000) as response:
            router.send_signal(signal.SIGTERM)
            eventually(lambda: refuses(addresses["traffic"]), "the traffic port still accepts")
            router.send_signal(signal.SIGTERM)
            assert router.wait(timeout=PATIENCE_S) == 130
            with pytest.raises((IncompleteRead, ConnectionError)):
                response.read()


def refuses(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return True
    return False


def test_replicas_killed_in_the_middle_are_a_visible_failure_and_come_back_with_empty_caches(
    fleet_file: Path, folder: Path
) -> None:
    """They die together: they share one process. Nothing may hang, look finished, or be remembered."""
    resolved, sim_log = folder / "doomed.yaml", folder / "doomed-sim.log"
    with started(sim_log, "sim", "--fleet", str(fleet_file), "--port", "0", "--write-fleet", str(resolved)) as sim:
        wait_for(resolved.exists, sim, sim_log, "the replicas")
        process, log = serving(folder, "doomed", "--fleet", str(resolved))
        with process as router:
            wait_for(lambda: len(listening(log)) == 2, router, log, "the router")
            addresses = listening(log)
            eventually(lambda: all(r["up"] for r in get_json(f"{addresses['admin']}/fleet")["replicas"]), "not up")

            async def cut() -> bytes:
                seen = b""
                async with aiohttp.ClientSession() as session:
                    body = completion(prompt(9), stream=True, max_tokens=100_000, sim_output_tokens=100_000)
                    async with session.post(f"{addresses['traffic']}/v1/completions", json=body) as response:
                        async for piece in response.content.iter_any():
                            if not seen:
                                sim.kill()
                            seen += piece
                return seen

            with pytest.raises(aiohttp.ClientError):
                asyncio.run(cut())
            eventually(lambda: get_json(f"{addresses['admin']}/fleet")["in_flight"] == 0, "the booking stayed")
            status, _, _ = post(addresses["traffic"], completion("x"))
            assert status in (502, 503)
            assert blocks_known(addresses["admin"])[0] > 0
            with started(sim_log, "sim", "--fleet", str(resolved)):  # the same addresses, empty caches
                eventually(lambda: blocks_known(addresses["admin"])[0] == 0, "lost blocks are still believed in")
                # In this order: on a slow machine the router may only now find that the first ones are down.
                eventually(lambda: all(r["up"] for r in get_json(f"{addresses['admin']}/fleet")["replicas"]), "down")
                status, _, _ = post(addresses["traffic"], completion(prompt(11)))
                assert status == 200
                eventually(lambda: blocks_known(addresses["admin"])[0] >= 4096 // 16, "new events are not followed")
