"""When a request's turn on its replica came, told afterwards from the first tokens that came before its own.

Model     requests have their turn in order of arrival. One stands in line from its arrival to its first token, but for
          the time in which its fetch keeps it out of the line, which depends on the discipline:
          overlapped, layerwise   from the arrival until the state (its first layer) is there
          serial, in turn         from the turn until then
          others                  never
          The turn is the first moment at which no earlier request stands in line
Valid     requests and first tokens told in order of time; all requests of the replica pass the router
Blind to  an earlier request whose first token came later: it is taken to have been out of the line; the patience of
          the time-limited; prefills that share steps
Source    first-come service with requests that leave the line and come back to their place, as in vLLM's scheduler
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from estimators.discipline import Seen
from estimators.first_token import Discipline, Rest
from estimators.ranges import require

SAME_STEP_S = 1e-3  # first tokens closer than this came from one step
KEPT = 32  # requests; with more in line the oldest are forgotten, and turns behind them come out early


@dataclass(slots=True, eq=False)
class Standing:
    """One request on the replica. Durations from its arrival; zero where it has no fetch.

    fetch_s, fetch_in_turn_s : F if it starts on arrival, and F(Q) for the Q in in_turn_at_s
    first_token_s : absolute; inf until it is known
    turns_s : absolute, by discipline, once its first token is known; of a fetched request only
    """

    arrived_s: float
    rest: Rest
    fetch_s: float
    fetch_in_turn_s: float
    in_turn_at_s: float
    first_byte_s: float
    first_token_s: float = inf
    turns_s: dict[Discipline, float] = field(default_factory=dict)

    def away_s(self, discipline: Discipline, layers: int) -> tuple[float, float]:
        """From when to when its fetch keeps it out of the line, absolute."""
        if self.fetch_s == 0.0 or discipline not in _AWAY:
            return self.arrived_s, self.arrived_s
        from_s = self.turns_s[discipline] if discipline.in_turn else self.arrived_s
        fetch_s = self.fetch_in_turn_s if discipline.in_turn else self.fetch_s
        if discipline in _BY_LAYER:
            fetch_s = self.first_byte_s + (fetch_s - self.first_byte_s) / layers
        return from_s, from_s + fetch_s


_BY_LAYER = frozenset({Discipline.LAYERWISE, Discipline.LAYERWISE_IN_TURN})
_AWAY = frozenset({Discipline.OVERLAPPED, Discipline.SERIAL}) | _BY_LAYER


class Turns:
    """Requests of one replica, from their placing to their first tokens. layers : of the model, >= 1"""

    def __init__(self, *, layers: int) -> None:
        require(layers >= 1, "layers", layers)
        self._layers = layers
        self._standing: list[Standing] = []  # by arrival
        self._last = self._before_last = (-inf, 0.0)  # first tokens, each with the C of its request

    def placed(
        self,
        now_s: float,
        *,
        rest: Rest,
        fetch_s: float = 0.0,
        fetch_in_turn_s: float = 0.0,
        in_turn_at_s: float = 0.0,
        first_byte_s: float = 0.0,
    ) -> Standing:
        """A request was sent there; see `Standing`. End it with `first_token` or `gone`."""
        standing = Standing(now_s, rest, fetch_s, fetch_in_turn_s, in_turn_at_s, first_byte_s)
        self._standing.append(standing)
        del self._standing[:-KEPT]
        return standing

    def first_token(self, standing: Standing, now_s: float) -> Seen | None:
        """Its first token came: what `DisciplineLearner.observe` wants.

        None for a request without a fetch, and for one that was forgotten.
        """
        standing.first_token_s = now_s
        seen = self._seen(standing) if standing.fetch_s > 0.0 and standing in self._standing else None
        self._note_first_token(now_s, float(standing.rest.all_reused_s))
        self._forget()
        return seen

    def _note_first_token(self, now_s: float, work_s: float) -> None:
        if now_s > self._last[0] + SAME_STEP_S:
            self._before_last, self._last = self._last, (now_s, work_s)

    def gone(self, standing: Standing) -> None:
        """It ended; what had its first token stays as long as it can tell something about others."""
        if standing.first_token_s == inf and standing in self._standing:
            self._standing.remove(standing)

    def _seen(self, standing: Standing) -> Seen:
        arrived_s, first_s = standing.arrived_s, standing.first_token_s
        earlier = [
            other
            for other in self._standing
            if other is not standing and other.arrived_s <= arrived_s and other.first_token_s < first_s - SAME_STEP_S
        ]
        standing.turns_s = {one: self._turn_s(standing, earlier, one) for one in Discipline}
        beside = [
            one for one in self._standing if one is not standing and abs(one.first_token_s - first_s) <= SAME_STEP_S
        ]
        last_s, last_work_s = self._last if self._last[0] < first_s - SAME_STEP_S else self._before_last
        return Seen(
            queue_s={one: turn_s - arrived_s for one, turn_s in standing.turns_s.items()},
            fetch_s=standing.fetch_s,
            fetch_in_turn_s=standing.fetch_in_turn_s,
            in_turn_at_s=standing.in_turn_at_s,
            first_byte_s=standing.first_byte_s,
            rest=standing.rest,
            first_token_s=first_s - arrived_s,
            free_s=max(0.0, last_s - arrived_s),
            free_work_s=last_work_s,
            beside_s=sum(float(one.rest.all_reused_s) for one in beside),
            held_s=self._held_s(standing, last_s),
        )

    def _held_s(self, standing: Standing, last_s: float) -> float:
        """A blocking fetch holds up the step in which its turn comes, the last one of the prefill before it."""
        after = self._standing[self._standing.index(standing) + 1 :]
        own_s, first_s = standing.fetch_in_turn_s, standing.first_token_s
        held_s = 0.0 if standing.arrived_s + own_s <= last_s else own_s
        if after and after[0].arrived_s + after[0].fetch_in_turn_s <= first_s:
            held_s += after[0].fetch_in_turn_s
        return held_s

    def _turn_s(self, standing: Standing, earlier: Sequence[Standing], discipline: Discipline) -> float:
        """Goes to the end of whatever keeps it waiting until nothing does; at most to its first token."""
        spans = []
        for other in earlier:
            leaves_s, returns_s = other.away_s(discipline, self._layers)
            serves_s = other.first_token_s - float(other.rest.all_reused_s) if returns_s > leaves_s else returns_s
            spans += [
                (other.arrived_s, min(leaves_s, other.first_token_s)),
                (max(returns_s, serves_s), other.first_token_s),
            ]
        turn_s, before_s = standing.arrived_s, -inf
        while turn_s > before_s:
            before_s = turn_s
            turn_s = max((end_s for start_s, end_s in spans if start_s <= turn_s < end_s), default=turn_s)
        return min(turn_s, standing.first_token_s)

    def _forget(self) -> None:
        """Those whose first token came before anyone still standing arrived cannot be in anyone's way."""
        oldest_s = min((one.arrived_s for one in self._standing if one.first_token_s == inf), default=inf)
        self._standing = [one for one in self._standing if one.first_token_s > oldest_s]
