"""Facts in, findings out: what works, what is missing, and what to do about it.

Model     a finding is a problem when the router would place requests without knowing this server's cache; a note when
          it would know it less well or less surely; else it is fine. Each problem and note says one thing and its cure
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import gcd

from router.doctor import flags
from router.doctor.facts import Engine, Facts, ProbeFacts, SourceFacts
from router.signals.meaning import sizes_fit
from router.signals.sequence import State

_NAMES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
_HASHES_CHAINED = (0, 5, 6)
_SGLANG_NAMES_SOURCES = (0, 5, 13)
_SGLANG_NAMES_REPLAY = (0, 5, 22)
_SGLANG_LOAD_SOCKET = (0, 5, 19)
_VLLM_NAMES_SOURCES = (0, 31, 0)


class Level(Enum):
    FINE = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing. about : a short word for a column; fix : what to do, None where nothing is to be done."""

    level: Level
    about: str
    sentence: str
    fix: str | None = None


def findings_of(facts: Facts) -> list[Finding]:
    """Everything there is to say about one server, in the order in which an operator should read it."""
    if facts.trouble is not None:
        fix = "--api-key-env NAME, the environment variable that holds the key" if facts.wants_key else None
        return [Finding(Level.PROBLEM, "server", f"{facts.trouble[0].upper()}{facts.trouble[1:]}.", fix)]
    return [
        *_engine(facts),
        *_models(facts),
        *_blocks(facts),
        *_events(facts),
        *_load(facts),
        *_probe(facts),
        *_tokens(facts),
    ]


def works(findings: list[Finding]) -> bool:
    """Whether cache-aware routing would work."""
    return all(finding.level is not Level.PROBLEM for finding in findings)


def _engine(facts: Facts) -> Iterator[Finding]:
    name = "an engine of unknown kind" if facts.engine is None else _NAMES[facts.engine]
    level = Level.NOTE if facts.engine is None else Level.FINE
    yield Finding(level, "engine", f"{name} {facts.version or '(version not said)'}")
    if facts.health_trouble is not None:
        yield Finding(Level.PROBLEM, "health", f"{facts.health_trouble}: it takes no requests now.")
    if facts.load.total.asleep:
        yield Finding(
            Level.PROBLEM, "health", "It sleeps: its memory is released and its cache is empty.", "wake it up"
        )
    if facts.engine == "sglang" and facts.is_before(*_HASHES_CHAINED):
        yield Finding(
            Level.PROBLEM,
            "engine",
            "Its block hashes are not chained, so removals are ambiguous and its cache cannot be followed.",
            "SGLang 0.5.6 or newer",
        )


def _models(facts: Facts) -> Iterator[Finding]:
    if not facts.models:
        yield Finding(Level.PROBLEM, "model", "/v1/models names no model, so no prompt can be matched.")
        return
    adapters = f"; adapters {', '.join(sorted(facts.adapters))}" if facts.adapters else ""
    yield Finding(Level.FINE, "model", ", ".join(facts.models) + adapters)


def _blocks(facts: Facts) -> Iterator[Finding]:
    taken = facts.router_tokens
    if facts.block_tokens is None:
        sentence = f"The block size is not said: the router takes {taken} tokens."
        fix = None if facts.configured_tokens else "block_tokens in a fleet file"
        yield Finding(Level.NOTE, "blocks", sentence, fix)
        return
    count = "" if facts.blocks is None else f", {facts.blocks:,} of them"
    capacity = "KV capacity not said"
    if facts.capacity_tokens is not None:
        capacity = f"{facts.capacity_tokens:,} tokens of KV"
    yield Finding(Level.FINE, "blocks", f"{facts.block_tokens} tokens{count}; {capacity}")
    if not sizes_fit(taken, facts.block_tokens):
        yield _misfit(taken, facts.block_tokens, facts)
    if facts.caching is False:
        sentence = "Prefix caching is off: it keeps nothing to be reused, and says nothing."
        yield Finding(Level.PROBLEM, "caching", sentence, flags.of(flags.CACHING, facts.engine))


def _misfit(taken: int, engine: int, facts: Facts) -> Finding:
    """The router's blocks of `taken` tokens and the engine's cannot be matched: why, and which size could be."""
    why, fitting = "/metrics does not say the block size, so the router would take", engine
    if facts.configured_tokens:
        why = "The fleet file says block_tokens:"
    elif facts.fleet_sizes:
        why, fitting = "The router takes the size the first server says,", gcd(engine, *facts.fleet_sizes)
    sentence = f"{why} {taken}: blocks of {engine} tokens are no whole number of those, nor they of them."
    return Finding(Level.PROBLEM, "blocks", sentence, f"block_tokens: {fitting} in a fleet file")


# Events


def _events(facts: Facts) -> Iterator[Finding]:
    if not facts.sources:
        yield _no_source(facts)
        return
    for source in facts.sources:
        yield _source(facts, source)
        if source.pair_events:
            sentence = f"{_where(source)} announces token pairs (speculative decoding by EAGLE), which give no hits."
            yield Finding(Level.PROBLEM, "cache events", sentence, flags.PAIRS)
        yield from _replay(facts, source)
    yield from _collisions(facts.sources)
    ranks = len(facts.sources)
    if facts.sources_route is not None and ranks > facts.listed:
        yield Finding(
            Level.PROBLEM,
            "ranks",
            f"{ranks} data-parallel ranks stand behind this URL and {facts.listed} is listed: none would be credited.",
            f"a fleet file with {ranks} replicas of this URL",
        )


def _no_source(facts: Facts) -> Finding:
    fix = flags.of(flags.EVENTS, facts.engine)
    if facts.switched_off:
        return Finding(Level.PROBLEM, "cache events", "They are switched off.", fix)
    named_from = _VLLM_NAMES_SOURCES if facts.engine == "vllm" else _SGLANG_NAMES_SOURCES
    if facts.engine is not None and facts.is_before(*named_from):
        release = ".".join(map(str, named_from))
        return Finding(
            Level.PROBLEM,
            "cache events",
            f"This release cannot say where it publishes them ({_NAMES[facts.engine]} {release} can).",
            f"{fix}, and its address as `events` and `replay` in a fleet file (--events, --replay here)",
        )
    return Finding(Level.PROBLEM, "cache events", "It names no source of cache events.", fix)


def _source(facts: Facts, source: SourceFacts) -> Finding:
    about, where = "cache events", _where(source)
    if source.errors:
        return Finding(Level.PROBLEM, about, f"{where} cannot be listened to from here.")
    if not source.connected:
        return _unreachable(facts, source)
    if source.state is State.DEGRADED:
        sentence = f"{where} is live, but what it said before is unknown until it restarts or clears its cache."
        return Finding(Level.NOTE, about, sentence)
    if source.batches:
        read = "1 batch" if source.batches == 1 else f"{source.batches:,} batches"
        return Finding(Level.FINE, about, f"{where} is live, {read} read")
    probed = facts.probe is not None and facts.probe.trouble is None
    if probed:
        return Finding(Level.FINE, about, f"{where} accepts subscribers")
    sentence = f"{where} accepts subscribers and has said nothing yet, which is right for an engine without requests."
    return Finding(Level.NOTE, about, sentence, "--probe sends two tiny completions and waits for their events")


def _unreachable(facts: Facts, source: SourceFacts) -> Finding:
    about, where, said = "cache events", _where(source), source.raw_address or ""
    if facts.engine == "vllm" and "//0.0.0.0:" in said:
        sentence = f"It was told to publish at {said}, which vLLM dials and does not listen at."
        return Finding(Level.PROBLEM, about, sentence, flags.BIND)
    if not source.address.startswith("tcp://"):
        sentence = f"It publishes at {source.address}, which only programs on its own machine can reach."
        return Finding(Level.PROBLEM, about, sentence, flags.BIND)
    if said and "*" not in said and "[::]" not in said:
        port = said.rpartition(":")[2]
        sentence = f"Nothing listens at {where}: given an address without *, the engine dials and does not listen."
        fix = f"{flags.BIND}, or `events: tcp://*:{port}` in the fleet file of the router it dials"
        return Finding(Level.PROBLEM, about, sentence, fix)
    sentence = f"Nothing accepts subscribers at {where}: a firewall, another port, or events switched off."
    return Finding(Level.PROBLEM, about, sentence, flags.of(flags.EVENTS, facts.engine))


def _where(source: SourceFacts) -> str:
    rank = "" if source.rank is None else f" (rank {source.rank})"
    return f"{source.address}{rank}"


def _replay(facts: Facts, source: SourceFacts) -> Iterator[Finding]:
    about = "replay"
    if source.replay is None:
        hidden = facts.engine == "sglang" and facts.is_before(*_SGLANG_NAMES_REPLAY)
        sentence = "No replay: what a router missed, or came too late for, stays unknown."
        if hidden:
            sentence = "This release cannot say whether it has a replay socket; without one, missed events stay missed."
        fix = f"{flags.REPLAY}{', and `replay` in a fleet file' if hidden else ''}"
        yield Finding(Level.NOTE, about, sentence, fix)
    elif source.replay_answers is False:
        sentence = f"{source.replay} does not answer: what a router missed stays unknown."
        yield Finding(Level.NOTE, about, sentence, flags.REPLAY)
    elif source.replay_answers:
        yield Finding(Level.FINE, about, f"{source.replay} answers")
    elif source.connected:
        yield Finding(Level.NOTE, about, f"{source.replay} was not asked: the events' own socket came too late.")


def _collisions(sources: tuple[SourceFacts, ...]) -> Iterator[Finding]:
    taken: set[str] = set()
    for address in (address for source in sources for address in (source.address, source.replay)):
        if address is None:
            continue
        if address in taken:
            sentence = f"{address} is named for two sockets: each rank adds its number to both ports."
            yield Finding(Level.PROBLEM, "ports", sentence, "event and replay ports further apart than there are ranks")
        taken.add(address)


# Load


def _load(facts: Facts) -> Iterator[Finding]:
    load = facts.load
    if not load.names:
        yield _no_load(facts)
        return
    total = load.total
    figures = [
        f"{number:g} {what}"
        for number, what in ((total.running, "running"), (total.waiting, "waiting"))
        if number is not None
    ]
    if total.kv_usage is not None:
        figures.append(f"KV {total.kv_usage:.0%} in use")
    said = ", ".join(figures) or "of some ranks only, so unknown of all together"
    pushed = f"; pushed by {load.sockets} load socket{'s' * (load.sockets > 1)}" if load.sockets else ""
    yield Finding(Level.FINE, "load", f"{', '.join(load.names)}: {said}{pushed}")
    if total.anomalies:
        sentence = f"{total.anomalies} load figures are out of range and count as unknown."
        yield Finding(Level.NOTE, "load", sentence)
    if facts.engine == "sglang" and not load.sockets and facts.release and facts.release >= _SGLANG_LOAD_SOCKET:
        sentence = "Load is asked for and up to seconds old; this release can push it at each change."
        yield Finding(Level.NOTE, "load", sentence, flags.LOAD_SOCKET)


def _no_load(facts: Facts) -> Finding:
    hidden = facts.load.page_trouble
    sentence = f"{hidden or '/metrics has no figures of load'}: the router sees only the load it sends itself."
    if hidden is None:
        fix = flags.LOAD["vllm"] if facts.engine == "vllm" else None
    elif facts.engine == "sglang":
        fix = flags.LOAD["sglang"]
    else:
        fix = "the engine's own URL, if a proxy stands before it"
    return Finding(Level.NOTE, "load", sentence[0].upper() + sentence[1:], fix)


# Probe and tokens


def _probe(facts: Facts) -> Iterator[Finding]:
    probe = facts.probe
    if probe is None:
        yield Finding(Level.NOTE, "usage", "Not tried whether answers tell cached tokens.", "--probe")
        return
    if probe.trouble is not None:
        yield Finding(Level.PROBLEM, "probe", f"No completion could be made: {probe.trouble}.")
        return
    yield from _probe_events(facts, probe)
    yield _usage(facts, probe)
    if probe.figures_moved is False:
        sentence = "The counters on /metrics did not move during two completions: they are frozen or somebody else's."
        yield Finding(Level.NOTE, "load", sentence)


def _probe_events(facts: Facts, probe: ProbeFacts) -> Iterator[Finding]:
    if not any(source.connected for source in facts.sources):
        return
    if probe.seen_blocks < probe.blocks <= probe.elsewhere_blocks:
        sentence = f"Rank {probe.rank} was asked for and another one announced the blocks: the engine picks one itself."
        yield Finding(Level.PROBLEM, "ranks", sentence, flags.of(flags.RANKS, facts.engine))
    elif probe.seen_blocks >= probe.blocks:
        sentence = f"All {probe.blocks} blocks of a tiny completion were announced and match the router's."
        yield Finding(Level.FINE, "probe", sentence)
    elif probe.batches == 0 and probe.cached_tokens:
        sentence = (
            "Its prefix cache works, but a completion brought no event: they are lost on the way or another server's."
        )
        yield Finding(Level.PROBLEM, "probe", sentence, flags.of(flags.EVENTS, facts.engine))
    elif probe.batches == 0:
        sentence = "A completion was made and no event came: prefix caching is off, or the events are another server's."
        yield Finding(Level.PROBLEM, "probe", sentence, flags.of(flags.CACHING, facts.engine))
    else:
        counted = f" ({probe.unmatched})" if probe.unmatched else ""
        sentence = f"Events came, but only {probe.seen_blocks} of {probe.blocks} blocks match the router's{counted}."
        fix = "the engine's block size as block_tokens in a fleet file" if "block size" in counted else None
        yield Finding(Level.PROBLEM, "probe", sentence, fix)


def _usage(facts: Facts, probe: ProbeFacts) -> Finding:
    if probe.cached_tokens is None:
        sentence = "Answers do not tell cached tokens, so the router cannot check what it believes of this cache."
        return Finding(Level.NOTE, "usage", sentence, flags.of(flags.CACHED_TOKENS, facts.engine))
    if probe.cached_tokens == 0 and not probe.elsewhere_blocks:
        sentence = "Answers tell cached tokens, and the second of two equal prompts reused none."
        return Finding(Level.PROBLEM, "usage", sentence, flags.of(flags.CACHING, facts.engine))
    sentence = f"cached_tokens is told: {probe.cached_tokens} of {probe.reusable_tokens} in a repeated prompt"
    return Finding(Level.FINE, "usage", sentence)


def _tokens(facts: Facts) -> Iterator[Finding]:
    tokens = facts.tokens
    if tokens is None:
        return
    if tokens.trouble is not None:
        sentence = f"The engine cannot be asked for tokens: {tokens.trouble}."
        yield Finding(Level.NOTE, "tokenizer", sentence)
    elif tokens.local_tokens is None:
        yield Finding(Level.FINE, "tokenizer", "The engine tokenizes on request; --tokenizer DIR compares")
    elif tokens.first_difference is None:
        yield Finding(Level.FINE, "tokenizer", f"The local tokenizer agrees in all {tokens.engine_tokens} tokens")
    else:
        sentence = (
            f"The local tokenizer is not the engine's: token {tokens.first_difference} differs"
            f" ({tokens.local_tokens} local tokens, {tokens.engine_tokens} of the engine)."
        )
        yield Finding(Level.PROBLEM, "tokenizer", sentence, "the directory the engine loads its tokenizer from")
