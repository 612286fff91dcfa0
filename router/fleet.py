"""The fleet file as the router reads it: cards, links, store and replicas. The simulator has a reader of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from estimators.first_token import Discipline
from estimators.hardware import CARDS, Card, Positive
from estimators.shapes import Count, ModelShape
from router.errors import ConfigError

DEFAULT_STEP_TOKENS = 2048  # vLLM's default on most cards
STORE_NAME = "store"  # of its event source, so no replica may have it
ZMQ_ADDRESS = re.compile(r"tcp://[^/\s]+:[0-9]{1,5}|(ipc|inproc)://\S+")

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of `links`. gb_s : payload rate, GB/s; start_ms : fixed time before the first byte."""

    gb_s: Positive
    start_ms: NotNegative = 0.0


class StoreSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `store`: the shared remote tier.

    network : name of the link all replicas share; host : name of the link each replica has for itself
    events : address of its event publisher; without it the router does not know what the store holds
    """

    network: str
    host: str
    capacity_gib: Positive | None = None
    events: str | None = None


class FetchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `fetch`: what a replica does about state that the store has and its memory lacks."""

    by: Literal["engine", "directed"] = "engine"
    discipline_name: Literal[
        "overlapped",
        "serial",
        "blocking",
        "layerwise",
        "layerwise_in_turn",
        "best_effort",
        "time_limited",
        "two_ends",
    ] = msgspec.field(name="discipline", default="overlapped")
    minimum_tokens: Annotated[int, msgspec.Meta(ge=0)] = 512  # a shorter gain is computed rather than fetched
    limit_ms: NotNegative = 100.0
    prefetch_gib: Positive | None = None

    @property
    def discipline(self) -> Discipline:
        """The closest form the estimates have: what starts at the turn adds up, what starts on arrival overlaps."""
        if self.discipline_name == "layerwise":
            return Discipline.LAYERWISE
        in_turn = self.discipline_name in ("serial", "blocking", "layerwise_in_turn")
        return Discipline.SERIAL if in_turn else Discipline.OVERLAPPED


class ReplicaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of `replicas`.

    card : name of a card; None where it is not known
    url : http(s)://host:port; events, replay : addresses of its event publisher and of that one's replay
    model, role, ranks, start_s, slow : read by the simulator; passed over here
    """

    name: str
    card: str | None = None
    url: str | None = None
    events: str | None = None
    replay: str | None = None
    model: str | None = None
    role: Literal["both", "prefill", "decode"] = "both"
    ranks: Count = 1
    start_s: NotNegative = 0.0
    slow: Annotated[float, msgspec.Meta(ge=1)] = 1.0


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole fleet file. Of `engine` the router reads the token budget; `tiers`, `peers`, `models` are passed over."""

    replicas: list[ReplicaSpec]
    model: ModelShape | None = None  # None: unknown, priced with a neutral shape
    cards: dict[str, Card] = {}
    links: dict[str, LinkSpec] = {}
    store: StoreSpec | None = None
    fetch: FetchSpec = FetchSpec()
    block_tokens: Count | None = None  # None: as the engines report, else 16
    speed: Positive = 1.0
    engine: dict[str, Any] = {}
    tiers: dict[str, Any] = {}
    peers: dict[str, Any] = {}
    models: dict[str, ModelShape] = {}

    @property
    def step_tokens(self) -> int:
        """Prompt tokens an engine computes in one step at most (vLLM's max_num_batched_tokens)."""
        budget = self.engine.get("token_budget", DEFAULT_STEP_TOKENS)
        return budget if isinstance(budget, int) and budget >= 1 else DEFAULT_STEP_TOKENS

    def card(self, name: str) -> Card:
        """The card called `name`, at this fleet's speed; from the fleet file first, else from our own table."""
        card = self.cards.get(name) or CARDS.get(name)
        if card is None:
            known = ", ".join(sorted({**CARDS, **self.cards}))
            raise ConfigError(f"card {name!r} is neither in `cards` nor known; known are {known}")
        return card.faster(self.speed)


def load_fleet(path: Path) -> Fleet:
    """Read and check a fleet file.

    Raises
    ------
    ConfigError : the file cannot be read, a key is unknown, a value is out of range, or a name points nowhere.
    """
    try:
        fleet = msgspec.yaml.decode(path.read_bytes(), type=Fleet)
    except OSError as exc:
        raise ConfigError(f"fleet file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"fleet file {path}: {one_line(exc)}") from exc
    try:
        check_fleet(fleet)
    except ConfigError as exc:
        raise ConfigError(f"fleet file {path}: {exc}") from exc
    return fleet


def check_fleet(fleet: Fleet) -> None:
    """Raise `ConfigError` when names repeat, point nowhere, or a replica has no usable URL."""
    if not fleet.replicas:
        raise ConfigError("`replicas` is empty")
    names = [replica.name for replica in fleet.replicas]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two replicas are called {name!r}")
    if STORE_NAME in names:
        raise ConfigError(f"a replica cannot be called {STORE_NAME!r}")
    for replica in fleet.replicas:
        check_address(f"events of {replica.name!r}", replica.events)
        check_address(f"replay of {replica.name!r}", replica.replay)
        if replica.url is None:
            raise ConfigError(f"replica {replica.name!r} has no `url`")
        check_url(replica.url)
        if replica.card is not None:
            fleet.card(replica.card)
    if fleet.store is not None:
        check_address("store.events", fleet.store.events)
        for role, link in (("network", fleet.store.network), ("host", fleet.store.host)):
            if link not in fleet.links:
                raise ConfigError(f"`store.{role}` names the link {link!r}, which `links` does not have")


def check_address(what: str, address: str | None) -> None:
    """Raise `ConfigError` when `address` is neither absent nor a ZMQ address."""
    if address is not None and ZMQ_ADDRESS.fullmatch(address) is None:
        raise ConfigError(f"{what}: {address!r} is not a ZMQ address; it looks like tcp://10.0.0.5:5557")


def one_line(exc: Exception) -> str:
    """An error's message on one line, as YAML's are not."""
    return " ".join(str(exc).split())


def check_url(url: str) -> str:
    """`url` without a trailing slash, or `ConfigError` when it is not http(s)://host[:port]."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"{url!r} is not a URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{url!r} is not a replica URL; it looks like http://host:8000")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{url!r} has more than scheme, host and port")
    return url.rstrip("/")


def fleet_of_urls(urls: list[str]) -> Fleet:
    """A fleet of which only the URLs are known: neutral cards, no store."""
    replicas = [ReplicaSpec(name=urlsplit(check_url(url)).netloc, url=check_url(url)) for url in urls]
    fleet = Fleet(replicas=replicas)
    check_fleet(fleet)
    return fleet
