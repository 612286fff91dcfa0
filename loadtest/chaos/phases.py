"""The failures: what is done to the fleet, what ends it, what clients may see of it, and how the router shows it.

Each phase harms and mends one thing while traffic goes on. `may` is what the router cannot keep from clients: streams
of a replica that dies break, visibly; requests while there is no router find nobody. Everything else is a bug.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from loadtest.chaos.load import Outcome
from loadtest.chaos.stage import Stage

Shown = dict[str, Any]  # what /fleet says
Act = Callable[[Stage], Awaitable[None]]
EMPTIED_FOR_S = 2.5  # time for two probes to be missed
RECOVER_WITHIN_S = 12.0  # from the end of the failure; caches of a replica that came back empty are filled by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One failure.

    lasts_s : from the end of `harm` to `mend`; longer while `sign` is not there yet
    may : ends of requests that are no bug, beside OK
    sign : whether /fleet shows the failure, told what it said before, what it says now, and the target's name;
        None: it cannot
    sign_lasts : it may still be shown when all is well again
    kills_router : receipts may be missing
    """

    name: str
    what: str
    harm: Act
    lasts_s: float
    mend: Act
    may: frozenset[Outcome] = frozenset()
    sign: Callable[[Shown, Shown, str], bool] | None = None
    sign_lasts: bool = False
    kills_router: bool = False


# What is done, to the replica that most streams flow from at that moment: it is `stage.target` until the next harm.


def streams_of(now: Shown) -> dict[str, int]:
    """Streams that flow from each replica."""
    return {replica["name"]: replica["decoding"] for replica in now["replicas"]}


async def aim(stage: Stage) -> None:
    """Wait until streams flow, and take the replica that has the most."""
    streams = streams_of(await stage.until(lambda now: any(streams_of(now).values())))
    stage.target = max(streams, key=lambda name: streams[name])


async def kill(stage: Stage) -> None:
    await aim(stage)
    stage.replicas[stage.target].command.kill()


async def start_again(stage: Stage) -> None:
    await stage.start_replica(stage.target)


async def hold_still(stage: Stage) -> None:
    await aim(stage)
    stage.replicas[stage.target].command.hold_still()


async def let_go_on(stage: Stage) -> None:
    stage.replicas[stage.target].command.go_on()


async def silence(stage: Stage) -> None:
    await aim(stage)
    await stage.set_faults(stage.target, hang_share=1.0)


async def slow_down(stage: Stage) -> None:
    await aim(stage)
    await stage.set_faults(stage.target, step_factor=4.0)


async def end_faults(stage: Stage) -> None:
    await stage.end_faults(stage.target)


async def empty(stage: Stage) -> None:
    await aim(stage)
    await stage.empty_replica(stage.target, down_s=EMPTIED_FOR_S)


async def nothing(stage: Stage) -> None:
    """It mends by itself."""


async def lose_events(stage: Stage) -> None:
    for name in stage.replicas:
        await stage.set_faults(name, event_loss_share=0.5, event_loss_for_good=True)


async def freeze_metrics(stage: Stage) -> None:
    for index, name in enumerate(stage.replicas):
        await stage.set_faults(name, **({"metrics_frozen": True} if index % 2 else {"metrics_missing": "page"}))
        stage.target = name if index == 0 else stage.target


async def end_all_faults(stage: Stage) -> None:
    for name in stage.replicas:
        await stage.end_faults(name)


async def break_fleet_file(stage: Stage) -> None:
    whole = stage.fleet_text()
    stage.put_fleet(whole[: len(whole) // 3])  # further on, a cut file can be a right one with fewer replicas


async def mend_fleet_file(stage: Stage) -> None:
    stage.put_fleet(stage.fleet_text())


async def take_off_the_list(stage: Stage) -> None:
    await aim(stage)
    stage.put_fleet(stage.fleet_text(without=stage.target))


async def end_router(stage: Stage) -> None:
    await aim(stage)
    await stage.router.end()


async def kill_router(stage: Stage) -> None:
    await aim(stage)
    stage.router.kill()


async def start_router(stage: Stage) -> None:
    await stage.start_router()


async def kill_all(stage: Stage) -> None:
    await aim(stage)
    for replica in stage.replicas.values():
        replica.command.kill()


async def start_all(stage: Stage) -> None:
    await asyncio.gather(*(stage.start_replica(name) for name in stage.replicas))


# How it shows.


def replica(shown: Shown, name: str) -> Shown:
    """What is shown of one replica; nothing of one that is no member."""
    return next((row for row in shown["replicas"] if row["name"] == name), {})


def is_down(before: Shown, now: Shown, target: str) -> bool:
    """The replica is not up."""
    return not replica(now, target)["up"]


def is_left_alone(before: Shown, now: Shown, target: str) -> bool:
    """The replica is down, or its breaker open."""
    return bool(replica(now, target)["health"]["state"] != "closed")


def is_slow(before: Shown, now: Shown, target: str) -> bool:
    """Tokens of the replica were learned to take a quarter longer than before, or more."""
    return bool(replica(now, target)["pace_scale"] > 1.25 * replica(before, target)["pace_scale"])


def has_gaps(before: Shown, now: Shown, target: str) -> bool:
    """More gaps were seen in the numbers of cache events than before."""
    return bool(sum(s["gaps"] for s in now["event_sources"]) > sum(s["gaps"] for s in before["event_sources"]))


def load_is_old(before: Shown, now: Shown, target: str) -> bool:
    """Load of a replica whose page is gone was not heard of for longer than a second."""
    age_s = replica(now, target)["signal_age_s"]
    return age_s is None or age_s > 1.0


def is_refused(before: Shown, now: Shown, target: str) -> bool:
    """A list of replicas cannot be used."""
    return any(source["rejected"] is not None for source in now["discovery"]["sources"])


def has_left(before: Shown, now: Shown, target: str) -> bool:
    """The replica is no member."""
    return not replica(now, target)


def nobody_up(before: Shown, now: Shown, target: str) -> bool:
    return not any(row["up"] for row in now["replicas"])


PHASES = (
    Phase(
        name="killed",
        what="a replica's process is killed and started again",
        harm=kill,
        lasts_s=3.0,
        mend=start_again,
        may=frozenset({Outcome.CUT}),
        sign=is_down,
    ),
    Phase(
        name="stopped",
        what="a replica's process runs no more, and its sockets stay open",
        harm=hold_still,
        lasts_s=5.0,
        mend=let_go_on,
        may=frozenset({Outcome.CUT}),
        sign=is_left_alone,
    ),
    Phase(
        name="silent",
        what="a replica answers probes and no request",
        harm=silence,
        lasts_s=5.0,
        mend=end_faults,
        sign=is_left_alone,
    ),
    Phase(
        name="slowed",
        what="a replica's steps take four times as long",
        harm=slow_down,
        lasts_s=6.0,
        mend=end_faults,
        sign=is_slow,
        sign_lasts=True,
    ),
    Phase(
        name="emptied",
        what="a replica drops everything, answers 503, and is back and empty",
        harm=empty,
        lasts_s=EMPTIED_FOR_S,
        mend=nothing,
        may=frozenset({Outcome.CUT}),
        sign=is_down,
    ),
    Phase(
        name="events",
        what="half of all cache events are lost for good",
        harm=lose_events,
        lasts_s=3.0,
        mend=end_all_faults,
        sign=has_gaps,
        sign_lasts=True,
    ),
    Phase(
        name="metrics",
        what="load pages stand still on some replicas and are gone on the others",
        harm=freeze_metrics,
        lasts_s=3.0,
        mend=end_all_faults,
        sign=load_is_old,
    ),
    Phase(
        name="config",
        what="the fleet file is cut off in the middle",
        harm=break_fleet_file,
        lasts_s=3.0,
        mend=mend_fleet_file,
        sign=is_refused,
    ),
    Phase(
        name="unlisted",
        what="a replica is taken off the fleet file and put back",
        harm=take_off_the_list,
        lasts_s=3.0,
        mend=mend_fleet_file,
        sign=has_left,
    ),
    Phase(
        name="outage",
        what="all replicas are killed and started again",
        harm=kill_all,
        lasts_s=2.0,
        mend=start_all,
        may=frozenset({Outcome.CUT, Outcome.REFUSED}),
        sign=nobody_up,
    ),
    Phase(
        name="stopping",
        what="the router gets SIGTERM with streams in flight, and is started again",
        harm=end_router,
        lasts_s=0.0,
        mend=start_router,
        may=frozenset({Outcome.FAILED}),
    ),
    Phase(
        name="lost",
        what="the router is killed with streams in flight, and started again",
        harm=kill_router,
        lasts_s=0.0,
        mend=start_router,
        may=frozenset({Outcome.CUT, Outcome.FAILED}),
        kills_router=True,
    ),
)
