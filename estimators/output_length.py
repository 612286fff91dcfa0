"""How many tokens an answer will still bring, learned from those that ended.

Model     a distribution of lengths (`length_tails.py`) for each session, each (model, route, prompt length) and each
          model, forgetting with every answer; each is believed as far as it has seen answers, and for the rest the
          next more general one is; at the end stands a memoryless prior of 256 tokens:
              belief = (n own + strength x belief of the next) / (n + strength)
          An answer that was cut off (client gone, limit reached) is known to be longer than what came of it: it is
          spread over the longer lengths as believed at that moment. Repeated, this settles where the Kaplan-Meier
          estimate is, which is unbiased when what cuts answers off does not depend on their length.
Valid     answers whose token count was seen
Blind to  the prompt's text, and clients that leave because the answer is long
Source    pseudo-counts: Ferguson 1973; cut-off answers: Efron 1967 (self-consistency)
"""

from __future__ import annotations

from collections import OrderedDict
from math import log
from typing import NamedTuple

from estimators.length_tails import (
    Table,
    area,
    drop_forgotten,
    mean_left_of_parts,
    mixture,
    of_longer,
    of_memoryless,
    of_one,
    smallest_at,
    tail_at,
)
from estimators.ranges import require

PRIOR_TOKENS = 256.0
LEAST_REFRESH_TOKENS = 16
REFRESH_SHARE = 4  # a rest is good for a quarter of what was produced

_PRIOR = of_memoryless(PRIOR_TOKENS)
_PRIOR_FLAT = _PRIOR.reshape(-1)
_PRIOR_AREA = area(_PRIOR_FLAT)


class Kind(NamedTuple):
    """What an answer's length is learned by. Keys are hashes, so that no name a client chose is kept."""

    model: int
    group: int
    session: int | None


def kind_of(*, model: str = "", route: str = "", prompt_tokens: int = 0, session: str | None = None) -> Kind:
    """The kind of one request: to be made once and kept with its booking.

    prompt_tokens : >= 0; only its size to a factor of four counts
    session : whatever names the conversation; None or "" when nothing does
    """
    require(prompt_tokens >= 0, "prompt_tokens", prompt_tokens)
    size = (prompt_tokens.bit_length() + 1) // 2
    return Kind(
        model=hash(model),
        group=hash((model, route, size)),
        session=hash((model, session)) if session else None,
    )


ANY = kind_of()


class Remaining(NamedTuple):
    """What one running answer adds to a sum over running answers, until it is asked again.

    tokens : expected rest, >= 0, on average over the stretch it is used for
    refresh_at : tokens produced at which that stretch ends
    """

    tokens: float
    refresh_at: int


class OutputLength:
    """Lengths of answers of many kinds. Memory is bounded: the kinds answered longest ago are forgotten first.

    groups, sessions, models : kinds kept apart, >= 1 each; 2 KB each
    """

    def __init__(self, *, groups: int = 1024, sessions: int = 4096, models: int = 64) -> None:
        # Strengths and memories are flat around these values on the Mooncake conversation trace (docs/cost.md). A
        # conversation's first answer is believed as much as everything else together.
        self._models = _Level(models, memory=500, strength=4.0)
        self._groups = _Level(groups, memory=200, strength=16.0)
        self._sessions = _Level(sessions, memory=8, strength=1.0)

    @property
    def mean_tokens(self) -> float:
        """Expected answer of a request of which nothing is known."""
        return self.expected(None)

    def observe(self, tokens: int, kind: Kind = ANY, *, ended: bool = True) -> None:
        """One answer brought `tokens` (>= 0) output tokens.

        ended : the model ended it; false when it was cut off (cancelled, failed, `max_tokens` reached), so that all
            that is known is that it would have been longer
        """
        require(tokens >= 0, "tokens", tokens)
        if not ended and tokens == 0:
            return  # nothing came: every length is still possible
        seen = of_one(tokens) if ended else of_longer(mixture(self._parts(kind)), tokens)
        self._models.learn(kind.model, seen)
        self._groups.learn(kind.group, seen)
        if kind.session is not None:
            self._sessions.learn(kind.session, seen)

    def expected(self, max_tokens: int | None, kind: Kind = ANY, *, produced: int = 0) -> float:
        """Expected tokens still to come, >= 0: E[min(L, max_tokens) - produced | L > produced].

        max_tokens : the client's limit on the whole answer; None: no limit
        produced : tokens it has already brought, >= 0; with 0 this is the whole answer
        """
        require(produced >= 0, "produced", produced)
        if max_tokens is not None and max_tokens <= produced:
            return 0.0
        return self._rest(max_tokens, kind, produced)

    def quantile(self, q: float, max_tokens: int | None, kind: Kind = ANY, *, produced: int = 0) -> float:
        """Smallest x, tokens, such that no more than x are still to come with probability `q` (0 <= q < 1).

        Between two edges of the distribution x is interpolated, so it need not be whole.
        """
        require(0 <= q < 1, "q", q)
        require(produced >= 0, "produced", produced)
        table = mixture(self._parts(kind))
        share = tail_at(produced, [(1.0, table.reshape(-1))]).share if produced > 0 else 1.0
        target = (1.0 - q) * share
        # As in `_rest`, only the prior has an opinion where doubles end.
        longest = smallest_at(target, table) if target > 0.0 else produced - PRIOR_TOKENS * log(1.0 - q)
        left = longest - produced
        if max_tokens is not None:
            left = min(left, float(max_tokens - produced))
        return max(left, 0.0)

    def remaining(self, max_tokens: int | None, kind: Kind = ANY, *, produced: int = 0) -> Remaining:
        """What a running answer adds to its replica's sum of expected remaining tokens, and for how long.

        The owner of the sum adds `tokens`, replaces it by a new answer once `refresh_at` tokens were produced, and
        takes it off when the request ends; nothing is done per token. `tokens` is the mean rest at both ends of the
        stretch of those still running there, so holding it still biases the sum by little.
        """
        require(produced >= 0, "produced", produced)
        stretch = max(LEAST_REFRESH_TOKENS, produced // REFRESH_SHARE)
        if max_tokens is None:
            return Remaining(self._rest(None, kind, produced, produced + stretch), produced + stretch)
        if max_tokens <= produced:
            return Remaining(0.0, produced + stretch)
        refresh_at = min(produced + stretch, max_tokens)
        return Remaining(self._rest(max_tokens, kind, produced, refresh_at), refresh_at)

    def running_tokens(self, kind: Kind = ANY) -> float:
        """Expected rest of an answer that is met while it runs, its beginning unknown: decodes of others.

        More than half of the mean, since long answers are met more often: E[L^2] / (2 E[L]).
        """
        left = 1.0
        parts: list[tuple[float, Table, float]] = []
        for lengths in self._levels(kind):
            if lengths is not None:
                parts.append((left * lengths.trust, lengths.flat, lengths.area))
                left *= 1.0 - lengths.trust
        parts.append((left, _PRIOR_FLAT, _PRIOR_AREA))
        return mean_left_of_parts(parts)

    def _rest(self, max_tokens: int | None, kind: Kind, *produced: int) -> float:
        """Mean rest at one or more counts of tokens, each weighted by the share of answers that get there."""
        parts = self._parts(kind)
        share = excess = 0.0
        for tokens in produced:
            if tokens > 0:
                tail = tail_at(tokens, parts)
                share += tail.share
                excess += tail.excess_tokens
            else:
                share += 1.0  # an answer may be empty
                for weight, flat in parts:
                    excess += weight * flat.item(1)
        # Longer than doubles can tell: only the prior has an opinion, and it has no memory.
        rest = excess / share if share > 0.0 else PRIOR_TOKENS
        if max_tokens is None:
            return rest
        if share > 0.0:
            rest -= len(produced) * tail_at(max_tokens, parts).excess_tokens / share
        return min(max(rest, 0.0), max_tokens - produced[0])

    def _parts(self, kind: Kind) -> list[tuple[float, Table]]:
        """Belief about a kind: (weight, flat table) from the session to the prior; weights sum to one."""
        left = 1.0
        parts: list[tuple[float, Table]] = []
        for lengths in self._levels(kind):
            if lengths is not None:
                parts.append((left * lengths.trust, lengths.flat))
                left *= 1.0 - lengths.trust
        parts.append((left, _PRIOR_FLAT))
        return parts

    def _levels(self, kind: Kind) -> tuple[_Lengths | None, _Lengths | None, _Lengths | None]:
        """What is known of a kind, from the session to the model."""
        return (
            None if kind.session is None else self._sessions.get(kind.session),
            self._groups.get(kind.group),
            self._models.get(kind.model),
        )


class _Lengths:
    """What one kind has shown. trust : weight of its own answers against the more general belief, 0..1."""

    __slots__ = ("_area", "flat", "seen", "table", "trust")

    def __init__(self) -> None:
        self.table = _PRIOR.copy()
        self.flat = self.table.reshape(-1)  # the same memory
        self.seen = 0
        self.trust = 0.0
        self._area: float | None = None

    @property
    def area(self) -> float:
        """`length_tails.area` of the table, worked out once after each answer it learned from."""
        if self._area is None:
            self._area = area(self.flat)
        return self._area

    def learn(self, answer: Table, count: int, strength: float) -> None:
        """One more answer, of `count` that are looked back on."""
        self.seen += 1
        self.trust = count / (count + strength)
        self.table += (answer - self.table) / count
        if self.seen % 1024 == 0:
            drop_forgotten(self.table)
        self._area = None


class _Level:
    """Lengths of many kinds of one generality.

    memory : answers a kind looks back on; strength : answers of its own that weigh as much as the general belief
    """

    def __init__(self, size: int, *, memory: int, strength: float) -> None:
        require(size >= 1, "size", size)
        self._size = size
        self._memory = memory
        self._strength = strength
        self._kinds: OrderedDict[int, _Lengths] = OrderedDict()
        self.get = self._kinds.get

    def learn(self, key: int, answer: Table) -> None:
        lengths = self._kinds.get(key)
        if lengths is None:
            if len(self._kinds) >= self._size:
                self._kinds.popitem(last=False)
            lengths = self._kinds[key] = _Lengths()
        self._kinds.move_to_end(key)
        lengths.learn(answer, min(lengths.seen + 1, self._memory), self._strength)
