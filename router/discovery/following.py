"""The loop over all sources of replicas: whole lists at the start and again and again, and what they come to.

Nothing here decides: `Kept` says how long a list counts, `merged` and `Edits` what all of them together are, and
`apply` what becomes of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, nan

from router.discovery.edits import Edits
from router.discovery.kept import Kept
from router.discovery.names import Names
from router.discovery.reconcile import merged
from router.discovery.sources import NoList, Source
from router.fleet import ReplicaSpec

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # how soon an operator's change of a file shows, and a row that was left is spare
READ_LIMIT_S = 10.0  # for one source; one that is silent must not hold up the others

Apply = Callable[[list[ReplicaSpec], Collection[str]], object]


@dataclass(frozen=True, slots=True)
class ListReport:
    """What operators see of one source. replicas : listed; failed_s : for how long; NaN while it is well"""

    source: str
    replicas: int
    failure: str | None
    failed_s: float


@dataclass(slots=True)
class _Followed:
    source: Source
    kept: Kept[ReplicaSpec] = field(default_factory=Kept)
    read_at_s: float = -inf


class Following:
    """Owner of the loop. Ask `first` what to start with, then `start` inside the running loop; `stop` once.

    sources : the first that lists a name or a URL counts
    apply : given what is wanted, and the names of those to be given nothing new, at every look
    look_every_s : seconds between two looks, > 0
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        names: Names,
        edits: Edits,
        clock: Callable[[], float],
        look_every_s: float = LOOK_EVERY_S,
        read_limit_s: float = READ_LIMIT_S,
    ) -> None:
        self._followed = [_Followed(source) for source in sources]
        self._names = names
        self._edits = edits
        self._clock = clock
        self._look_every_s = look_every_s
        self._read_limit_s = read_limit_s
        self._apply: Apply = lambda wanted, drained: None
        self._left_out: list[str] = []
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def first(self) -> list[ReplicaSpec]:
        """What is wanted at the start; a source that cannot be read is in the log, and has no replicas yet."""
        await self._read()
        return self._wanted()

    def start(self, apply: Apply) -> None:
        self._apply = apply
        self._task = asyncio.get_running_loop().create_task(self._run(), name="replicas")

    def look(self, *, anew: bool = False) -> None:
        """Have the next look come now. anew : every source is to be read, whether or not it is due."""
        if anew:
            for followed in self._followed:
                followed.read_at_s = -inf
        self._asked.set()

    def apply_now(self) -> None:
        """Apply what is known, without asking anybody: after an edit."""
        self._apply(self._wanted(), self._edits.drained)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._names.stop()

    def reports(self) -> list[ListReport]:
        """Every source, and every DNS name."""
        now_s = self._clock()
        kept = {followed.source.name: followed.kept for followed in self._followed}
        names = {f"dns {name.host}:{name.port}": addresses for name, addresses in self._names.known.items()}
        return [
            ListReport(name, len(one.entries(now_s)), one.failure, now_s - one.failed_since_s if one.failure else nan)
            for name, one in (kept | names).items()
        ]

    @property
    def left_out(self) -> Sequence[str]:
        """A sentence for each entry that another one stands before."""
        return self._left_out

    async def _run(self) -> None:
        while True:
            self._asked.clear()
            try:
                await self._read()
                self.apply_now()
            except Exception:  # the top of this task: a list nobody foresaw must not end all later ones
                log.exception("the replicas could not be brought in line with their lists; trying again")
            with suppress(TimeoutError):  # not `wait_for`: before 3.12 it can lose the cancellation of `stop`
                async with asyncio.timeout(self._look_every_s):
                    await self._asked.wait()

    async def _read(self) -> None:
        """Ask all sources that are due, then all names."""
        now_s = self._clock()
        due = [one for one in self._followed if one.kept.failure or now_s - one.read_at_s >= one.source.every_s]
        await asyncio.gather(*map(self._read_one, due))
        now_s = self._clock()
        listed = [replica for followed in self._followed for replica in followed.kept.entries(now_s)]
        for sentence in await self._names.look_up(listed, self._clock):
            log.warning("%s; its last addresses count for a while", sentence)

    async def _read_one(self, followed: _Followed) -> None:
        followed.read_at_s = self._clock()
        had_failed = followed.kept.failure is not None
        try:
            async with asyncio.timeout(self._read_limit_s):
                replicas = await followed.source.read()
        except NoList as exc:
            reason = str(exc)
        except TimeoutError:
            reason = f"no list came within {self._read_limit_s:g} s"
        except Exception as exc:  # the top of what a source does: whatever it is, its last list counts
            log.exception("the source of replicas %s failed", followed.source.name)
            reason = f"{type(exc).__name__}: {exc}"
        else:
            followed.kept.good(replicas, self._clock())
            if had_failed:
                log.info("the list of replicas from the %s counts again", followed.source.name)
            return
        if followed.kept.failed(reason, self._clock()):
            log.warning("the list of replicas from the %s stays as it was: %s", followed.source.name, reason)

    def _wanted(self) -> list[ReplicaSpec]:
        now_s = self._clock()
        lists = [
            (followed.source.name, self._names.expanded(followed.kept.entries(now_s), now_s))
            for followed in self._followed
        ]
        found, left_out = merged([*lists, ("admin", self._edits.added)])
        for sentence in left_out:
            if sentence not in self._left_out:
                log.warning("a replica is left out: %s", sentence)
        self._left_out = left_out
        return self._edits.laid_over(found)
