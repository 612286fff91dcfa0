"""Tells LMCache aside: the calls behind hints, off the way of every request.

Model     one call for each hint, a bounded number at once, each with a time-out. A hint that is withdrawn before its
          call has begun makes none; one whose prefetch has begun is taken back by a second call. What came of each call
          is reported and changes nothing else
Valid     one loop; made inside it, `stop` before it ends
Blind to  when a copy is complete: the controller answers that it has begun
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import aiohttp

from estimators.request import RequestFacts
from router.actions import Aside, Hint, Means, Withdraw
from router.directing import wire
from router.directing.settings import LmcacheSpec
from router.directing.wire import BadReply

log = logging.getLogger(__name__)

MOST_OPEN = 64  # calls under way or waiting; a slow service costs hints, not memory
CALLS_AT_ONCE = 8
MOST_REMEMBERED_BYTES = 32 << 20  # token ids of prompts that are being placed
_MOST_ANSWER_BYTES = 64 << 10

Reported = Callable[[Hint, str], object]  # what became of a hint, see `Directions.reported`


class _Failed(Exception):
    """A call that brought no answer to it; the message says why."""


@dataclass(slots=True, eq=False)
class _Call:
    """What came of one hint so far. began : LMCache may have heard of it; prefetch : what it calls it"""

    hint: Hint
    began: bool = False
    withdrawn: bool = False
    prefetch: str | None = None
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: bytes
    salt: str


class PromptIds:
    """Token ids, as JSON, of prompts that may be told of; the oldest are forgotten first."""

    def __init__(self, most_bytes: int = MOST_REMEMBERED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def remember(self, request: RequestFacts, ids: bytes | memoryview, salt: str) -> None:
        """Several prompts in one request, and prompts of adapters, are none that LMCache could be told of."""
        given = bytes(ids)
        if len(given) > self._most_bytes or request.base_model not in ("", request.model) or _is_batch(given):
            return
        before = self._prompts.pop(request.request_id, None)
        self._prompts[request.request_id] = _Prompt(given, salt)
        self._bytes += len(given) - (0 if before is None else len(before.ids))
        while self._bytes > self._most_bytes:
            self._bytes -= len(self._prompts.popitem(last=False)[1].ids)

    def get(self, request_id: str) -> _Prompt | None:
        return self._prompts.get(request_id)


class Control:
    """Owner of the calls under way.

    instances : LMCache's name of each replica, by row
    reported : told of every hint once, and of every withdrawal that took a call
    """

    def __init__(self, spec: LmcacheSpec, instances: Sequence[str], reported: Reported) -> None:
        self.prompts = PromptIds()
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())  # replicas' keys are not for LMCache
        self._spec = spec
        self._controller = (spec.controller or "").rstrip("/")
        self._coordinator = (spec.coordinator or "").rstrip("/")
        self._instances = instances
        self._reported = reported
        self._timeout = aiohttp.ClientTimeout(total=spec.timeout_s)
        self._at_once = asyncio.Semaphore(CALLS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def obey(self, aside: Aside) -> None:
        """Begin or end what was hinted; never waits."""
        if isinstance(aside, Withdraw):
            self._withdraw(aside.hint)
        else:
            self._begin(aside)

    async def stop(self) -> None:
        """Give up every call under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def _begin(self, hint: Hint) -> None:
        prompt = self.prompts.get(hint.request.request_id)
        if prompt is None or (prompt.salt and hint.means is not Means.PREFETCH):  # the controller knows no salts
            self._reported(hint, "untold")
        elif len(self._tasks) >= MOST_OPEN:
            self._reported(hint, "dropped")
        else:
            hint.call = call = _Call(hint)
            call.task = self._run(self._tell(call, self._body(hint, prompt)))

    def _withdraw(self, hint: Hint) -> None:
        call = hint.call
        if not isinstance(call, _Call):
            return
        call.withdrawn = True
        if not call.began and call.task is not None:
            call.task.cancel()
            self._reported(hint, "withdrawn")
        elif call.prefetch is not None:
            self._run(self._take_back(call))
        elif hint.means is not Means.PREFETCH:
            self._reported(hint, "not_withdrawn")

    def _run(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="hint")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tell(self, call: _Call, body: bytes) -> None:
        hint = call.hint
        async with self._at_once:
            call.began = True
            try:
                answer = await self._call("POST", self._url(hint.means), body)
                result = self._understood(call, answer)
            except (_Failed, BadReply) as exc:
                log.info("hint %s for %s: %s", hint.means.value, self._instances[hint.row], exc)
                result = "failed"
        self._reported(hint, result)
        if call.withdrawn and call.prefetch is not None:
            await self._take_back(call)

    def _understood(self, call: _Call, answer: bytes) -> str:
        if call.hint.means is not Means.PREFETCH:
            return "worked" if wire.found_tokens(answer) else "nothing"
        call.prefetch = wire.prefetch_id(answer)
        return "nothing" if call.prefetch is None else "worked"

    async def _take_back(self, call: _Call) -> None:
        hint, prefetch = call.hint, call.prefetch
        assert prefetch is not None, "only what has begun is taken back"
        call.prefetch = None
        url = f"{self._coordinator}{wire.prefetch_path(self._instances[hint.row], prefetch)}"
        try:
            await self._call("DELETE", url, b"")
        except _Failed as exc:
            log.info("a prefetch for %s goes on: %s", self._instances[hint.row], exc)
            self._reported(hint, "not_withdrawn")
        else:
            self._reported(hint, "withdrawn")

    async def _call(self, method: str, url: str, body: bytes) -> bytes:
        """The answer's body. Raises _Failed when there is none, or its status is no success."""
        headers = {"content-type": "application/json"} if body else {}
        try:
            async with self._session.request(
                method, url, data=body or None, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                answer = await _read(response.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise _Failed(f"{url} cannot be reached: {exc or type(exc).__name__}") from exc
        if not 200 <= response.status < 300:
            raise _Failed(f"{url} answered {response.status}")
        return answer

    def _url(self, means: Means) -> str:
        if means is Means.PREFETCH:
            return f"{self._coordinator}{wire.PREFETCH_PATH}"
        return f"{self._controller}{wire.MOVE_PATH if means is Means.MOVE else wire.PIN_PATH}"

    def _body(self, hint: Hint, prompt: _Prompt) -> bytes:
        spec, instance = self._spec, self._instances[hint.row]
        if hint.means is Means.MOVE:
            source = self._instances[hint.source]
            return wire.move_body(prompt.ids, source=source, target=instance, location=spec.location)
        if hint.means is Means.PIN:
            return wire.pin_body(prompt.ids, instance=instance, location=spec.location)
        model = spec.model or hint.request.model
        return wire.prefetch_body(
            prompt.ids, instance=instance, model=model, world_size=spec.world_size, salt=prompt.salt
        )


async def _read(content: aiohttp.StreamReader) -> bytes:
    """A whole answer; of one too long for any, the beginning."""
    answer = b""
    while len(answer) < _MOST_ANSWER_BYTES and (piece := await content.read(_MOST_ANSWER_BYTES)):
        answer += piece
    return answer


def _is_batch(ids: bytes) -> bool:
    return ids.lstrip()[1:].lstrip()[:1] == b"["
