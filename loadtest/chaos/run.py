"""One run: the phases one after the other on one stage, each with its traffic, and what is left over between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from loadtest.chaos.account import (
    TOLERANCE,
    ReceiptLine,
    counts_of,
    disagreements,
    mean_first_s,
    read_receipts,
    recovery,
    unexpected,
)
from loadtest.chaos.load import Answer, Load, Pattern
from loadtest.chaos.phases import RECOVER_WITHIN_S, Phase, Shown
from loadtest.chaos.stage import Stage, stage

QUIET_LIMIT_S = 10.0  # until nothing of the traffic may be left: the pool's connections live for a second
SHOWN_LIMIT_S = 10.0  # a failure that /fleet does not show yet lasts so much longer
_LOOK_EVERY_S = 0.2
_SPARE_SOCKETS = 8  # connections for probes and events, which come and go


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is played. before_patterns : repetitions of the pattern before each failure"""

    rate_rps: float = 7.0
    pattern_s: float = 2.5
    before_patterns: int = 2
    warm_up_patterns: int = 3
    speed: float = 1.0
    replicas: int | None = None
    recover_within_s: float = RECOVER_WITHIN_S


@dataclass(slots=True)
class Result:
    """One phase. Times in seconds; None is unknown. wrong : a sentence for each thing that must not be so

    shown_s : from the failure until /fleet showed it. recovered_s : from its end until first tokens were as before
    slow : why it did not recover in time; None: it did. It is apart from `wrong` since it depends on the machine too
    """

    name: str
    what: str
    counts: dict[str, int]
    before_s: float
    during_s: float
    after_s: float
    shown_s: float | None
    recovered_s: float | None
    slow: str | None = None
    wrong: list[str] = field(default_factory=list)


async def run(
    phases: Sequence[Phase], folder: Path, *, seed: int, sizes: Sizes, on_end: Callable[[Result], None]
) -> list[Result]:
    """Play `phases` in order. on_end : told of each at its end.

    Raises
    ------
    NotRunning : a process does not start or end, so that nothing can be said.
    """
    async with stage(folder, seed=seed, speed=sizes.speed, replicas=sizes.replicas) as made:
        return await Run(made, seed=seed, sizes=sizes).play(phases, on_end)


@dataclass(slots=True)
class Moments:
    """When a phase began, when harm was done and when it was over, by the loop's clock; and when it was shown."""

    began_s: float
    broken_s: float
    well_s: float = 0.0
    shown_s: float | None = None


class Run:
    """Plays phases on one stage."""

    def __init__(self, made: Stage, *, seed: int, sizes: Sizes) -> None:
        self._stage = made
        self._sizes = sizes
        self._pattern = Pattern(seed=seed, length_s=sizes.pattern_s, rate_rps=sizes.rate_rps)
        self._next = 0  # request of the pattern
        self._receipts_read = 0  # bytes
        self._sockets = 0  # of the router before any traffic

    async def play(self, phases: Sequence[Phase], on_end: Callable[[Result], None]) -> list[Result]:
        """Play `phases` in order, after a warm-up."""
        await self._stage.until(all_seen)
        self._sockets = self._stage.router_sockets().all
        load = self._load("warm")
        load.begin(first=0)
        await asyncio.sleep(self._sizes.warm_up_patterns * self._sizes.pattern_s)
        self._next = await load.end()
        await self._left_over()
        self._new_receipts()
        results = []
        for phase in phases:
            results.append(await self._phase(phase))
            on_end(results[-1])
        return results

    def _load(self, name: str) -> Load:
        return Load(self._stage.session, self._stage.traffic, self._stage.model, self._pattern, name=name)

    async def _phase(self, phase: Phase) -> Result:
        before = await self._stage.fleet()
        load = self._load(phase.name)
        load.begin(first=self._next)
        try:
            moments = await self._fail(phase, before)
            first_s = mean_first_s([a for a in load.answers if a.at_s < moments.broken_s])
            await self._until_recovered(load, first_s, moments.well_s)
        finally:
            self._next = await load.end()
        wrong = unexpected(load.answers, phase.may)
        wrong += await self._left_over(None if phase.sign is None or phase.sign_lasts else (phase, before))
        wrong += disagreements(load.answers, self._new_receipts(), killed=phase.kills_router)
        if phase.sign is not None and moments.shown_s is None:
            wrong.append("/fleet did not show it")
        return self._result(phase, load.answers, moments, first_s, wrong)

    def _result(
        self, phase: Phase, answers: list[Answer], moments: Moments, before_s: float, wrong: list[str]
    ) -> Result:
        recovered_s, after_s = self._recovery(answers, before_s, moments.well_s)
        slow = None
        if recovered_s is None or recovered_s > self._sizes.recover_within_s:
            within = f"within {TOLERANCE:.0%} of before within {self._sizes.recover_within_s:g} s"
            slow = f"first tokens were not {within}: {before_s:.3f} s before, {after_s:.3f} s after"
        shown_s = None if moments.shown_s is None else moments.shown_s - moments.broken_s
        during = [a for a in answers if moments.broken_s <= a.at_s < moments.well_s]
        return Result(
            name=phase.name,
            what=phase.what,
            counts=dict(counts_of(answers)),
            before_s=before_s,
            during_s=mean_first_s(during),
            after_s=after_s,
            shown_s=shown_s,
            recovered_s=recovered_s,
            slow=slow,
            wrong=wrong,
        )

    async def _fail(self, phase: Phase, before: Shown) -> Moments:
        """Let traffic run for a while, do the harm, mend it; meanwhile look for its sign."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.sleep(self._sizes.before_patterns * self._sizes.pattern_s)
        moments = Moments(began_s, loop.time())
        watch = asyncio.create_task(self._watch(phase, before, moments))
        try:
            await phase.harm(self._stage)
            await asyncio.sleep(phase.lasts_s)
            await asyncio.wait({watch}, timeout=SHOWN_LIMIT_S)
            await phase.mend(self._stage)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        moments.well_s = loop.time()
        return moments

    async def _watch(self, phase: Phase, before: Shown, moments: Moments) -> None:
        while phase.sign is not None and moments.shown_s is None:
            with suppress(aiohttp.ClientError, TimeoutError):
                if phase.sign(before, await self._stage.fleet(), self._stage.target):
                    moments.shown_s = asyncio.get_running_loop().time()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _until_recovered(self, load: Load, before_s: float, well_s: float) -> None:
        """Let traffic go on until first tokens are as before, or the time for that is over."""
        loop = asyncio.get_running_loop()
        until_s = well_s + self._sizes.recover_within_s + self._pattern.length_s
        while loop.time() < until_s:
            await asyncio.sleep(2 * _LOOK_EVERY_S)
            if self._recovery(load.answers, before_s, well_s)[0] is not None:
                return

    def _recovery(self, answers: Sequence[Answer], before_s: float, well_s: float) -> tuple[float | None, float]:
        return recovery(answers, before_s=before_s, well_at_s=well_s, window=self._pattern.count)

    async def _left_over(self, gone: tuple[Phase, Shown] | None = None) -> list[str]:
        """What the router has not let go of some time after all traffic has ended.

        gone : a phase whose sign must be gone too, and what /fleet said before it
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + QUIET_LIMIT_S
        while True:
            shown = await self._stage.fleet()
            found = bookings_left(shown) + self._sockets_left()
            if gone is not None:
                phase, before = gone
                if phase.sign is not None and phase.sign(before, shown, self._stage.target):
                    found.append("/fleet still shows it though it is over")
            if not found or loop.time() >= until_s:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)

    def _sockets_left(self) -> list[str]:
        now = self._stage.router_sockets()
        found = []
        if now.clients:
            found.append(f"the router holds {now.clients} connections of clients that all have left")
        if now.half_closed:
            found.append(f"the router holds {now.half_closed} connections that their peers have closed")
        if now.all > self._sockets + _SPARE_SOCKETS:
            found.append(f"the router holds {now.all} sockets, {self._sockets} before any traffic")
        return found

    def _new_receipts(self) -> list[ReceiptLine]:
        """Receipts since the last call."""
        text = self._stage.receipts_text()
        lines = read_receipts(text[self._receipts_read :])
        self._receipts_read = len(text)
        return lines


def all_seen(shown: Shown) -> bool:
    """Every replica is up, and its cache events are followed."""
    return all(replica["up"] for replica in shown["replicas"]) and all(
        source["state"] in ("live", "silent") for source in shown["event_sources"]
    )


def bookings_left(shown: Shown) -> list[str]:
    """A sentence for each request that is still accounted for, told /fleet at a time without traffic."""
    found = [f"/fleet says {what}: {shown[what]}" for what in ("in_flight", "queued") if shown[what]]
    for replica in shown["replicas"]:
        found += [f"{replica['name']} has {what}: {replica[what]}" for what in ("booked", "decoding") if replica[what]]
    if shown["receipts"] and shown["receipts"]["dropped"]:
        found.append(f"{shown['receipts']['dropped']} receipts were dropped")
    if shown["receipts"] and shown["receipts"]["waiting"]:
        found.append(f"{shown['receipts']['waiting']} receipts are not written")
    return found
