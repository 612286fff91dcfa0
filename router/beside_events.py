"""What is known of tiers beside their events, as configured: built, asked, shown and stopped.

Model     a look-up service is asked about prompts as they are read, and its answers serve the next ones; a store that
          says nothing is believed to hold what was computed. `router.other_tiers` joins both with the events, and
          keeps the belief about the store
Valid     look-ups: prompts whose tokens are known, given or made of text, of the configured model and of none of its
          adapters, which LMCache keeps under other keys
Blind to  what lies behind the first 256 KiB of a prompt's token ids: a service is asked about its beginning alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from typing import Any, overload

import aiohttp

from estimators.request import RequestFacts
from router.config import LookUpConfig, OtherTiersConfig, WrittenStoreConfig
from router.errors import ConfigError
from router.fleet import Fleet
from router.prompts.body import prompts_in
from router.signals.lmcache import Controller, Coordinator
from router.signals.looked_up import Answers
from router.signals.lookups import LookupClient
from router.signals.written_store import WrittenStore

Clock = Callable[[], float]
_GIB = 2**30
LONGEST_IDS_BYTES = 256 * 1024  # some 40,000 tokens: read and written in about a millisecond


class BesideEvents:
    """Owner of the look-ups and of the belief about a silent store. Made inside a running loop; `stop` it once.

    block_tokens : of the router's chains, >= 1
    adapter_of : adapter behind a model name, "" for none

    Raises
    ------
    ConfigError : the section does not fit the fleet
    """

    def __init__(
        self,
        config: OtherTiersConfig,
        fleet: Fleet,
        *,
        block_tokens: int,
        adapter_of: Callable[[str], str],
        clock: Clock,
    ) -> None:
        self.answers: Answers | None = None
        self.written: WrittenStore | None = None
        self._config = config
        self._fleet = fleet
        self._adapter_of = adapter_of
        self._model = ""
        self._client: LookupClient | None = None
        self._session: aiohttp.ClientSession | None = None
        if config.written_store is not None:
            self.written = silent_store(config.written_store, fleet, block_tokens=block_tokens)
        if config.look_up is not None:
            self._model = config.look_up.model
            self.answers = answers_for(config.look_up, fleet, block_tokens=block_tokens)
            self._session = aiohttp.ClientSession()  # not the one for replicas: their key is none of its business
            self._client = LookupClient(
                self._session,
                config.look_up.url,
                exchange_of(config.look_up),
                self.answers,
                deadline_s=config.look_up.deadline_s,
                clock=clock,
            )

    def members_changed(self) -> None:
        """The fleet's replicas are others than before."""
        if self.answers is not None and self._config.look_up is not None:
            self.answers.rows_are(rows_of_instances(self._config.look_up, self._fleet))

    def start(self) -> None:
        if self._client is not None:
            self._client.start()

    async def stop(self) -> None:
        """End the look-ups."""
        if self._client is not None:
            await self._client.stop()
        if self._session is not None:
            await self._session.close()

    @property
    def asks(self) -> bool:
        """Whether prompts are looked up."""
        return self._client is not None

    def read(self, request: RequestFacts, ids: bytes | memoryview, salt: str) -> None:
        """A prompt was read: have it looked up if it is one that can be.

        ids : JSON of its token ids, one list or a list of lists; salt : see `Identity`
        """
        client = self._client
        if client is None or not request.chain or request.chain_of_text:
            return
        if request.base_model != self._model or self._adapter_of(request.model):
            return
        beginning, tokens = beginning_of(ids)
        if beginning is not None:
            usable = request.chain if tokens is None else request.chain[: tokens // request.block_tokens]
            client.want(usable, _Ids(beginning), salt=salt)

    def counted(self) -> dict[str, float]:
        """Prompts that could be looked up, by what became of them."""
        return {} if self._client is None else asdict(self._client.counts)

    def report(self) -> dict[str, Any]:
        """What operators see."""
        shown: dict[str, Any] = {}
        if self.answers is not None:
            shown["look_up"] = {
                **self.counted(),
                "blocks_remembered": len(self.answers),
                "unknown_instances": self.answers.strangers,
            }
        if self.written is not None:
            shown["written_store"] = {
                "blocks": len(self.written),
                "evicted": self.written.evicted,
                "misses": self.written.misses,
            }
        return shown


class _Ids(Sequence[int]):
    """Token ids of a request's longest prompt, read only when wanted: most prompts were asked about lately."""

    def __init__(self, ids: bytes | memoryview) -> None:
        self._ids = ids

    def _read(self) -> Sequence[int]:
        prompts = prompts_in(self._ids)
        return max(prompts, key=len) if prompts else []

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._read()[index]

    def __len__(self) -> int:
        return len(self._read())


def beginning_of(ids: bytes | memoryview) -> tuple[bytes | memoryview | None, int | None]:
    """As much of a JSON list of token ids as is read on the event loop, and how many those are.

    None for the number: it is all of them; None for the ids: several prompts that are too long together
    """
    if len(ids) <= LONGEST_IDS_BYTES:
        return ids, None
    cut = bytes(ids[:LONGEST_IDS_BYTES])
    if b"[" in cut[1:]:
        return None, None
    whole = cut[: cut.rindex(b",")]
    return whole + b"]", whole.count(b",") + 1


def check_other_tiers(config: OtherTiersConfig, fleet: Fleet) -> None:
    """Raise `ConfigError` when the section does not fit the fleet, as far as can be told without asking anybody."""
    block_tokens = fleet.block_tokens or 1
    if config.written_store is not None:
        silent_store(config.written_store, fleet, block_tokens=block_tokens)
    if config.look_up is not None:
        answers_for(config.look_up, fleet, block_tokens=block_tokens)


def exchange_of(config: LookUpConfig) -> Controller | Coordinator:
    """How that service is asked."""
    if config.service == "controller":
        return Controller(chunk_tokens=config.chunk_tokens)
    return Coordinator(model=config.served_as or config.model, ranks=config.ranks, chunk_tokens=config.chunk_tokens)


def rows_of_instances(config: LookUpConfig, fleet: Fleet) -> dict[str, int]:
    """Row behind each instance, for those whose replica is there."""
    rows = {replica.name: row for row, replica in enumerate(fleet.replicas)}
    return {instance: rows[name] for instance, name in config.instances.items() if name in rows}


def answers_for(config: LookUpConfig, fleet: Fleet, *, block_tokens: int) -> Answers:
    """A memory for its answers.

    Raises
    ------
    ConfigError : an instance's replica does not exist, or the chunk is no multiple of a block
    """
    rows = {replica.name: row for row, replica in enumerate(fleet.replicas)}
    for instance, name in config.instances.items():
        if name not in rows:
            raise ConfigError(f"other_tiers.look_up.instances: {instance!r} is on {name!r}, which is no replica")
    if config.chunk_tokens % block_tokens:
        raise ConfigError(
            f"other_tiers.look_up.chunk_tokens is {config.chunk_tokens}, no multiple of a block ({block_tokens} tokens)"
        )
    return Answers(
        len(rows),
        {instance: rows[name] for instance, name in config.instances.items()},
        block_tokens=block_tokens,
        chunk_tokens=config.chunk_tokens,
        ttl_s=config.believed_s,
    )


def silent_store(config: WrittenStoreConfig, fleet: Fleet, *, block_tokens: int) -> WrittenStore:
    """A belief about the fleet's store.

    Raises
    ------
    ConfigError : there is no such store, it has events, or its size in blocks cannot be told
    """
    where = "other_tiers.written_store"
    if fleet.store is None:
        raise ConfigError(f"{where}: the fleet file has no `store`")
    if fleet.store.events is not None:
        raise ConfigError(f"{where}: the store has events, which know better; remove one of the two")
    if fleet.store.capacity_gib is None or fleet.model is None:
        raise ConfigError(f"{where}: the fleet file must have `store.capacity_gib` and `model`, for its size in blocks")
    blocks = fleet.store.capacity_gib * _GIB / (fleet.model.kv_bytes_per_token * block_tokens or inf)
    return WrittenStore(capacity_blocks=max(1, int(blocks)), keep_s=config.keep_s)
