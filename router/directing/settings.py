"""Sections `told` and `lmcache` of the fleet file: how each replica is told where to read a prompt's state."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from router.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


class ToldSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `told`, for all replicas or for one. Empty: the replica decides by itself.

    peer : how it is told to read another replica's memory: `header`, a field of the request (llm-d's sidecar); `body`,
        a member of it (vLLM's OffloadingConnector); `move`, LMCache's controller copies the state ahead of it
    store : `engine`, it looks the store up by itself; `prefetch`, LMCache's coordinator loads what the store has ahead
        of the request; `never`, it does not read it
    own : `pin`, LMCache's controller keeps what the replica's own tiers have until the request is there
    read_at : host:port where the others read this replica; None: host and port of its URL
    instance : what LMCache calls it; None: its name
    """

    peer: Literal["header", "body", "move"] | None = None
    store: Literal["engine", "prefetch", "never"] = "engine"
    own: Literal["pin"] | None = None
    read_at: str | None = None
    instance: str | None = None

    @property
    def needs_controller(self) -> bool:
        return self.peer == "move" or self.own == "pin"

    @property
    def needs_tokens(self) -> bool:
        """Whether whom it is told through wants the prompt's token ids."""
        return self.needs_controller or self.store == "prefetch"

    @property
    def tells(self) -> bool:
        """Whether there is anything the replica can be told."""
        return self.peer is not None or self.needs_tokens

    @property
    def shown(self) -> str:
        """In words, for people."""
        store = {"engine": "store looked up by itself", "prefetch": "store by prefetch", "never": "store never read"}
        parts = ["no peers" if self.peer is None else f"peers by {self.peer}", store[self.store]]
        return ", ".join([*parts, *([] if self.own is None else ["own tiers by pin"])])


class LmcacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `lmcache`: whom `move`, `pin` and `prefetch` are asked of.

    controller, coordinator : base URLs
    model : as LMCache's servers name it; None: what the client asked for
    world_size : ranks of one engine
    location : the place that `move` copies between and `pin` keeps
    timeout_s : of each call; the request does not wait for it
    """

    controller: str | None = None
    coordinator: str | None = None
    model: str | None = None
    world_size: Count = 1
    location: str = "LocalCPUBackend"
    timeout_s: Seconds = 1.0


def check_told(
    replica: str, told: ToldSpec, lmcache: LmcacheSpec | None, *, has_peers: bool, has_store: bool, has_host: bool
) -> None:
    """Raise `ConfigError` when `replica` cannot be told so in a fleet that has these."""
    if told.peer is not None and not has_peers:
        raise ConfigError(f"replica {replica!r} is told to read peers, but there is no `peers` section")
    if told.store == "prefetch" and not has_store:
        raise ConfigError(f"replica {replica!r} is told to prefetch, but there is no `store` section")
    if told.needs_tokens and not has_host:
        raise ConfigError(f"replica {replica!r} gets state into its host memory, but there is no `tiers` section")
    if told.needs_controller and (lmcache is None or lmcache.controller is None):
        raise ConfigError(f"replica {replica!r} is told through LMCache's controller: name it in `lmcache.controller`")
    if told.store == "prefetch" and (lmcache is None or lmcache.coordinator is None):
        raise ConfigError(f"replica {replica!r} is told to prefetch: name the coordinator in `lmcache.coordinator`")
    if told.read_at is not None:
        host_and_port(told.read_at, f"read_at of {replica!r}")


def host_and_port(text: str, what: str) -> tuple[str, int]:
    """The two parts of host:port, brackets of an IPv6 address taken off. Raises `ConfigError`."""
    found = _HOST_PORT.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(f"{what}: {text!r} is not host:port")
    return found["host"].strip("[]"), int(found["port"])
