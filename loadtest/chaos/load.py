"""The traffic, and what became of each request of it as its client saw it.

Model     open loop: requests arrive at their times whether or not earlier ones were answered. A pattern of arrivals,
          lengths and prefixes is drawn once and repeated again and again, with new prompts behind the shared
          prefixes, so that any stretch as long as the pattern asks the same work, and two stretches can be compared
Arrivals  uniform in the pattern's length, sorted: a Poisson process, given its count
Valid     one connection for each request, so that a connection left open is a request that was not let go of
Clock     the running loop's, around the socket
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from enum import Enum
from math import ceil

import aiohttp
import msgspec

from loadtest.client import DONE, body_of, usage_in
from loadtest.traffic import TOKENS_PER_ID, TrafficRow

ANSWER_LIMIT_S = 30.0  # longer than any limit of the router: who waits that long hangs
PREFIXES = 8  # conversations' common beginnings, too many for luck and few enough to be cached again within seconds
PREFIX_IDS = 6  # 3,072 tokens: worth a detour to whoever holds them


class Outcome(Enum):
    """How a request ended for its client; a closed set."""

    OK = "ok"  # a whole stream, with its usage and its end marker
    REFUSED = "refused"  # an answer with another status than 200
    CUT = "cut"  # a stream that visibly broke off
    SHORT = "short"  # a stream that ended as if it were whole, and was not: nobody may ever see one
    FAILED = "failed"  # no answer: no connection, or one that was lost before the head
    HUNG = "hung"  # no end within the limit: nobody may ever wait so long


@dataclass(slots=True)
class Answer:
    """One request. at_s : by the loop's clock. outcome : None while it runs. first_s : from then to the first bytes"""

    request_id: str
    at_s: float
    outcome: Outcome | None = None
    first_s: float | None = None
    said: str = ""


class ErrorBody(msgspec.Struct):
    """An error in the API's form."""

    class Inside(msgspec.Struct, frozen=True):
        message: str = ""

    error: Inside = Inside()


class Pattern:
    """What is asked for in one stretch of `length_s`, and again in the next. Drawn from `seed` alone."""

    def __init__(self, *, seed: int, length_s: float, rate_rps: float) -> None:
        rng = random.Random(f"{seed}/traffic")
        self.length_s = length_s
        self.count = ceil(rate_rps * length_s)
        self._arrivals_s = sorted(rng.uniform(0.0, length_s) for _ in range(self.count))
        self._prefixes = [rng.randrange(PREFIXES) for _ in range(self.count)]
        self._own_tokens = [rng.randint(128, 3 * TOKENS_PER_ID) for _ in range(self.count)]
        self._outputs = [rng.randint(10, 80) for _ in range(self.count)]

    def row(self, number: int) -> TrafficRow:
        """Request `number` >= 0, counted through all repetitions; its time from the start of the first."""
        repetition, index = divmod(number, self.count)
        first = self._prefixes[index] * PREFIX_IDS
        own = self._own_tokens[index]
        fresh = PREFIXES * PREFIX_IDS + number * 3  # at most three ids of its own
        ids = [*range(first, first + PREFIX_IDS), *range(fresh, fresh + ceil(own / TOKENS_PER_ID))]
        return TrafficRow(
            at_s=repetition * self.length_s + self._arrivals_s[index],
            input_length=PREFIX_IDS * TOKENS_PER_ID + own,
            output_length=self._outputs[index],
            hash_ids=ids,
        )


class Load:
    """Requests on their way. `answers` are in order of arrival; all have ended after `end`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, pattern: Pattern, *, name: str) -> None:
        self.answers: list[Answer] = []
        self._session = session
        self._url = url
        self._model = model
        self._pattern = pattern
        self._name = name
        self._number = 0
        self._asking: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, *, first: int) -> None:
        """Start asking. first : number of the pattern's request to begin with, the start of a repetition"""
        self._number = first
        self._asking = asyncio.create_task(self._ask())

    async def end(self) -> int:
        """Ask nothing more and wait for all ends; the number to go on from."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await asyncio.gather(*self._running)
        return ceil(self._number / self._pattern.count) * self._pattern.count

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time() - self._number // self._pattern.count * self._pattern.length_s
        while True:
            row = self._pattern.row(self._number)
            body = body_of(row, self._model)
            await asyncio.sleep(began_s + row.at_s - loop.time())
            answer = Answer(f"{self._name}-{self._number:05d}", loop.time())
            self._number += 1
            self.answers.append(answer)
            task = asyncio.create_task(self._one(answer, body))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _one(self, answer: Answer, body: bytes) -> None:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                answer.outcome = await self._stream(answer, body)
        except TimeoutError:
            answer.outcome, answer.said = Outcome.HUNG, f"no end within {ANSWER_LIMIT_S:.0f} s"
        except (aiohttp.ClientError, ConnectionError) as exc:
            answer.outcome = Outcome.FAILED if answer.first_s is None else Outcome.CUT
            answer.said = f"{type(exc).__name__}: {exc}"

    async def _stream(self, answer: Answer, body: bytes) -> Outcome:
        loop = asyncio.get_running_loop()
        headers = {"content-type": "application/json", "x-request-id": answer.request_id}
        async with self._session.post(f"{self._url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                answer.said = f"{response.status}: {message_of(await response.read())}"
                return Outcome.REFUSED
            tail = b""
            async for piece in response.content.iter_any():
                if answer.first_s is None:
                    answer.first_s = loop.time() - answer.at_s
                tail = (tail + piece)[-2048:]
        if DONE in tail and usage_in(tail) is not None:
            return Outcome.OK
        answer.said = "the stream ended without usage and [DONE]"
        return Outcome.SHORT


def message_of(body: bytes) -> str:
    """What an error says, in one line of moderate length."""
    try:
        said = msgspec.json.decode(body, type=ErrorBody).error.message
    except msgspec.DecodeError:
        said = body.decode(errors="replace")
    return " ".join(said.split())[:200]
