"""The fleet file as the router reads it: cards, links, store and replicas. The simulator has a reader of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from estimators.first_token import Discipline
from estimators.hardware import CARDS, Card, Positive
from estimators.model_config import read_config
from estimators.model_keys import ModelConfigError
from estimators.shape_parts import Count
from estimators.shapes import ModelShape
from estimators.view import is_nobody
from router.directing.settings import LmcacheSpec, ToldSpec, check_told
from router.errors import ConfigError

DEFAULT_STEP_TOKENS = 2048  # vLLM's default on most cards
STORE_NAME = "store"  # of its event source, so no replica may have it
LEAST, MOST = 1e-6, 1e12  # of what a card, a link or `speed` may be: times of all others overflow, or are none
RATED_BY = ("peak_tflops", "memory_gb_s", "memory_gib", "fp8_tflops", "compute_share", "memory_share")
DNS_SCHEME = "dns"  # of a name that stands for many replicas
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
    capacity_gib: Positive | None = None  # of it; None: not known
    events: str | None = None


class FetchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `fetch`: what a replica does about state that the store has and its memory lacks.

    discipline : when a fetch runs, see `estimators.first_token`; None: the router starts from overlapped and learns it
    limit_ms : patience of time_limited at a request's turn
    prefetch_gib : room for fetches under way on one replica; None has no limit
    """

    by: Literal["engine", "directed"] = "engine"  # directed: replicas read store and peers as they are told
    discipline: Discipline | None = None
    minimum_tokens: Annotated[int, msgspec.Meta(ge=0)] = 512  # a shorter gain is computed rather than fetched
    limit_ms: NotNegative = 100.0
    prefetch_gib: Positive | None = None


class TierSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tier of every replica: its size, and the link that its reads pass, one for each replica."""

    capacity_gib: Positive  # of each replica
    link: str  # name of one in `links`


class TiersSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `tiers`: where blocks go that HBM gives up. Reads from the disk pass the host's link too."""

    host: TierSpec
    disk: TierSpec | None = None


class PeersSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `peers`: the link that leaves each replica, which its readers share."""

    link: str  # name of one in `links`


class ReplicaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of `replicas`.

    card : name of a card; None where it is not known
    url : http(s)://host:port, or dns://name:port for a replica at each address of the name; only the simulator can do
        without
    events, replay : addresses of its event publisher and of that one's replay
    api_key_env : environment variable with the key it wants; None: as the whole fleet
    told : how it is told where a prompt's state is; None: as the whole fleet
    model, role, ranks, start_s, slow : read by the simulator; passed over here, but for the role, which is shown
    """

    name: str  # of its own; it becomes a metric label
    card: str | None = None
    url: str | None = None
    events: str | None = None
    replay: str | None = None
    api_key_env: str | None = None
    model: str | None = None
    role: Literal["both", "prefill", "decode"] = "both"
    ranks: Count = 1
    start_s: NotNegative = 0.0
    slow: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    told: ToldSpec | None = None


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole fleet file. Of `engine` the router reads the token budget; `models` are passed over.

    api_key_env : environment variable with the key the replicas want; None: as the configuration says
    Files are read with `load_fleet`: it knows `model: {config: path}` and cards that only change a known one.
    """

    replicas: list[ReplicaSpec]  # at least one
    model: ModelShape | None = None  # None: unknown, priced with a neutral shape
    cards: dict[str, Card] = {}  # what a row leaves out is as in our own table of cards, where that has its name
    links: dict[str, LinkSpec] = {}  # that `store`, `tiers` and `peers` name
    store: StoreSpec | None = None
    fetch: FetchSpec = FetchSpec()
    block_tokens: Count | None = None  # None: as the engines report, else 16
    speed: Positive = 1.0  # hardware that many times faster: peaks and rates of links times it
    engine: dict[str, Any] = {}  # of simulated engines; of it the router reads `token_budget` alone
    tiers: TiersSpec | None = None
    peers: PeersSpec | None = None
    models: dict[str, ModelShape] = {}  # of simulated engines; the router passes them over
    api_key_env: str | None = None
    told: ToldSpec | None = None
    lmcache: LmcacheSpec | None = None

    @property
    def says_how_told(self) -> bool:
        """Whether replicas can be told where to read a prompt's state, and the file says how."""
        told = self.told is not None or any(replica.told is not None for replica in self.replicas)
        return self.fetch.by == "directed" and told

    def told_of(self, replica: ReplicaSpec) -> ToldSpec:
        """How `replica` is told; without a section it decides by itself."""
        return replica.told or self.told or ToldSpec()

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
        fleet = msgspec.convert(completed(msgspec.yaml.decode(path.read_bytes()), path.parent), Fleet)
        check_fleet(fleet)
    except OSError as exc:
        raise ConfigError(f"fleet file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"fleet file {path}: {one_line(exc)}") from exc
    except ConfigError as exc:
        raise ConfigError(f"fleet file {path}: {exc}") from exc
    return fleet


def completed(raw: Any, folder: Path) -> Any:
    """A fleet file as decoded, with what it leaves to a config.json or to our own table of cards filled in.

    What is not of the expected form stays as it is, for the check of types to name.
    """
    if not isinstance(raw, dict):
        return raw
    filled = dict(raw)
    if "model" in raw:
        filled["model"] = completed_model(raw["model"], folder)
    if isinstance(raw.get("models"), dict):
        filled["models"] = {name: completed_model(model, folder) for name, model in raw["models"].items()}
    if isinstance(raw.get("cards"), dict):
        filled["cards"] = {name: completed_card(name, card) for name, card in raw["cards"].items()}
    return filled


def completed_model(model: Any, folder: Path) -> Any:
    """Section `model`; with `config`, the shape in that config.json (relative to `folder`), its own keys on top."""
    if not isinstance(model, dict) or "config" not in model:
        return model
    own = {key: value for key, value in model.items() if key != "config"}
    where = folder / str(model["config"])
    try:
        filled: dict[str, Any] = msgspec.to_builtins(read_config(where.read_bytes()))
    except OSError as exc:
        raise ConfigError(f"model.config {where}: {exc.strerror}") from exc
    except ModelConfigError as exc:
        raise ConfigError(f"model.config {where}: {exc}") from exc
    for key in ("latent", "recurrent", "experts"):  # one key of such a section changes that key alone
        if isinstance(own.get(key), dict) and isinstance(filled[key], dict):
            own[key] = {**filled[key], **own[key]}
    return {**filled, **own}


def completed_card(name: str, card: Any) -> Any:
    """One row of `cards`; what it leaves out is as in our own table, if that has a card of this name."""
    if not isinstance(card, dict) or name not in CARDS:
        return card
    return {**msgspec.to_builtins(CARDS[name]), **card}


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
    for name in names:
        if not name or is_nobody(name):
            raise ConfigError(f"a replica cannot be called {name!r}: names are not empty and do not begin with '('")
        if not name.isprintable():  # it stands in logs, header fields and metrics
            raise ConfigError(f"a replica cannot be called {name!r}: names have printable characters only")
    check_rates(fleet)
    for replica in fleet.replicas:
        check_address(f"events of {replica.name!r}", replica.events)
        check_address(f"replay of {replica.name!r}", replica.replay)
        if replica.url is None:
            raise ConfigError(f"replica {replica.name!r} has no `url`")
        check_replica_url(replica.url)
        if replica.card is not None:
            fleet.card(replica.card)
    check_keys_of_ranks(fleet)
    check_tellings(fleet)
    if fleet.store is not None:
        check_address("store.events", fleet.store.events)
    for role, link in named_links(fleet):
        if link not in fleet.links:
            raise ConfigError(f"`{role}` names the link {link!r}, which `links` does not have")


def check_rates(fleet: Fleet) -> None:
    """Raise `ConfigError` when hardware is so slow or fast that times are no numbers any more."""
    rates = [(f"cards.{name}.{key}", getattr(card, key)) for name, card in fleet.cards.items() for key in RATED_BY]
    rates += [(f"links.{name}.gb_s", link.gb_s) for name, link in fleet.links.items()]
    for key, value in (*rates, ("speed", fleet.speed)):
        if value is not None and not LEAST <= value <= MOST:
            raise ConfigError(f"`{key}` is {value:g}; it must be from {LEAST:g} to {MOST:g}")


def check_keys_of_ranks(fleet: Fleet) -> None:
    """Raise `ConfigError` when ranks of one server are said to want different keys."""
    wanted: dict[str, str | None] = {}
    for replica in fleet.replicas:
        url = (replica.url or "").rstrip("/")
        if wanted.setdefault(url, replica.api_key_env) != replica.api_key_env:
            raise ConfigError(f"replicas that share {url} name different `api_key_env`; a server has one key")


def check_tellings(fleet: Fleet) -> None:
    """Raise `ConfigError` when a replica is told in a way that this fleet has no place for."""
    for replica in fleet.replicas:
        told = replica.told or fleet.told
        if told is None:
            continue
        if fleet.fetch.by != "directed" and told.tells:
            raise ConfigError(f"replica {replica.name!r} is told, so `fetch.by` must be directed")
        if fleet.fetch.by == "directed":
            check_told(
                replica.name,
                told,
                fleet.lmcache,
                has_peers=fleet.peers is not None,
                has_store=fleet.store is not None,
                has_host=fleet.tiers is not None,
            )
    for key in ("controller", "coordinator"):
        url = None if fleet.lmcache is None else getattr(fleet.lmcache, key)
        if url is not None:
            check_url(url)


def named_links(fleet: Fleet) -> list[tuple[str, str]]:
    """Every key of the file that names a link, and the name."""
    store, tiers, peers = fleet.store, fleet.tiers, fleet.peers
    named = [] if store is None else [("store.network", store.network), ("store.host", store.host)]
    if tiers is not None:
        named.append(("tiers.host.link", tiers.host.link))
        named += [] if tiers.disk is None else [("tiers.disk.link", tiers.disk.link)]
    return named if peers is None else [*named, ("peers.link", peers.link)]


def check_address(what: str, address: str | None) -> None:
    """Raise `ConfigError` when `address` is neither absent nor a ZMQ address."""
    if address is not None and ZMQ_ADDRESS.fullmatch(address) is None:
        raise ConfigError(f"{what}: {address!r} is not a ZMQ address; it looks like tcp://10.0.0.5:5557")


def one_line(exc: Exception) -> str:
    """An error's message on one line, as YAML's are not."""
    return " ".join(str(exc).split())


def check_replica_url(url: str) -> str:
    """`check_url`, or the same for a DNS name that stands for a replica at each of its addresses."""
    if not is_dns(url):
        return check_url(url)
    wrong = f"{url!r} is no name to look up; it looks like dns://name:8000"
    try:
        check_url("http" + url.removeprefix(DNS_SCHEME))
    except ConfigError as exc:
        raise ConfigError(wrong) from exc
    if urlsplit(url).port is None:
        raise ConfigError(wrong)
    return url.rstrip("/")


def is_dns(url: str) -> bool:
    """Whether a URL is a DNS name that stands for a replica at each of its addresses."""
    return url.startswith(f"{DNS_SCHEME}://")


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
    replicas = [ReplicaSpec(name=urlsplit(url).netloc, url=url) for url in map(check_replica_url, urls)]
    fleet = Fleet(replicas=replicas)
    check_fleet(fleet)
    return fleet
