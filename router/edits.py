"""Edits that the configuration asks for in every body: names that clients use, and usage they did not ask for.

Model     before anything else reads the body, so that placement, tokens and receipt speak of what the replica gets
Valid     JSON bodies of POST. A body over 256 KiB is scanned in slices of about a millisecond, others get the loop
Blind to  models named elsewhere: in a path, in a form with files
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial

from router.actions import Refuse
from router.http.contract import PromptReader, Read, Rewritten
from router.http.head import RequestHead
from router.http.splice import Edit, edits_now, edits_of, spliced
from router.prompts.scan import in_slices

SCANS_AT_ONCE = 4
_AT_ONCE_BYTES = 256 * 1024
_STREAMS_USAGE = frozenset({"/v1/chat/completions", "/v1/completions"})  # where `stream_options` means something


class BodyEdits:
    """A prompt reader before another one.

    read : reads what the replica will get
    aliases : name that clients use -> name the replicas know
    asks_usage : of every stream; what the client did not ask for is to be kept from it
    """

    def __init__(self, read: PromptReader, *, aliases: Mapping[str, str], asks_usage: bool) -> None:
        self._read = read
        self._aliases = dict(aliases)
        self._asks_usage = asks_usage
        self._scanning = asyncio.Semaphore(SCANS_AT_ONCE)
        self._under_way: set[asyncio.Task[Read]] = set()

    def read(self, head: RequestHead, body: bytes) -> Read | asyncio.Future[Read]:
        """Facts of a request and the body that goes on, now or in a while; cancel it when nobody waits."""
        asks_usage = self._asks_usage and head.path in _STREAMS_USAGE
        if head.method != b"POST" or not (asks_usage or self._aliases):
            return self._read(head, body)
        if len(body) > _AT_ONCE_BYTES:
            return self._beside(self._read_large(head, body, asks_usage))
        edits = edits_now(body, aliases=self._aliases, asks_usage=asks_usage)
        return self._read_edited(head, body, edits) if edits else self._read(head, body)

    async def stop(self) -> None:
        """Give up every read under way."""
        for task in list(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _read_edited(self, head: RequestHead, body: bytes, edits: dict[str, Edit]) -> Read | asyncio.Future[Read]:
        edited = spliced(body, edits.values())
        read = self._read(head, edited)
        tell = partial(with_edits, edits=tuple(edits), body=edited)
        return self._beside(_then(read, tell)) if isinstance(read, asyncio.Future) else tell(read)

    async def _read_large(self, head: RequestHead, body: bytes, asks_usage: bool) -> Read:
        async with self._scanning:
            edits = await in_slices(edits_of(body, aliases=self._aliases, asks_usage=asks_usage))
        read = self._read_edited(head, body, edits) if edits else self._read(head, body)
        return await read if isinstance(read, asyncio.Future) else read

    def _beside(self, read: Coroutine[object, object, Read]) -> asyncio.Task[Read]:
        task = asyncio.get_running_loop().create_task(read, name="body")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task


def with_edits(read: Read, *, edits: tuple[str, ...], body: bytes) -> Read:
    """What was read of an edited body, with the edits told."""
    if isinstance(read, Refuse):
        return read
    if isinstance(read, Rewritten):
        facts, body = read.facts, read.body
    else:
        facts = read
    return Rewritten(replace(facts, edited=(*edits, *facts.edited)), body, swallows_usage="stream_options" in edits)


async def _then(reading: asyncio.Future[Read], tell: partial[Read]) -> Read:
    return tell(await reading)
