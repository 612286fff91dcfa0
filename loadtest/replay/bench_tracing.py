"""What noting spans costs: a request from its prompt to its end, without sockets, off, not sampled and sampled.

Question  is tracing free when it is off, and nearly so for requests that are not sampled?
Work      one router's prompt reader and dispatcher in this process, four replicas, token prompts of 1,024 tokens; each
          request is read, placed, gives its first token and ends. Spans go to a queue that nobody reads
Measure   processor time of this thread for each request, median over rounds that take turns; the ratio to tracing off
Pass      not sampled: at most `LIMIT` times the time of off
"""

from __future__ import annotations

import time
from random import Random
from statistics import median

import msgspec
from opentelemetry.sdk.trace import TracerProvider

from estimators.request import RequestFacts
from router.actions import Ended, Send
from router.assemble import Core, assemble
from router.config import RouterConfig
from router.fleet import fleet_of_urls
from router.http.contract import Decider, PromptReader
from router.http.head import RequestHead
from router.laps import TimedLaps
from router.routes import Route
from router.telemetry.spans import Tracing

ROUNDS, REQUESTS = 21, 200
LIMIT = 1.05
BODY = msgspec.json.encode({"model": "m", "prompt": list(range(1024)), "stream": True, "max_tokens": 8})


def a_core() -> tuple[Core, TimedLaps]:
    """A router without sockets, its replicas up."""
    laps = TimedLaps(time.perf_counter, lambda phase, took_s: None)
    fleet = fleet_of_urls([f"http://127.0.0.1:{port}" for port in range(1, 5)])
    core = assemble(RouterConfig(), fleet, on_receipt=lambda receipt: None, every_candidate=False, laps=laps)
    for row in range(4):
        core.dispatcher.replica_up(row, frozenset({"m"}), 0.0)
    return core, laps


def parts(share: float | None) -> tuple[PromptReader, Decider]:
    """A reader and a decider. share : of requests that are sampled; None: tracing is off"""
    core, laps = a_core()
    read: PromptReader = core.prompts.facts_of
    if share is None:
        return read, core.dispatcher
    tracing = Tracing(TracerProvider().get_tracer("bench"), share=share, rng=Random(1), laps=laps)
    return tracing.reader(read), tracing.decider(core.dispatcher)


def took_us(read: PromptReader, decider: Decider, begin_s: float) -> float:
    """Processor time of one request, microseconds."""
    began_s = time.thread_time()
    for number in range(REQUESTS):
        now_s = begin_s + 0.1 * number
        head = RequestHead(b"POST", b"/v1/completions", "/v1/completions", [], Route.GENERATE)
        facts = read(head, BODY)
        assert isinstance(facts, RequestFacts)
        (send,) = decider.arrived(facts, now_s)
        assert isinstance(send, Send)
        decider.first_token(send, now_s + 0.01)
        decider.finished(send, Ended(200, output_tokens=8, prompt_tokens=1024), now_s + 0.05)
    return 1e6 * (time.thread_time() - began_s) / REQUESTS


def main() -> int:
    """Print the table; 1 when the limit is passed."""
    cases = {"off": parts(None), "not sampled": parts(0.0), "sampled": parts(1.0)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(ROUNDS):
        for name, (read, decider) in cases.items():
            times[name].append(took_us(read, decider, 1e3 * turn))
    off = median(times["off"])
    ratios = {
        name: median(one / other for one, other in zip(taken, times["off"], strict=True))
        for name, taken in times.items()
    }
    print(f"{'':12} {'us a request':>12} {'ratio':>6}")
    for name, taken in times.items():
        print(f"{name:12} {median(taken):12.1f} {ratios[name]:6.2f}")
    print(f"not sampled adds {1e2 * (ratios['not sampled'] - 1.0):.1f} % to {off:.0f} us")
    return int(ratios["not sampled"] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
