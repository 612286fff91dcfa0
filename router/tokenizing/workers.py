"""The parent's side of the reading processes: bounded queues, time limits, a new process for a lost one.

Model     two processes, so that a long prompt never delays a short one; each gets a job only when it is idle, so a job
          whose client left or whose time is up costs nothing while it waits. While a job overruns its limit nobody else
          waits for that process; after five times the limit the process has hung and is replaced
Valid     inside a running loop; a process starts with its first job, or with `start`
Blind to  how long a job will take: it may overrun its limit, and what it made is kept for the next one
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from array import array
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from time import monotonic

import msgspec

from estimators.ranges import require
from router.errors import ConfigError
from router.tokenizing.asked import Asked, NoTokens, Tokenised, Unread, Wanted
from router.tokenizing.worker import Answer, Job, Load, Measure, ReadIds, Tokenise, framed

LARGE_BYTES = 256 * 1024  # a larger body is read by the second process
STUCK_TIMES, STUCK_S = 5, 5.0  # of its limit, and at least seconds: a job that takes longer has hung its process
REST_S = 5.0  # after a process was lost, before the next is started
START_S = 60.0
_MIB = 1024 * 1024
_LOST = (OSError, asyncio.IncompleteReadError, TimeoutError, msgspec.MsgspecError)  # ways a process is lost

_answers = msgspec.msgpack.Decoder(Answer)

log = logging.getLogger(__name__)


class BadIds(Exception):
    """Token ids no engine accepts: the client's mistake, as one sentence."""


class Worker:
    """One process and the jobs that wait for it.

    load : its first job
    most_waiting : jobs beyond the one it works on
    """

    def __init__(self, load: Load, *, most_waiting: int, clock: Callable[[], float] = monotonic) -> None:
        require(most_waiting >= 1, "most_waiting", most_waiting)
        self._load = load
        self._most_waiting = most_waiting
        self._clock = clock
        self._waiting: dict[asyncio.Future[Answer], tuple[Job, float]] = {}  # with its limit, in order
        self._wanted = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._rests_until_s = float("-inf")
        self._overdue_s = float("inf")  # when the job under way will have taken longer than its limit
        self.lost = 0  # processes that ended unasked

    @property
    def waiting(self) -> int:
        """Jobs that wait for the process."""
        return len(self._waiting)

    async def do(self, job: Job, limit_s: float) -> Answer:
        """The answer to `job`.

        Raises
        ------
        NoTokens : too many jobs wait, its time is up, or the process was lost
        """
        if len(self._waiting) >= self._most_waiting:
            raise NoTokens(Unread.BUSY)
        if self._clock() < self._rests_until_s:
            raise NoTokens(Unread.WORKER_LOST)
        if self._clock() > self._overdue_s:
            raise NoTokens(Unread.LATE, "the process is busy with another prompt for longer than that may take")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = job, limit_s
        self._wanted.set()
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve(), name="reading worker")
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise NoTokens(Unread.LATE) from None
        finally:
            self._waiting.pop(answer, None)

    async def start(self) -> None:
        """Start the process and load what it needs.

        Raises
        ------
        ConfigError : it cannot load that
        """
        try:
            answer = await self.do(self._load, START_S)
        except NoTokens as exc:
            raise ConfigError(f"prompts: the process that reads prompts did not start ({exc})") from exc
        if answer.why is not None:
            raise ConfigError(f"prompts.tokenizer: {answer.detail}")

    async def stop(self) -> None:
        """End the process; jobs that wait come to nothing."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
            self._serving = None

    async def _serve(self) -> None:
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                while self._waiting:
                    answer = next(iter(self._waiting))
                    await self._work(*self._waiting.pop(answer), answer)
        finally:
            await self._end_process()
            self._give_up()

    async def _work(self, job: Job, limit_s: float, answer: asyncio.Future[Answer]) -> None:
        if answer.done():
            return
        try:
            frame = framed(job)
        except (ValueError, TypeError, OverflowError, RecursionError) as exc:  # a number of a hundred digits, for one
            answer.set_exception(NoTokens(Unread.FORM, f"a prompt that cannot be handed on: {type(exc).__name__}"))
            return
        try:
            found = await self._answer_to(job, frame, limit_s)
        except Exception as exc:  # whatever it was, the process cannot be relied on
            if not isinstance(exc, _LOST):
                log.exception("the process that reads prompts could not be spoken to")
            await self._lose()
            if not answer.done():
                answer.set_exception(NoTokens(Unread.WORKER_LOST))
            return
        if not answer.done():
            answer.set_result(found)

    async def _answer_to(self, job: Job, frame: bytes, limit_s: float) -> Answer:
        self._overdue_s = self._clock() + limit_s
        try:
            if self._process is None:
                self._process = await _start_process()
                loaded = await self._exchange(self._process, framed(self._load), START_S)
                if job is self._load:
                    return loaded
            return await self._exchange(self._process, frame, max(STUCK_S, STUCK_TIMES * limit_s))
        finally:
            self._overdue_s = float("inf")

    async def _exchange(self, process: Process, frame: bytes, patience_s: float) -> Answer:
        assert process.stdin is not None, "made with a pipe"
        assert process.stdout is not None, "made with a pipe"
        async with asyncio.timeout(patience_s):
            process.stdin.write(frame)
            await process.stdin.drain()
            head = await process.stdout.readexactly(4)
            return _answers.decode(await process.stdout.readexactly(int.from_bytes(head, "little")))

    async def _lose(self) -> None:
        """The process ended unasked, or must: it is replaced after a rest, and nobody waits for that."""
        self.lost += 1
        self._rests_until_s = self._clock() + REST_S
        await self._end_process()
        self._give_up()

    def _give_up(self) -> None:
        """Nobody will do the jobs that wait."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(NoTokens(Unread.WORKER_LOST))
        self._waiting.clear()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None, "made with a pipe"
        process.stdin.close()
        with contextlib.suppress(OSError):
            await process.stdin.wait_closed()
        await process.wait()


async def _start_process() -> Process:
    """A child that sees the modules this process sees, wherever they are."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")  # the event loop needs a core too
    command = (sys.executable, "-m", "router.tokenizing.worker")
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)


class Workers:
    """Reads prompts off the event loop. A `TokenSource` where a tokenizer is configured.

    timeout_s : limit for a request, for each begun MiB of its body
    most_waiting : short prompts that may wait; of the long ones an eighth
    """

    def __init__(self, load: Load, *, timeout_s: float, most_waiting: int) -> None:
        self._timeout_s = timeout_s
        self._short = Worker(load, most_waiting=most_waiting)
        self._long = Worker(load, most_waiting=max(1, most_waiting // 8))

    @property
    def lost(self) -> int:
        """Processes that ended unasked."""
        return self._short.lost + self._long.lost

    @property
    def waiting(self) -> int:
        """Prompts that wait to be read."""
        return self._short.waiting + self._long.waiting

    async def start(self) -> None:
        """Start both processes before the first prompt needs them. Raises `ConfigError`."""
        await asyncio.gather(self._short.start(), self._long.start())

    async def stop(self) -> None:
        await asyncio.gather(self._short.stop(), self._long.stop())

    async def tokens_of(self, asked: Asked, body: bytes, wanted: Wanted) -> Tokenised:
        """Tokens of a text prompt. Raises `NoTokens`."""
        worker = self._long if wanted.size_bytes > LARGE_BYTES else self._short
        return _tokens_in(await worker.do(Tokenise(asked, wanted), self.limit_s(wanted.size_bytes)))

    async def read_ids(self, ids: bytes, wanted: Wanted) -> Tokenised:
        """Blocks of a long JSON list of token ids.

        Raises
        ------
        NoTokens : it is no such list, or there is no time
        BadIds : a number in it is no token id
        """
        answer = await self._long.do(ReadIds(ids, wanted), self.limit_s(wanted.size_bytes))
        if answer.refused:
            raise BadIds(answer.refused)
        return _tokens_in(answer)

    async def measure(self, fields: dict[str, bytes], tools_bytes: int, size_bytes: int) -> tuple[int, bool]:
        """Characters of a long prompt, and whether text is all there is. Raises `NoTokens`."""
        answer = await self._long.do(Measure(fields, tools_bytes), self.limit_s(size_bytes))
        if answer.why is not None:
            raise NoTokens(answer.why, answer.detail)
        return answer.characters, answer.pure

    def limit_s(self, size_bytes: int) -> float:
        """How long a request with a body of that size may wait to be read."""
        return self._timeout_s * (1 + size_bytes // _MIB)


def _tokens_in(answer: Answer) -> Tokenised:
    if answer.why is not None:
        raise NoTokens(answer.why, answer.detail or answer.refused)
    return Tokenised(
        tokens=answer.tokens,
        blocks=array("Q", answer.blocks).tolist(),
        prompts=answer.prompts,
        ids=answer.ids,
    )
