"""LMCache's controller and coordinator over the simulated replicas, on one port: what of them moves state.

Model     POST /move and /pin of the controller; POST /cache/prefetches of the coordinator, with the progress of one and
          an end to it. Bodies and answers have the names and types of LMCache's own
Valid     prompts of token ids from position 0, whole blocks of them; one rank of a model
Blind to  chunks of 256 tokens: blocks are the engines'. LMCache itself cannot end a prefetch; `DELETE` is this face's
Source    LMCache's controller and coordinator schemas; the router's own encoder is not used here on purpose
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Annotated, Any

import msgspec
from aiohttp import web

from sim_backends.block_hash import BlockHasher
from sim_backends.bringing import Bring
from sim_backends.driver import Driver

MAX_BODY_BYTES = 64 * 2**20
LOCATION = "LocalCPUBackend"

TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _Move(msgspec.Struct):
    old_position: tuple[str, str]
    new_position: tuple[str, str]
    tokens: list[TokenId] = []
    copy: bool = False


class _Pin(msgspec.Struct):
    instance_id: str
    location: str
    tokens: list[TokenId] = []


class _Prefetch(msgspec.Struct):
    instance_id: str
    model_name: str
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    token_ids: list[TokenId]
    cache_salt: str = ""


class LmcacheFace:
    """Routes over a driver's world.

    instances : row of each instance, by LMCache's name of it
    brings : everything that was ever begun, in order, to be looked at
    """

    def __init__(self, driver: Driver, instances: Mapping[str, int], *, block_tokens: int, vocab: int) -> None:
        self.brings: list[Bring] = []
        self._driver = driver
        self._instances = instances
        self._hasher = BlockHasher(block_tokens=block_tokens, vocab=vocab)
        self._numbers = count(1)
        self._prefetches: dict[tuple[str, str], Bring] = {}

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/move", self._move)
        app.router.add_post("/pin", self._pin)
        app.router.add_post("/cache/prefetches", self._prefetch)
        app.router.add_get("/cache/prefetches/{instance}/{request_id}", self._progress)
        app.router.add_delete("/cache/prefetches/{instance}/{request_id}", self._end)
        return app

    async def _move(self, request: web.Request) -> web.Response:
        asked: _Move = _decoded(await request.read(), _Move)
        (old, from_where), (new, to_where) = asked.old_position, asked.new_position
        if from_where != LOCATION or to_where != LOCATION:
            raise _problem(422, f"only {LOCATION} can be moved")
        source = self._driver.world.engines[self._row(old)].settings.name
        begun = self._begin(self._row(new), self._digests(asked.tokens, ""), source)
        return _json({"event_id": f"Move{next(self._numbers)}", "num_tokens": 0 if begun is None else begun.tokens})

    async def _pin(self, request: web.Request) -> web.Response:
        asked: _Pin = _decoded(await request.read(), _Pin)
        digests, row = self._digests(asked.tokens, ""), self._row(asked.instance_id)
        fetcher = self._driver.world.engines[row].fetcher
        tier = None if fetcher is None or asked.location != LOCATION else fetcher.tiers.tiers.get("host")
        found = 0
        if tier is not None:
            found = tier.match(digests, 0, len(digests))
            tier.pin(digests[:found])
        tokens = found * self._hasher.block_tokens
        return _json({"event_id": f"Pin{next(self._numbers)}", "num_tokens": tokens})

    async def _prefetch(self, request: web.Request) -> web.Response:
        asked: _Prefetch = _decoded(await request.read(), _Prefetch)
        digests = self._digests(asked.token_ids, asked.cache_salt)
        if not digests:
            return _json({"request_id": "", "chunks": 0, "status": "noop"})
        begun = self._begin(self._row(asked.instance_id), digests, None)
        name = f"p{next(self._numbers)}"
        if begun is not None:
            self._prefetches[asked.instance_id, name] = begun
        return _json({"request_id": name, "chunks": len(digests), "status": "submitted"})

    async def _progress(self, request: web.Request) -> web.Response:
        begun = self._of(request)
        status = "completed" if begun.over else "running"
        return _json({"status": status, "found_keys": begun.brought, "total_keys": begun.blocks})

    async def _end(self, request: web.Request) -> web.Response:
        begun = self._of(request)
        del self._prefetches[request.match_info["instance"], request.match_info["request_id"]]
        self._driver.change(begun.stop)
        return _json({"status": "cancelled", "found_keys": begun.brought, "total_keys": begun.blocks})

    def _begin(self, row: int, digests: list[bytes], source: str | None) -> Bring | None:
        begun: list[Bring | None] = []
        self._driver.change(lambda now_s: begun.append(self._driver.world.bring(row, digests, source, now_s)))
        self.brings += [one for one in begun if one is not None]
        return begun[0]

    def _of(self, request: web.Request) -> Bring:
        begun = self._prefetches.get((request.match_info["instance"], request.match_info["request_id"]))
        if begun is None:
            raise _problem(404, "no such prefetch")
        return begun

    def _row(self, instance: str) -> int:
        if instance not in self._instances:
            raise _problem(404, f"instance {instance!r} is not registered")
        return self._instances[instance]

    def _digests(self, tokens: list[int], salt: str) -> list[bytes]:
        try:
            return self._hasher.chain(tokens, salt=salt or None)
        except IndexError as exc:
            raise _problem(422, "a token id is outside the vocabulary") from exc


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _problem(422, str(exc)) from exc


def _problem(status: int, detail: str) -> web.HTTPException:
    kind = web.HTTPNotFound if status == 404 else web.HTTPUnprocessableEntity
    return kind(text=msgspec.json.encode({"detail": detail}).decode(), content_type="application/json")


def _json(said: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(said), content_type="application/json")
