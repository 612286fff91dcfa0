"""Asks a look-up service in the background, so that no decision ever waits for one.

Model     whoever places a request says which prompt it was (`want`) and goes on; a few workers ask, and what comes back
          serves the next prompts with the same beginning through `Answers`. A service that fails is left alone for a
          second, then two, up to half a minute
Valid     services that answer one POST within the deadline
Blind to  the first prompt of its kind: nothing is known of it yet, it is placed without
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from router.signals.lmcache import BadAnswer, Holding
from router.signals.looked_up import Answers

log = logging.getLogger(__name__)

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0
_MOST_REMEMBERED = 4096
_MAX_ANSWER_BYTES = 16 << 20


class Exchange(Protocol):
    """One service's question and answer, as bytes (`lmcache.Controller`, `lmcache.Coordinator`)."""

    @property
    def path(self) -> str: ...
    def question(self, tokens: Sequence[int], *, salt: str) -> bytes | None: ...
    def answer(self, body: bytes, *, tokens: int) -> list[Holding]: ...


@dataclass(slots=True)
class LookupCounts:
    """Totals since the start. What was wanted is the sum of all but `failed` and `bad_answers`, which were asked."""

    asked: int = 0
    recent: int = 0  # asked about not long ago
    unaskable: int = 0  # too short, or of a kind the service cannot answer for
    dropped: int = 0  # too many waiting
    resting: int = 0  # the service failed a moment ago
    failed: int = 0  # no answer, or a status that is none
    bad_answers: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    chain: Sequence[int]
    tokens: int
    body: bytes


class LookupClient:
    """Owner of the workers that ask one service. `start` inside a running loop, `stop` before it ends.

    Parameters
    ----------
    session : its headers are sent with every question
    base_url : http(s)://host[:port]
    answers : where what comes back is kept
    deadline_s : for each question, > 0
    again_s : a prompt is asked about once in this time, > 0
    workers : questions under way at once, >= 1; waiting : prompts that may wait for one, >= 1
    clock : the router's own, seconds
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        exchange: Exchange,
        answers: Answers,
        *,
        deadline_s: float = 0.5,
        again_s: float = 2.0,
        workers: int = 4,
        waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (deadline_s > 0 and again_s > 0 and workers >= 1 and waiting >= 1):
            raise ValueError("deadline_s and again_s must be positive, workers and waiting at least 1")
        self.counts = LookupCounts()
        self._session = session
        self._url = base_url.rstrip("/") + exchange.path
        self._exchange = exchange
        self._answers = answers
        self._timeout = aiohttp.ClientTimeout(total=deadline_s)
        self._again_s = again_s
        self._workers = workers
        self._clock = clock
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(waiting)
        self._lately: dict[int, float] = {}  # last block of a chain -> when it was asked about
        self._rest_s = 0.0
        self._rests_until_s = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        assert not self._tasks, "start is called once"
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._work(), name=f"look-up {self._url}") for _ in range(self._workers)]

    async def stop(self) -> None:
        """End the workers. Prompts that wait are forgotten."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def want(self, chain: Sequence[int], tokens: Sequence[int], *, salt: str = "") -> bool:
        """Have this prompt looked up some time soon; never waits. Whether it will be asked about.

        chain : of `tokens`, as the router names its blocks; it must cover one chunk at least
        """
        now_s, stride = self._clock(), self._answers.stride
        usable = len(chain) - len(chain) % stride
        if not usable:
            self.counts.unaskable += 1
        elif now_s < self._rests_until_s:
            self.counts.resting += 1
        elif now_s - self._lately.get(chain[usable - 1], float("-inf")) < self._again_s:
            self.counts.recent += 1
        elif self._queue.full():
            self.counts.dropped += 1
        else:
            return self._put(chain[:usable], tokens, salt, now_s)
        return False

    def _put(self, chain: Sequence[int], tokens: Sequence[int], salt: str, now_s: float) -> bool:
        whole = tokens[: len(chain) * self._answers.block_tokens]
        body = self._exchange.question(whole, salt=salt)
        if body is None:
            self.counts.unaskable += 1
            return False
        self._lately.pop(chain[-1], None)
        self._lately[chain[-1]] = now_s
        if len(self._lately) > _MOST_REMEMBERED:
            del self._lately[next(iter(self._lately))]
        self._queue.put_nowait(_Job(chain, len(whole), body))
        self.counts.asked += 1
        return True

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            try:
                await self._ask(job)
            except Exception:  # the top of this task: one odd answer must not end it
                self.counts.failed += 1
                log.exception("look-up at %s failed", self._url)

    async def _ask(self, job: _Job) -> None:
        sent_s = self._clock()
        body = await self._post(job.body)
        if body is None:
            self.counts.failed += 1
            self._rest(self._clock())
            return
        self._rest_s = 0.0
        try:
            holdings = self._exchange.answer(body, tokens=job.tokens)
        except BadAnswer as exc:
            self.counts.bad_answers += 1
            if self.counts.bad_answers == 1:
                log.warning("look-up at %s: %s", self._url, exc)
            return
        self._answers.answered(job.chain, holdings, sent_s)  # as old as the question: it was true at some time since

    async def _post(self, body: bytes) -> bytes | None:
        headers = {"content-type": "application/json"}
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.post(self._url, data=body, headers=headers, timeout=self._timeout) as response:
                whole = bytearray()
                async for piece in response.content.iter_any():
                    whole += piece
                    if len(whole) > _MAX_ANSWER_BYTES:
                        return None
                return bytes(whole) if response.status == 200 else None
        return None

    def _rest(self, now_s: float) -> None:
        if now_s < self._rests_until_s:
            return  # questions that were under way together fail together: that is one failure
        self._rest_s = min(_LONGEST_REST_S, max(_FIRST_REST_S, 2.0 * self._rest_s))
        self._rests_until_s = now_s + self._rest_s
