"""The router's configuration file, read once and passed down as values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from router.errors import ConfigError
from router.fleet import Fleet, fleet_of_urls, load_fleet, one_line
from router.http.contract import Count, Limits, Seconds, TimeOuts

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `policy`: a rule by name, and its settings (`tfirst policies` lists both)."""

    name: str = "e2e"
    settings: dict[str, Any] = {}


class LoadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `load`: how often each replica is asked for its load, and how long it may take."""

    period_s: Seconds = 0.5  # shorter sees foreign load sooner, at one small request per replica and period
    timeout_s: Seconds = 2.0
    misses_to_down: Count = 3  # one missed poll proves nothing
    api_key_env: str | None = None  # environment variable with the key the replicas want (vLLM's --api-key)


class ReceiptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `receipts`: where every decision is written down, as JSON lines. No path: nowhere."""

    path: str | None = None


class StateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `state`: where what was learned is kept over a restart. No path: it is learned anew."""

    path: str | None = None
    every_s: Seconds = 60.0  # between two writes; the last one is at shut-down


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. Exactly one of `fleet` and `worker_urls` says where the replicas are."""

    fleet: str | None = None  # path of a fleet file, relative to this file
    worker_urls: list[str] | None = None
    host: str = "0.0.0.0"
    port: Port = 30000
    admin_host: str = "0.0.0.0"
    admin_port: Port = 29000
    policy: PolicyConfig = PolicyConfig()
    load: LoadConfig = LoadConfig()
    receipts: ReceiptConfig = ReceiptConfig()
    state: StateConfig = StateConfig()
    limits: Limits = Limits()  # what one client may make the router hold
    time_outs: TimeOuts = TimeOuts()  # how long it waits for a peer
    max_attempts: Count = 3  # different replicas tried before the first byte
    drain_s: Seconds = 30.0  # at shut-down streams get this long to finish
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0  # of every draw by chance: ties and policies that draw


def parse_config(text: bytes | str, where: str = "configuration") -> RouterConfig:
    """Decode a configuration; `ConfigError` names the key that is unknown or out of range."""
    try:
        return msgspec.convert(msgspec.yaml.decode(text) or {}, RouterConfig)  # a file of comments is no value
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}: {one_line(exc)}") from exc


def load_config(path: Path) -> RouterConfig:
    """Read a configuration file; a relative `fleet` becomes relative to it."""
    try:
        config = parse_config(path.read_bytes(), f"configuration file {path}")
    except OSError as exc:
        raise ConfigError(f"configuration file {path}: {exc.strerror}") from exc
    if config.fleet is not None:
        config = msgspec.structs.replace(config, fleet=str(path.parent / config.fleet))
    return config


def fleet_of(config: RouterConfig) -> Fleet:
    """The fleet a configuration points at, read and checked."""
    if (config.fleet is None) == (not config.worker_urls):
        raise ConfigError("say where the replicas are: either `fleet` or `worker_urls` (--worker-urls URL ...)")
    return load_fleet(Path(config.fleet)) if config.fleet is not None else fleet_of_urls(config.worker_urls or [])
