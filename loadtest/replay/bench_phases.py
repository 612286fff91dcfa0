"""Where the processor time of a request goes: a table of phases whose sum is the total.

Question  what would have to be cheaper for a decision to be?
Work      a whole gateway in this process, on a core of its own (`--core`), four stub engines and the clients of
          `bench_proxy.py` beside it: 16 connections, chat requests of one length; default objective, receipts off
Measure   processor time of the event loop's thread. A function of a phase is charged with the time until it returns,
          less that of the phases it calls itself; what is in no phase is the relay: kernel, event loop, protocols,
          parsing of answers. What the timers cost is measured with an empty function, taken off each phase by its
          calls, and has a line of its own
Pass      nothing: a report
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import uvloop

from estimators.estimates import Estimator
from loadtest.bench_proxy import CONNECTIONS, stubs
from loadtest.proxy_bench import bodies
from loadtest.proxy_bench.load import closed_loop
from policies.objectives import EndToEnd
from router import dispatch, placing
from router.config import RouterConfig
from router.decider import TimedDecider
from router.dispatch import Dispatcher
from router.endings import Endings
from router.fleet import fleet_of_urls
from router.gateway import Gateway
from router.holdings import DirectoryHoldings
from router.http.assembler import RequestAssembler
from router.learning import Learning
from router.notes import Notes
from router.placing import Placer
from router.prompts.production import Prompts

RELAY, TIMERS = "relay", "(timers)"
PARTS: dict[str, list[tuple[type | ModuleType, str]]] = {
    "parse": [(RequestAssembler, "feed")],
    "hash": [(Prompts, "read")],
    "match": [(DirectoryHoldings, "held")],
    "estimate": [(Learning, "surroundings"), (Estimator, "estimate")],
    "choose": [(EndToEnd, "choose")],
    "book": [(Placer, "_book"), (Placer, "_promise"), (DirectoryHoldings, "expect")],
    "receipt": [
        (Notes, "__init__"),
        (dispatch, "write_candidates"),
        (placing, "note_choice"),
        (placing, "note_chosen"),
        (Endings, "close"),
    ],
    "learn": [
        (Learning, "first_token"),
        (Learning, "answered"),
        (Learning, "ended"),
        (Placer, "answered"),
        (Placer, "_computed"),
    ],
    "decide, rest": [
        (TimedDecider, "arrived"),
        (TimedDecider, "finished"),
        (Dispatcher, "first_token"),
    ],
}
PHASES = (*PARTS, RELAY, TIMERS)


class Phases:
    """Charges time to the phase it is in, of which there is always one. clock : seconds, only of this thread"""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._now = RELAY
        self.restart()

    def restart(self) -> None:
        """Forget what was charged so far."""
        self.spent_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.calls: Counter[str] = Counter()
        self._since_s = self._clock()

    def spent(self, timer_s: float) -> dict[str, float]:
        """Seconds of each phase up to now. timer_s : cost of one call's timers, which is moved to a line of its own"""
        self._turn_to(self._now)
        spent_s = dict(self.spent_s)
        for phase, calls in self.calls.items():
            spent_s[phase] -= calls * timer_s
            spent_s[TIMERS] += calls * timer_s
        return spent_s

    def charged(self, phase: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        """`rule`, charged to `phase` less what is charged inside."""

        def timed(*args: Any, **named: Any) -> Any:
            before = self._turn_to(phase)
            self.calls[phase] += 1
            try:
                return rule(*args, **named)
            finally:
                self._turn_to(before)

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All rules of `PARTS` are charged, for objects made inside."""
        with ExitStack() as stack:
            for phase, rules in PARTS.items():
                for owner, name in rules:
                    stack.enter_context(mock.patch.object(owner, name, self.charged(phase, getattr(owner, name))))
            yield

    def _turn_to(self, phase: str) -> str:
        """Charge what has passed to the phase until now, and go on in another. Returns the phase before."""
        now_s = self._clock()
        before, self._now = self._now, phase
        self.spent_s[before] += now_s - self._since_s
        self._since_s = now_s
        return before


def timer_cost_s(times: int = 20_000) -> float:
    """What the timers add to one call, seconds: least of three."""

    def nothing() -> None:
        return None

    timed = Phases().charged(RELAY, nothing)
    costs_s = []
    for _ in range(3):
        began_s = time.thread_time()
        for _ in range(times):
            nothing()
        middle_s = time.thread_time()
        for _ in range(times):
            timed()
        costs_s.append((time.thread_time() - middle_s) - (middle_s - began_s))
    return max(0.0, min(costs_s) / times)


async def measured(
    ports: Sequence[int], phases: Phases, *, length: int, seconds: float
) -> tuple[dict[str, float], int]:
    """Seconds of each phase, and requests answered."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    config = RouterConfig(worker_urls=urls, host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0)
    gateway = Gateway(config, fleet_of_urls(urls))
    await gateway.start()
    try:
        for warm in (True, False):
            phases.restart()
            command = [sys.executable, "-m", __spec__.name, "--send-to", str(gateway.traffic_port)]
            command += ["--length", str(length), "--seconds", str(1.0 if warm else seconds)]
            clients = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            told, _ = await clients.communicate()
            spent_s = phases.spent(timer_cost_s())
        answered, wrong = json.loads(told)
        if wrong:
            raise RuntimeError(f"{wrong} answers were wrong")
        return spent_s, int(answered)
    finally:
        await gateway.stop()


def send_to(port: int, *, length: int, seconds: float) -> None:
    """The clients' process: prints how many answers were whole, and how many were not."""
    requests = bodies.chats(length)
    tally = uvloop.run(closed_loop(port, requests, connections=CONNECTIONS, seconds=seconds, seed=0))
    print(json.dumps([tally.answered, tally.wrong]))


def table(spent_s: dict[str, float], answered: int) -> str:
    """A line for each phase, microseconds of one request, and their sum."""
    total_s = sum(spent_s.values())
    lines = [
        f"{phase:14} {1e6 * seconds / answered:8.1f} us {seconds / total_s:7.1%}" for phase, seconds in spent_s.items()
    ]
    return "\n".join([*lines, f"{'total':14} {1e6 * total_s / answered:8.1f} us   {answered} requests"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, help="of a prompt, bytes (default: 64, 32,000 and 256,000)")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--core", type=int, default=1, help="of the gateway; engines and clients get the others")
    parser.add_argument("--send-to", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    others = os.sched_getaffinity(0) - {args.core} or {args.core}
    if args.send_to is not None:
        os.sched_setaffinity(0, others)
        send_to(args.send_to, length=args.length, seconds=args.seconds)
        return 0
    logging.basicConfig(level=logging.ERROR)
    with stubs(min(others)) as ports:
        for length in [args.length] if args.length else [bodies.SMALL, bodies.MEDIUM, bodies.LARGE]:
            phases = Phases()
            with phases.watching():
                os.sched_setaffinity(0, {args.core})
                spent_s, answered = uvloop.run(measured(ports, phases, length=length, seconds=args.seconds))
            print(f"prompt of {length} bytes\n{table(spent_s, answered)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
