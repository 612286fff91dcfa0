"""The fleet file as the simulated replicas read it: what each card, link and store is.

`tfirst serve` and `tfirst plan` read the same file with a reader of their own, so a mistake in one reader
shows as a disagreement and not as a fleet that is wrong everywhere. `speed` scales the hardware and not the
clock: peaks, bandwidths and link rates times `speed`, fixed times divided by it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import yaml

from sim_backends.disciplines import DISCIPLINES

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

ROLES = ("both", "prefill", "decode")
PEERS_TOLD = (None, "header", "body", "move")
STORE_TOLD = ("engine", "prefetch", "never")
DESCRIBED_BY = ("peak_tflops", "memory_gb_s", "memory_gib")  # of a card, what its engines need
EXAMPLE_CARD = "A100: {peak_tflops: 312, memory_gb_s: 2039, memory_gib: 80}"
DEFAULT_FLEET = Path(__file__).with_name("default_fleet.yaml")


class BadFleet(ValueError):
    """The fleet file cannot be played. The message names the file and the key."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source
        self.problem = problem


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `model`: the shape of a dense transformer with grouped-query attention."""

    name: str
    layers: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    value_bytes: Count = 2

    @property
    def linear_parameters(self) -> int:
        """Weights every token passes: attention projections and three MLP matrices, embeddings excluded."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Weights of the language model head, passed only by tokens that are sampled."""
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        """Memory taken by all weights, input embeddings and an untied head included."""
        return self.value_bytes * (self.linear_parameters + 2 * self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One entry of `cards`, at speed 1. From the shares on all is the router's; service times here have their own."""

    peak_tflops: Positive
    memory_gb_s: Positive
    memory_gib: Positive
    compute_share: Share | None = None
    memory_share: Share | None = None
    fp8_tflops: Positive | None = None
    usd_per_hour: NotNegative | None = None


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of `links`, at speed 1: bytes per second over 1e9, and milliseconds before the first byte."""

    gb_s: Positive
    start_ms: NotNegative = 0.0


class Fetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `fetch`: what a replica does about blocks that its GPU memory lacks.

    by : `engine` looks the store up for every request, `directed` reads store and peers only when a request says so
    discipline : one of disciplines.DISCIPLINES
    """

    by: str = "engine"
    discipline: str = "overlapped"
    minimum_tokens: Annotated[int, msgspec.Meta(ge=0)] = 512
    limit_ms: NotNegative = 100.0  # patience of time_limited at a request's turn; 0 is best_effort
    prefetch_gib: Positive | None = None  # room for fetches under way on one replica; None has no limit


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Section `store`: the shared tier, the two links a fetch passes, and where removals are announced."""

    capacity_gib: Positive
    network: str
    host: str
    events: str | None = None


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tier of every rank: its size, and the link that its reads pass. Each rank has such a link of its own."""

    capacity_gib: Positive
    link: str


class Tiers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Section `tiers`: where blocks go that HBM gives up. Reads from the disk pass the host's link too."""

    host: Tier
    disk: Tier | None = None


class Peers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `peers`: the link that leaves each rank, which its readers and its hand-offs share."""

    link: str


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Section `told`, of all replicas or of one: what of a directed replica's fetches is for others to say.

    peer : `header` and `body` name a peer with the request; `move` copies its blocks through the lmcache face; None
        reads no peers
    store : `engine` looks the store up for every request; `prefetch` waits for the lmcache face to load from it;
        `never` does not read it
    own : `pin` is for the router to ask; the face always answers
    read_at : host:port that others know it by; None: its URL's
    instance : its name on the lmcache face; None: its own
    """

    peer: str | None = None
    store: str = "engine"
    own: str | None = None
    read_at: str | None = None
    instance: str | None = None


class Lmcache(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Section `lmcache`: where the simulated controller and coordinator answer, together; the rest is the router's."""

    controller: str | None = None
    coordinator: str | None = None
    model: str | None = None
    world_size: Count = 1
    location: str = "LocalCPUBackend"
    timeout_s: Positive = 1.0


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One entry of `replicas`. Addresses that are given are used; absent ones are chosen at start-up.

    model : a key of `models`; None serves `model`
    role : one of ROLES
    ranks : data-parallel engines behind the one URL, each on a card of its own; publishers of rank r listen r ports up
    start_s : at speed 1, from the start until it answers
    slow : times slower than its card, 1 for a healthy one
    api_key_env : read by the router; simulated engines want no key
    """

    name: str
    card: str
    url: str | None = None
    events: str | None = None
    replay: str | None = None
    model: str | None = None
    role: str = "both"
    ranks: Count = 1
    start_s: NotNegative = 0.0
    slow: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    api_key_env: str | None = None
    told: Told | None = None


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Section `engine`: settings only the simulated replicas have. vLLM's names where vLLM has one."""

    token_budget: Count = 2048  # max_num_batched_tokens; smaller steps keep decodes smooth and slow prefill
    max_running: Count = 256  # max_num_seqs
    memory_share: Share = 0.9  # gpu_memory_utilization
    max_model_len: Count = 131072  # lowered to what the card's memory can hold
    seed: int = 0
    jitter: NotNegative = 0.03  # sigma of the log-normal factor on each step; 0 makes steps exact
    straggler_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # of steps that take straggler_factor longer
    straggler_factor: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    median_output_tokens: Positive = 200.0  # of the draw for requests that do not say how long they run
    sigma_output_tokens: NotNegative = 0.8  # of the same draw, on the log


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    model: Model
    cards: dict[str, Card]
    replicas: Annotated[list[Replica], msgspec.Meta(min_length=1)]
    speed: Positive = 1.0
    block_tokens: Count = 16
    links: dict[str, Link] = {}
    fetch: Fetch | None = None
    store: Store | None = None
    engine: Engine | None = None
    tiers: Tiers | None = None
    peers: Peers | None = None
    models: dict[str, Model] | None = None
    api_key_env: str | None = None  # read by the router
    told: Told | None = None
    lmcache: Lmcache | None = None

    def told_of(self, replica: Replica) -> Told | None:
        """What `replica` is told; None where the file says nothing of that."""
        return replica.told or self.told

    def model_of(self, replica: Replica) -> Model:
        """The shape of what `replica` serves."""
        return self.model if replica.model is None else (self.models or {})[replica.model]

    def kv_blocks(self, card_name: str, model: Model | None = None) -> int:
        """Blocks of `model` (None: section `model`) that fit beside its weights in what an engine may use of a card."""
        use = model or self.model
        engine = self.engine or Engine()
        free = self.cards[card_name].memory_gib * 2**30 * engine.memory_share - use.weight_bytes
        return int(free // (use.kv_bytes_per_token * self.block_tokens))


def read(path: Path) -> Fleet:
    """The fleet in `path`, checked. Raises BadFleet, also when the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "not UTF-8 text"
        raise BadFleet(str(path), f"cannot be read: {reason}") from exc
    return parse(text, source=str(path))


def parse(text: str, *, source: str) -> Fleet:
    """The fleet in `text`; `source` names it in errors. Raises BadFleet."""
    try:
        raw = msgspec.yaml.decode(text)
        _check_described(raw, source)
        fleet = msgspec.convert(raw, Fleet)
    except msgspec.ValidationError as exc:
        raise BadFleet(source, str(exc)) from exc
    except msgspec.DecodeError as exc:
        raise BadFleet(source, f"is not YAML: {' '.join(str(exc).split())}") from exc
    check(fleet, source=source)
    return fleet


def _check_described(raw: Any, source: str) -> None:
    """Cards by name alone are good enough for the router, which has a table of them; here there is none."""
    cards = raw.get("cards") if isinstance(raw, dict) else None
    for name, card in cards.items() if isinstance(cards, dict) else ():
        missing = [key for key in DESCRIBED_BY if key not in card] if isinstance(card, dict) else []
        if missing:
            raise BadFleet(
                source,
                f"cards.{name} has no {', '.join(missing)}; simulated engines know no card by its name, so add what"
                f" {name} has, for example {EXAMPLE_CARD}",
            )


def check(fleet: Fleet, *, source: str) -> None:
    """What types cannot say: names that must exist, words from closed sets. Raises BadFleet."""
    _check_replicas(fleet, source)
    _check_fetch(fleet, source)
    _check_told(fleet, source)
    for key, link in _links_named(fleet):
        if link not in fleet.links:
            raise BadFleet(source, f"{key} names {link!r}, which is not under links")
    if fleet.store is not None:
        _address(fleet.store.events, source, "store.events", scheme="tcp")


def _links_named(fleet: Fleet) -> list[tuple[str, str]]:
    """Keys that name a link, with the name."""
    store, tiers, peers = fleet.store, fleet.tiers, fleet.peers
    named: list[tuple[str, str]] = []
    if store is not None:
        named += [("store.network", store.network), ("store.host", store.host)]
    if tiers is not None:
        named.append(("tiers.host.link", tiers.host.link))
        if tiers.disk is not None:
            named.append(("tiers.disk.link", tiers.disk.link))
    if peers is not None:
        named.append(("peers.link", peers.link))
    return named


def _check_replicas(fleet: Fleet, source: str) -> None:
    seen: set[str] = set()
    for index, replica in enumerate(fleet.replicas):
        key = f"replicas[{index}]"
        if replica.name in seen:
            raise BadFleet(source, f"{key}.name {replica.name!r} is used twice")
        seen.add(replica.name)
        if replica.card not in fleet.cards:
            raise BadFleet(source, f"{key}.card names {replica.card!r}, which is not under cards")
        if replica.model is not None and replica.model not in (fleet.models or {}):
            raise BadFleet(source, f"{key}.model names {replica.model!r}, which is not under models")
        if fleet.kv_blocks(replica.card, fleet.model_of(replica)) < 1:
            raise BadFleet(source, f"cards.{replica.card}.memory_gib leaves no room for KV beside the weights")
        _check_role(fleet, replica, source, key)
        _address(replica.url, source, f"{key}.url", scheme="http")
        _address(replica.events, source, f"{key}.events", scheme="tcp")
        _address(replica.replay, source, f"{key}.replay", scheme="tcp")
        _check_rank_ports(replica, source, key)


def _check_role(fleet: Fleet, replica: Replica, source: str, key: str) -> None:
    if replica.role not in ROLES:
        raise BadFleet(source, f"{key}.role is {replica.role!r}; roles are {', '.join(ROLES)}")
    if replica.role != "both" and fleet.peers is None:
        raise BadFleet(source, f"{key}.role is {replica.role!r}, but there is no peers.link for hand-offs")


def _check_rank_ports(replica: Replica, source: str, key: str) -> None:
    """Ranks count ports up from both bases, which must not meet."""
    if replica.events is None or replica.replay is None:
        return
    events, replay = urlsplit(replica.events), urlsplit(replica.replay)
    assert events.port is not None, "checked as an address"
    assert replay.port is not None, "checked as an address"
    if events.hostname == replay.hostname and abs(events.port - replay.port) < replica.ranks:
        raise BadFleet(source, f"{key}.events and {key}.replay are closer than its {replica.ranks} ranks")


def _check_fetch(fleet: Fleet, source: str) -> None:
    if fleet.fetch is None:
        return
    if fleet.fetch.by not in ("engine", "directed"):
        raise BadFleet(source, f"fetch.by is {fleet.fetch.by!r}; it is 'engine' or 'directed'")
    if fleet.fetch.discipline not in DISCIPLINES:
        known = ", ".join(DISCIPLINES)
        raise BadFleet(source, f"fetch.discipline is {fleet.fetch.discipline!r}; this simulator plays {known}")


def _check_told(fleet: Fleet, source: str) -> None:
    for key, told in [("told", fleet.told), *((f"told of {one.name!r}", one.told) for one in fleet.replicas)]:
        if told is None:
            continue
        for name, value, known in (("peer", told.peer, PEERS_TOLD), ("store", told.store, STORE_TOLD)):
            if value not in known:
                raise BadFleet(source, f"{key}: {name} is {value!r}; it is one of {', '.join(map(str, known))}")
        if told.own not in (None, "pin"):
            raise BadFleet(source, f"{key}: own is {told.own!r}; it is 'pin' or absent")
    if fleet.lmcache is not None:
        _address(fleet.lmcache.controller, source, "lmcache.controller", scheme="http")
        _address(fleet.lmcache.coordinator, source, "lmcache.coordinator", scheme="http")


def _address(value: str | None, source: str, key: str, *, scheme: str) -> None:
    if value is None:
        return
    try:
        parts = urlsplit(value)
        good = parts.scheme == scheme and parts.hostname is not None and parts.port is not None
    except ValueError:
        good = False
    if not good:
        raise BadFleet(source, f"{key} is {value!r}, expected {scheme}://HOST:PORT")


def built(*, replicas: int, cards: Sequence[str], speed: float, known: Mapping[str, Card] | None = None) -> Fleet:
    """The default fleet with `replicas` replicas, their cards in equal runs in the order given.

    known : cards there are beside those of the default fleet

    >>> [r.name for r in built(replicas=4, cards=["A100", "H20"], speed=1.0).replicas]
    ['a100-0', 'a100-1', 'h20-0', 'h20-1']
    """
    base = read(DEFAULT_FLEET)
    counts: dict[str, int] = {}
    rows: list[Replica] = []
    for index in range(replicas):
        card = cards[index * len(cards) // replicas]
        number = counts.get(card, 0)
        counts[card] = number + 1
        rows.append(Replica(name=f"{card.lower()}-{number}", card=card))
    described = dict(known or {}) | base.cards
    for card in cards:
        if card not in described:
            raise BadFleet("--cards", f"there is no card {card!r}; there are {', '.join(sorted(described))}")
    use = {card: described[card] for card in dict.fromkeys([*base.cards, *cards])}
    fleet = msgspec.structs.replace(base, replicas=rows, speed=speed, cards=use)
    check(fleet, source="command line")
    return fleet


def write(fleet: Fleet, path: Path) -> None:
    """Write `fleet` to `path` in one step, so that a reader never sees half a file. Raises OSError."""
    plain: dict[str, Any] = msgspec.to_builtins(fleet)
    order = ["speed", *(key for key in Fleet.__struct_fields__ if key not in ("speed", "replicas")), "replicas"]
    ordered = {key: plain[key] for key in order if plain[key] is not None}
    text = yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None, width=160)
    handle, temporary = tempfile.mkstemp(dir=path.parent or Path("."), prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
