"""The reading processes as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.tokenizing import workers as workers_module
from router.tokenizing.asked import Asked, Form, NoTokens, Tokenised, Unread, Wanted, tokenised
from router.tokenizing.worker import Load, Measure, ReadIds, Tokenise
from router.tokenizing.workers import REST_S, BadIds, Worker, Workers
from tests.router.tokenizing.small import a_directory, a_tokenizer

WANTED = Wanted(root=7, block_tokens=4)
LONG = Wanted(root=7, block_tokens=4, size_bytes=300_000)
PATIENCE_S = 60.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def running(folder: Path | None = None) -> AsyncIterator[Workers]:
    directories = {} if folder is None else {"": str(a_directory(folder))}
    workers = Workers(Load(directories=directories, limit_bytes=1 << 20), timeout_s=PATIENCE_S, most_waiting=8)
    try:
        yield workers
    finally:
        await workers.stop()


@asynccontextmanager
async def one(most_waiting: int = 2, clock: Clock | None = None) -> AsyncIterator[Worker]:
    worker = Worker(Load(), most_waiting=most_waiting, clock=clock or Clock())
    try:
        yield worker
    finally:
        await worker.stop()


def pid_of(worker: Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


async def why(job: asyncio.Future[Tokenised] | asyncio.Task[object]) -> Unread:
    with pytest.raises(NoTokens) as caught:
        await job
    return caught.value.why


async def test_text_is_tokenised_in_either_process(tmp_path: Path) -> None:
    async with running(tmp_path) as workers:
        await workers.start()
        asked = Asked(Form.TEXT, "m", "m", prompt=json.dumps("the quick brown fox " * 20).encode())
        expected = tokenised([a_tokenizer().encode("the quick brown fox " * 20).ids], WANTED)
        assert await workers.tokens_of(asked, b"", WANTED) == expected
        assert await workers.tokens_of(asked, b"", LONG) == expected
        assert workers.waiting == workers.lost == 0


async def test_long_lists_are_read_without_a_tokenizer_and_bad_ids_are_the_clients_mistake() -> None:
    async with running() as workers:
        ids = list(range(50_000))
        assert await workers.read_ids(json.dumps(ids).encode(), LONG) == tokenised([ids], LONG)
        with pytest.raises(BadIds, match="token ids must be"):
            await workers.read_ids(b"[-1,1]", LONG)
        with pytest.raises(NoTokens):
            await workers.read_ids(b'["a"]', LONG)
        assert await workers.measure({"prompt": b'"abc"'}, 2, 300_000) == (5, True)


async def test_more_jobs_than_may_wait_are_turned_away_at_once() -> None:
    async with one(most_waiting=1) as worker:
        first = asyncio.ensure_future(worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S))
        await asyncio.sleep(0)
        assert worker.waiting == 1
        with pytest.raises(NoTokens) as caught:
            await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)
        assert caught.value.why is Unread.BUSY
        assert (await first).tokens == 1


async def test_a_job_that_is_late_is_left_and_the_next_one_is_answered() -> None:
    async with one() as worker:
        with pytest.raises(NoTokens) as caught:
            await worker.do(ReadIds(b"[1]", WANTED), 0.0)
        assert caught.value.why is Unread.LATE
        assert (await worker.do(ReadIds(b"[1,2]", WANTED), PATIENCE_S)).tokens == 2


async def test_a_job_whose_client_left_costs_nothing_and_does_not_shift_the_answers() -> None:
    async with one(most_waiting=3) as worker:
        jobs = [
            asyncio.ensure_future(worker.do(ReadIds(b"[1" + b",1" * n + b"]", WANTED), PATIENCE_S)) for n in range(3)
        ]
        await asyncio.sleep(0)
        jobs[0].cancel()
        jobs[1].cancel()
        assert (await jobs[2]).tokens == 3


@pytest.mark.parametrize(
    "asked",
    [
        Asked(Form.CHAT, "m", "m", messages=b"[]", options={"chat_template_kwargs": {"a": 10**30}}),
        Asked(Form.CHAT, "m", "m", messages=b"[]", options={"chat_template_kwargs": {"\ud83d": "\ud83d"}}),
        Asked(Form.TEXT, "m", "\ud83d", prompt=b'"x"'),
    ],
    ids=["a number of a hundred bits", "half a pair", "half a pair for a name"],
)
async def test_a_prompt_that_cannot_be_handed_on_costs_only_itself(asked: Asked) -> None:
    async with one() as worker:
        with pytest.raises(NoTokens) as caught:
            await worker.do(Tokenise(asked, WANTED), PATIENCE_S)
        assert caught.value.why is Unread.FORM
        assert (await worker.do(ReadIds(b"[1,2]", WANTED), PATIENCE_S)).tokens == 2
        assert worker.lost == 0


async def test_clients_that_left_give_up_their_places() -> None:
    async with one(most_waiting=2) as worker:
        for _ in range(5):
            jobs = [asyncio.ensure_future(worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)) for _ in range(2)]
            await asyncio.sleep(0)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            assert worker.waiting == 0
        assert (await worker.do(ReadIds(b"[1,2]", WANTED), PATIENCE_S)).tokens == 2


@asynccontextmanager
async def a_hung_process(worker: Worker) -> AsyncIterator[asyncio.Task[object]]:
    """The process stands still in the middle of a job with a limit of 10 s."""
    assert (await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)).tokens == 1
    os.kill(pid_of(worker), signal.SIGSTOP)
    job = asyncio.ensure_future(worker.do(ReadIds(b"[1,2,3]", WANTED), 10.0))
    while worker.waiting or worker._overdue_s == float("inf"):  # noqa: ASYNC110  its beginning is no event
        await asyncio.sleep(0)
    yield job
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)


async def test_nobody_waits_behind_a_job_that_overruns_its_limit() -> None:
    clock = Clock()
    async with one(clock=clock) as worker, a_hung_process(worker) as job:
        clock.now_s = 10.1
        for _ in range(20):
            with pytest.raises(NoTokens) as caught:
                await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)
            assert caught.value.why is Unread.LATE
        assert worker.waiting == 0
        os.kill(pid_of(worker), signal.SIGCONT)
        await job
        assert (await worker.do(ReadIds(b"[1,2]", WANTED), PATIENCE_S)).tokens == 2
        assert worker.lost == 0


async def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "STUCK_S", 0.05)
    monkeypatch.setattr(workers_module, "STUCK_TIMES", 0)
    clock = Clock()
    async with one(clock=clock) as worker, a_hung_process(worker) as job:
        lost = pid_of(worker)
        with pytest.raises(NoTokens) as caught:
            await job
        assert (caught.value.why, worker.lost) == (Unread.WORKER_LOST, 1)
        monkeypatch.setattr(workers_module, "STUCK_S", PATIENCE_S)
        clock.now_s = REST_S
        assert (await worker.do(ReadIds(b"[1,2]", WANTED), PATIENCE_S)).tokens == 2
        assert pid_of(worker) != lost


async def test_an_answer_nobody_can_read_loses_the_process_and_no_more() -> None:
    clock = Clock()
    async with one(clock=clock) as worker:
        assert (await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)).tokens == 1
        assert worker._process is not None
        assert worker._process.stdout is not None
        worker._process.stdout.feed_data(b"\4\0\0\0rubb")
        with pytest.raises(NoTokens) as caught:
            await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)
        assert (caught.value.why, worker.lost) == (Unread.WORKER_LOST, 1)
        clock.now_s = REST_S
        assert (await worker.do(ReadIds(b"[1,2]", WANTED), PATIENCE_S)).tokens == 2


async def test_a_lost_process_costs_what_waited_for_it_and_is_replaced_after_a_rest() -> None:
    clock = Clock()
    async with one(clock=clock) as worker:
        assert (await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)).tokens == 1
        lost = pid_of(worker)
        assert worker._process is not None
        worker._process.kill()
        await worker._process.wait()
        with pytest.raises(NoTokens) as caught:
            await worker.do(Measure({"prompt": b'"abc"'}, 0), PATIENCE_S)
        assert caught.value.why is Unread.WORKER_LOST
        assert worker.lost == 1
        with pytest.raises(NoTokens):
            await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)
        assert worker._process is None, "it rests"
        clock.now_s = REST_S
        assert (await worker.do(ReadIds(b"[1,2]", WANTED), PATIENCE_S)).tokens == 2
        assert pid_of(worker) != lost


async def test_stopping_ends_the_process_and_what_waits() -> None:
    worker = Worker(Load(), most_waiting=4)
    assert (await worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S)).tokens == 1
    process = worker._process
    assert process is not None
    job = asyncio.ensure_future(worker.do(ReadIds(b"[1]", WANTED), PATIENCE_S))
    await asyncio.sleep(0)
    await worker.stop()
    assert process.returncode is not None
    with pytest.raises(NoTokens):
        await job


async def test_a_tokenizer_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    workers = Workers(Load(directories={"": str(tmp_path)}), timeout_s=PATIENCE_S, most_waiting=8)
    with pytest.raises(ConfigError, match=r"prompts\.tokenizer: .* has no tokenizer\.json"):
        await workers.start()
    await workers.stop()


def test_the_limit_grows_with_the_body() -> None:
    workers = Workers(Load(), timeout_s=0.5, most_waiting=8)
    assert [workers.limit_s(size) for size in (0, 1_000_000, 1_100_000, 3_900_000)] == [0.5, 0.5, 1.0, 2.0]
