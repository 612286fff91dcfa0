"""The router's configuration file, read once and passed down as values."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from router.admission import AdmissionConfig
from router.blocks.config import DirectoryConfig
from router.discovery.config import DiscoveryConfig
from router.errors import ConfigError
from router.fleet import Fleet, check_url, fleet_of_urls, load_fleet, one_line
from router.health import HealthConfig
from router.http.contract import Count, Limits, Seconds, TimeOuts
from router.http.tls import TlsConfig, UpstreamTlsConfig
from router.readiness import NotNegative, StartConfig
from router.resume.pools import ResumePools
from router.retries import RetryConfig
from router.safe_urls import SafeAddresses
from router.telemetry.config import TracingConfig

Section = TypeVar("Section", bound=msgspec.Struct)
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_CHECKED_ELSEWHERE = ("settings", "template_arguments")  # of a rule, of a chat template


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `policy`: a rule by name, and its settings (`tfirst policies` lists both)."""

    name: str = "e2e"  # as `tfirst policies` lists it
    settings: dict[str, Any] = {}  # of that rule: weights, deadlines, exploration


class ArmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One arm of an experiment: its part of the units, relative to the others, and its rule."""

    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0  # 0: gets none, but a trusted client can ask for it
    policy: PolicyConfig = PolicyConfig()


class ExperimentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `experiment`: arms that share the traffic, each with a rule of its own."""

    arms: Annotated[dict[str, ArmConfig], msgspec.Meta(min_length=1)]
    name: str = "experiment"  # another name deals the units anew
    # session (x-session-id, session_id), client (name of its key), tenant or header:NAME; requests without: one by one
    assign_by: Annotated[str, msgspec.Meta(pattern=r"^(session|client|tenant|header:[!-9;-~]+)$")] = "session"
    shadows: dict[str, PolicyConfig] = {}  # asked about every request, followed in none; receipts say what they took
    trusted: list[str] = []  # clients (names of their keys) whose requests may name an arm or a rule: x-tfirst-policy


class LoadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `load`: how often each replica is asked for its load, and how long it may take."""

    period_s: Seconds = 0.5  # shorter sees foreign load sooner, at one small request per replica and period
    timeout_s: Seconds = 2.0  # an answer that takes longer is none
    # have vLLM tell its load in the heads of whole (not streamed) answers too; one more header for replica and client
    from_answers: bool = False

    @property
    def fresh_s(self) -> float:
        """How long a report counts in full: until the next one is overdue."""
        return max(2.0, 2 * self.period_s)


class PromptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `prompts`: how text becomes blocks. Token ids in a request are always read as they are."""

    # bytes: blocks of text, which only the router's own memory of placements can match; none: load and length alone;
    # local: tokenizer and chat template from a directory; tokenize, render: ask the engine, or `url`
    source: Literal["bytes", "none", "local", "tokenize", "render"] = "bytes"
    tokenizer: str | dict[str, str] | None = None  # directory with tokenizer.json, or one for each base model
    engine: Literal["vllm", "sglang"] = "vllm"  # whose way of preparing conversations is followed
    template_arguments: dict[str, Any] = {}  # what the engine's server was given as defaults
    url: str | None = None  # of a renderer or another server with /tokenize, instead of the replicas
    timeout_s: Seconds = 1.0  # for each begun MiB of body; then the request is placed by load and length
    most_waiting: Count = 64  # more are placed by load and length at once
    cache_mib: Count = 64  # tokens of message prefixes, in each of two processes
    forward_tokens: bool = False  # send completions on as token ids, so that the engine need not tokenise again
    check: bool = True  # tokenise fixed prompts on each replica that comes up, and compare


class ReceiptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `receipts`: where every decision is written down, as JSON lines. No path: nowhere."""

    path: str | None = None  # file that gets a line for each request
    # of requests whose receipt names every candidate, as all do that failed, were late, overridden or asked about
    share: Share = 0.1  # one such line takes the interpreter some 0.3 ms, one of the others a tenth
    others: Literal["best", "none"] = "best"  # what the rest leave: the chosen and the best four, or no line
    max_mib: Count = 256  # of one file; then it becomes FILE.1, and FILE.1 becomes FILE.2
    keep: Annotated[int, msgspec.Meta(ge=0)] = 4  # files kept beside the one that is written
    most_waiting: Count = 8192  # for the disk; more are dropped and counted


class StateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `state`: where what was learned is kept over a restart. No path: it is learned anew."""

    path: str | None = None  # file it is kept in
    every_s: Seconds = 60.0  # between two writes; the last one is at shut-down


class LookUpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `other_tiers.look_up`: an LMCache service that says who holds a prompt, asked beside placement."""

    service: Literal["controller", "coordinator"]  # of LMCache in the engines' processes, or of its own servers
    url: str  # of that service
    model: str  # base model it is asked about, as the replicas name it
    served_as: str | None = None  # a coordinator's name of that model, where it is another
    ranks: Count = 1  # processes of one engine (tensor times pipeline shards), for a coordinator
    chunk_tokens: Count = 256  # LMCache's chunk; a multiple of the block
    instances: dict[str, str] = {}  # LMCache's instance -> replica it belongs to
    believed_s: Seconds = 10.0  # longer finds more, and more that has gone since
    deadline_s: Seconds = 0.5  # for each question


class WrittenStoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `other_tiers.written_store`: the store says nothing, and engines write through what they compute."""

    keep_s: Seconds = 3600.0  # how long a block is believed to stay after it was last used


class OtherTiersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `other_tiers`: what is known of hosts, disks and the store beside their events."""

    look_up: LookUpConfig | None = None
    written_store: WrittenStoreConfig | None = None


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. Exactly one of `fleet` and `worker_urls` says where the replicas are."""

    fleet: str | None = None  # path of a fleet file, relative to this file
    worker_urls: list[str] | None = None  # http(s)://host:port, or dns://name:port; nothing else is known of them
    host: str = "0.0.0.0"  # address of the traffic port
    port: Port = 30000  # of traffic; 0: the system chooses
    admin_host: str = "0.0.0.0"  # address of the admin port
    admin_port: Port = 29000  # metrics, probes, page, /fleet and admin calls
    admin_key_env: str | None = None  # environment variable with the key of admin calls; unset: there are none
    client_keys: str | None = None  # file of the keys that let clients in, relative to this file; unset: all may
    # environment variable with the key replicas want (vLLM's --api-key); the fleet file may name others
    api_key_env: str | None = None
    # whether clients' own keys and cookies go on to replicas; unset: only while the router has neither client keys nor
    # a key of its own for replicas. true: they do, in place of the router's
    forward_credentials: bool | None = None
    allow_link_local: bool = False  # lets a replica's URL lead to link-local and metadata addresses
    relay_unknown: bool = True  # off: paths that no known engine has get 404
    model_aliases: dict[str, str] = {}  # name that clients use -> name the replicas know
    inject_usage: bool = False  # ask for the usage of every stream; clients that did not ask do not see it
    tls: TlsConfig | None = None  # of the traffic port
    upstream_tls: UpstreamTlsConfig | None = None  # of connections to https replicas
    policy: PolicyConfig = PolicyConfig()
    experiment: ExperimentConfig | None = None  # rules compared on live traffic
    load: LoadConfig = LoadConfig()
    prompts: PromptConfig = PromptConfig()
    other_tiers: OtherTiersConfig = OtherTiersConfig()
    directory: DirectoryConfig = DirectoryConfig()  # what is believed of caches
    discovery: DiscoveryConfig = DiscoveryConfig()
    receipts: ReceiptConfig = ReceiptConfig()
    state: StateConfig = StateConfig()
    tracing: TracingConfig = TracingConfig()  # spans of sampled requests
    limits: Limits = Limits()  # what one client may make the router hold
    time_outs: TimeOuts = TimeOuts()  # how long it waits for a peer
    admission: AdmissionConfig = AdmissionConfig()
    health: HealthConfig = HealthConfig()
    retries: RetryConfig = RetryConfig()
    max_attempts: Count = 3  # different replicas tried before the first byte
    resume: ResumePools = ResumePools()
    start: StartConfig = StartConfig()
    # at shut-down requests are still accepted for so long, while /ready says 503: what a load balancer takes to notice
    stop_delay_s: NotNegative = 0.0
    drain_s: Seconds = 30.0  # then streams get this long to finish
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0  # of every draw by chance: ties and policies that draw


def parse_config(text: bytes | str, where: str = "configuration") -> RouterConfig:
    """Decode a configuration; `ConfigError` names the key that is unknown or out of range."""
    try:
        config = msgspec.convert(msgspec.yaml.decode(text) or {}, RouterConfig)  # a file of comments is no value
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}: {one_line(exc)}") from exc
    for key, value in settings_in(msgspec.to_builtins(config)):
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{where}: {key} is {value}; it must be a finite number")
    return config


def settings_in(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value in nested sections, with where it is; none of those that somebody else checks."""
    if isinstance(value, dict):
        own = ((name, one) for name, one in value.items() if name not in _CHECKED_ELSEWHERE)
        inner = ((f"{key}.{name}" if key else str(name), one) for name, one in own)
    elif isinstance(value, list | tuple):
        inner = ((f"{key}[{at}]", one) for at, one in enumerate(value))
    else:
        yield key, value
        return
    for name, one in inner:
        yield from settings_in(one, name)


def load_config(path: Path) -> RouterConfig:
    """Read a configuration file; relative paths of other files it names become relative to it."""
    try:
        config = parse_config(path.read_bytes(), f"configuration file {path}")
    except OSError as exc:
        raise ConfigError(f"configuration file {path}: {exc.strerror}") from exc
    folder = path.parent
    return msgspec.structs.replace(
        _beside(config, folder, "fleet", "client_keys"),
        prompts=_prompts_beside(config.prompts, folder),
        tls=config.tls and _beside(config.tls, folder, "certificate", "key", "client_ca"),
        upstream_tls=config.upstream_tls and _beside(config.upstream_tls, folder, "ca", "certificate", "key"),
    )


def _beside(section: Section, folder: Path, *files: str) -> Section:
    """The section with those of its files that are named relative to `folder`."""
    named = {key: str(folder / value) for key in files if (value := getattr(section, key)) is not None}
    return msgspec.structs.replace(section, **named)


def _prompts_beside(prompts: PromptConfig, folder: Path) -> PromptConfig:
    """The section with its directories relative to `folder`."""
    named = prompts.tokenizer
    if named is None:
        return prompts
    beside = (
        str(folder / named)
        if isinstance(named, str)
        else {model: str(folder / directory) for model, directory in named.items()}
    )
    return msgspec.structs.replace(prompts, tokenizer=beside)


def fleet_of(config: RouterConfig) -> Fleet:
    """The fleet a configuration points at, read and checked."""
    prompts = config.prompts
    if prompts.source == "local" and not prompts.tokenizer:
        raise ConfigError("prompts.source is local: name the model's directory in prompts.tokenizer")
    if prompts.url is not None:
        check_url(prompts.url)
    if config.other_tiers.look_up is not None:
        check_url(config.other_tiers.look_up.url)
    if (config.fleet is None) == (not config.worker_urls):
        raise ConfigError("say where the replicas are: either `fleet` or `worker_urls` (--worker-urls URL ...)")
    check_aliases(config.model_aliases)
    fleet = load_fleet(Path(config.fleet)) if config.fleet is not None else fleet_of_urls(config.worker_urls or [])
    most = config.discovery.max_replicas
    if most is not None and len(fleet.replicas) > most:
        raise ConfigError(f"there are {len(fleet.replicas)} replicas; discovery.max_replicas is {most}")
    addresses_for(config).check_urls(replica.url or "" for replica in fleet.replicas)
    return fleet


def addresses_for(config: RouterConfig) -> SafeAddresses:
    """Judge of the addresses that replicas may have."""
    listeners = [(config.host, config.port), (config.admin_host, config.admin_port)]
    return SafeAddresses(listeners, allow_link_local=config.allow_link_local)


def check_aliases(aliases: dict[str, str]) -> None:
    """Raise `ConfigError` when one is empty or leads to another: each request is renamed once."""
    for alias, name in aliases.items():
        if not alias or not name:
            raise ConfigError("model_aliases: a name is empty")
        if name in aliases:
            raise ConfigError(f"model_aliases: {alias!r} leads to {name!r}, which is an alias too")
