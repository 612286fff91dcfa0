"""What was found out about one server: values only, None where it is not known. `judge` makes findings of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from router.signals.load import Load
from router.signals.sequence import State

Engine = Literal["vllm", "sglang"]
Version = tuple[int, int, int]
DEFAULT_BLOCK_TOKENS = 16  # what the router takes where nobody says
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """One event source, after it was listened to.

    address, replay : where it was listened to and asked; replay None when it names none
    raw_address : as the engine says it; None when the address was given to us
    batches : taken in, replayed ones included
    pair_events : stores of token pairs among them
    replays, replays_failed : how often its history was asked for, and got no end
    """

    rank: int | None
    address: str
    replay: str | None
    topic: str = ""
    raw_address: str | None = None
    state: State = State.NEVER_CONNECTED
    connected: bool = False
    batches: int = 0
    pair_events: int = 0
    bad_frames: int = 0
    errors: int = 0
    replays: int = 0
    replays_failed: int = 0

    @property
    def replay_answers(self) -> bool | None:
        """Whether its history could be read, or is being read; None when it was never asked for."""
        if not self.replays:
            return None
        return self.replays_failed == 0 and (self.state is not State.REPLAYING or self.batches > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """Where load is read. names : metric or route -> the field it sets; trouble : why /metrics is of no use."""

    names: tuple[str, ...] = ()
    total: Load = field(default_factory=Load)
    page_trouble: str | None = None
    page_says_load: bool = False
    sockets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFacts:
    """What two equal tiny completions showed.

    rank : data-parallel rank that was asked for; None where there is one only
    blocks : whole reusable blocks in the prompt
    seen_blocks : of those, blocks the events announced and the router would match; of the rank that was asked for
    elsewhere_blocks : the same, of the other rank that has most
    batches : heard after the first completion was sent
    cached_tokens : what usage said of the second; None when it says nothing
    reusable_tokens : what the second could have reused
    figures_moved : whether counters on /metrics changed meanwhile; None where there are none to compare
    unmatched : blocks of another size, unknown parents and events of other kinds, as the directory counted them
    """

    trouble: str | None = None
    rank: int | None = None
    blocks: int = 0
    seen_blocks: int = 0
    elsewhere_blocks: int = 0
    batches: int = 0
    cached_tokens: int | None = None
    reusable_tokens: int = 0
    figures_moved: bool | None = None
    unmatched: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """The engine's own tokens of one text, against a local tokenizer's where one was given.

    first_difference : place of the first token that differs; None when all agree or nothing was compared
    """

    trouble: str | None = None
    engine_tokens: int = 0
    local_tokens: int | None = None
    first_difference: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One server.

    listed : how often it is listed: once for each of its data-parallel ranks
    trouble : why nothing can be asked of it; then the rest is unknown
    wants_key : it refused for want of a key
    models : base models and adapters it names; adapters : adapter -> base model
    block_tokens : tokens in a block, and where that was said; the router itself reads /metrics only
    configured_tokens : tokens in a block of the router, as the fleet file says; None where it does not
    fleet_sizes : tokens in a block that the servers of one router say on /metrics, in their order, this one included
    caching : whether prefix caching is on
    sources_route : route that named event sources; None when none did and `sources` were given or are missing
    switched_off : the engine answered that it publishes nothing
    """

    url: str
    listed: int = 1
    trouble: str | None = None
    wants_key: bool = False
    engine: Engine | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    adapters: dict[str, str] = field(default_factory=dict)
    health_trouble: str | None = None
    block_tokens: int | None = None
    block_tokens_from: Literal["/metrics", "/server_info"] | None = None
    configured_tokens: int | None = None
    fleet_sizes: tuple[int, ...] = ()
    blocks: int | None = None
    capacity_tokens: int | None = None
    caching: bool | None = None
    sources: tuple[SourceFacts, ...] = ()
    sources_route: str | None = None
    switched_off: bool = False
    load: LoadFacts = field(default_factory=LoadFacts)
    probe: ProbeFacts | None = None
    tokens: TokenFacts | None = None

    @property
    def router_tokens(self) -> int:
        """Tokens in a block of the router in front of it, which takes the first size that is said."""
        first = self.fleet_sizes[0] if self.fleet_sizes else self.said_tokens
        return self.configured_tokens or first or DEFAULT_BLOCK_TOKENS

    @property
    def said_tokens(self) -> int | None:
        """Tokens in a block, where the router reads it too."""
        return self.block_tokens if self.block_tokens_from == "/metrics" else None

    @property
    def release(self) -> Version | None:
        """The version as numbers; None when it is not known or not a release."""
        found = _VERSION.match(self.version or "")
        return None if found is None else (int(found[1]), int(found[2]), int(found[3]))

    def is_before(self, *version: int) -> bool:
        """Whether it is known to be older than that release."""
        return self.release is not None and self.release < version


def as_one_fleet(servers: Sequence[Facts]) -> list[Facts]:
    """The same, each knowing what block sizes all of them say: one router stands in front of them."""
    sizes = tuple(facts.said_tokens for facts in servers if facts.said_tokens is not None)
    return [replace(facts, fleet_sizes=sizes) for facts in servers]
