"""What one replica does about a fetch, learned from first tokens.

Model     every discipline (the time-limited once for each limit tried) predicts the first token of each fetched
          request. The residual, as a share of what the request takes by itself (F + C), is Student's t with 2 degrees
          of freedom. Its location and scale are not known: a grid of both, alike at first, each pair carrying its own
          likelihood. Older fetches count less and less. A discipline's evidence is its mean likelihood over locations,
          scales and limits. Q is common to all and not part of the measure: a long queue drowns no difference
Valid     Q, F and C as the router believes them, C wrong by some 15 % or less for good
Blind to  a discipline that changes from request to request. Serial and blocking are the same for a request alone; they
          differ in the Q of those behind, so Q must be given for each discipline, see `turns.py`. Layer by layer from
          the arrival and in turn are hard to tell apart where a step of the engine takes as long as a fetch
Source    Bayes' rule on a grid; Lange, Little, Taylor 1989 for the t distribution as a robust one. The constants are
          choices: with 1 or 4 degrees of freedom the simulated engines are told apart as well
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log, nan

import numpy as np
import numpy.typing as npt

from estimators.first_token import Discipline, Rest, Seconds, Times, service
from estimators.ranges import require

FREEDOM = 2.0  # of the t distribution: an answer five scales off moves the evidence little
LOCATIONS = (-0.1, -0.05, 0.0, 0.05, 0.1)  # of the residual: an F or C that is off for good
SCALES = np.geomspace(0.01, 1.0, 12)  # of the residual: 1 % is a replica without chance, 1 knows nothing
_LOCATION, _SCALE = (grid.ravel() for grid in np.meshgrid(LOCATIONS, SCALES))
AT_ONCE = 32  # fetches are counted together: one at a time costs ten times as much
ALIKE_LOG = log(20.0)  # evidence not 20 times stronger does not tell two disciplines apart

# Their prefill is one piece, so what the GPU did before was over when it started. In the others some of what came
# before may have run while layers or the tail were awaited.
_IN_ONE_PIECE = frozenset(set(Discipline) - {Discipline.LAYERWISE, Discipline.LAYERWISE_IN_TURN, Discipline.TWO_ENDS})


@dataclass(frozen=True, slots=True)
class Seen:
    """One fetched request whose first token came. Seconds from its arrival at the replica, all >= 0.

    queue_s : Q; one for all, or what it was if the replica does this
    fetch_s, fetch_in_turn_s : F if it starts on arrival, > 0, and F(Q) for the Q in in_turn_at_s
    first_byte_s : the part of both before the first byte
    rest : C(x), with `none_reused_s`
    first_token_s : when it came, > 0
    in_turn_at_s : before it F is a straight line from the arrival to there, after it constant; 0: constant
    free_s : when the last prefill before its own ended there; 0 when not known
    free_work_s : C of that prefill; 0 when not known
    beside_s : C of others whose first token came in the same step
    held_s : if the replica blocks, how long fetches, its own or of others, held the GPU since free_s; None: F(Q)
    """

    queue_s: float | Mapping[Discipline, float]
    fetch_s: float
    fetch_in_turn_s: float
    first_byte_s: float
    rest: Rest
    first_token_s: float
    in_turn_at_s: float = 0.0
    free_s: float = 0.0
    free_work_s: float = 0.0
    beside_s: float = 0.0
    held_s: float | None = None

    @property
    def own_s(self) -> float:
        """What it takes by itself, the measure of errors: its fetch and its prefill."""
        return self.fetch_in_turn_s + float(self.rest.all_reused_s)

    def check(self) -> None:
        """Raise `ValueError` when a time is negative, infinite or NaN, or none_reused_s is not given."""
        for name in ("fetch_s", "fetch_in_turn_s", "first_token_s"):
            require(0 < getattr(self, name) < inf, name, getattr(self, name))
        for name in ("first_byte_s", "in_turn_at_s", "free_s", "free_work_s", "beside_s"):
            require(0 <= getattr(self, name) < inf, name, getattr(self, name))
        queues_s = self.queue_s.values() if isinstance(self.queue_s, Mapping) else (self.queue_s,)
        require(all(0 <= queue_s < inf for queue_s in queues_s), "queue_s", self.queue_s)
        require(self.held_s is None or 0 <= self.held_s < inf, "held_s", self.held_s)
        all_s, spared_s = float(self.rest.all_reused_s), float(self.rest.spared_s)
        require(0 <= all_s < inf and 0 <= spared_s < inf, "rest", self.rest)

    def fetch_under_s(self, discipline: Discipline) -> float:
        """F(Q) if the replica does `discipline` and fetches in turn, else F(0)."""
        if discipline is Discipline.BLOCKING and self.held_s is not None:
            return self.held_s
        if not discipline.in_turn:
            return self.fetch_s
        share = min(1.0, self.queue_under_s(discipline) / self.in_turn_at_s) if self.in_turn_at_s > 0.0 else 1.0
        return self.fetch_s + share * (self.fetch_in_turn_s - self.fetch_s)

    def queue_under_s(self, discipline: Discipline) -> float:
        """Q if the replica does `discipline`."""
        return self.queue_s[discipline] if isinstance(self.queue_s, Mapping) else self.queue_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """discipline : the most likely; None when nothing was seen
    limit_s : of the time-limited, the likeliest of those tried; else NaN
    probability : of it and those alike together, 0..1
    alike : it and all that what was seen does not tell from it; they may be the same or may need more fetches
    fetches : that count, those forgotten left out, >= 0
    """

    discipline: Discipline | None
    limit_s: float
    probability: float
    alike: frozenset[Discipline]
    fetches: float


class DisciplineLearner:
    """Evidence about one replica.

    Parameters
    ----------
    layers : of the model, >= 1
    limits_s : patience at the turn to try for the time-limited, each > 0, at least one
    memory : fetches after which one counts 1/e, > 1
    candidates : disciplines to tell apart, at least one
    """

    def __init__(
        self,
        *,
        layers: int,
        limits_s: Sequence[float] = (0.05, 0.1, 0.2, 0.5, 1.0),
        memory: float = 300.0,
        candidates: Sequence[Discipline] = tuple(Discipline),
    ) -> None:
        require(layers >= 1, "layers", layers)
        require(len(limits_s) > 0 and all(0 < limit < inf for limit in limits_s), "limits_s", limits_s)
        require(1 < memory < inf, "memory", memory)
        require(len(candidates) > 0, "candidates", candidates, "empty")
        self._layers = layers
        self._limits_s = np.array(limits_s, dtype=np.float64)
        self._keep = exp(-1.0 / memory)
        self._candidates = tuple(candidates)
        # Hypotheses in order: one for each candidate, but for the time-limited one for each limit.
        self._owner = np.array(
            [number for number, one in enumerate(candidates) for _ in range(self._tries(one))], dtype=np.intp
        )
        self._log = np.zeros((len(self._owner), len(_SCALE)))
        self._fetches = 0.0
        self._pending: list[Seen] = []

    def observe(self, seen: Seen) -> None:
        """Count one fetched request. The work is done for many at once, at the latest by the next `verdict`.

        Raises
        ------
        ValueError : a time is negative, infinite or NaN, or C of a part is not known; it is not counted then.
        """
        seen.check()
        self._pending.append(seen)
        if len(self._pending) == AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Add what is pending to the evidence, each fetch as much older as others came after it."""
        seens, self._pending = self._pending, []
        if not seens:
            return
        own_s = np.array([seen.own_s for seen in seens])
        first_s = np.array([seen.first_token_s for seen in seens])
        residuals = (first_s - self.expected_s(seens)) / own_s
        squares = ((residuals[..., np.newaxis] - _LOCATION) / _SCALE) ** 2
        logs = -0.5 * (FREEDOM + 1.0) * np.log1p(squares / FREEDOM) - np.log(_SCALE)
        weights = self._keep ** np.arange(len(seens) - 1, -1, -1)
        aged = self._keep ** len(seens)
        self._log = self._log * aged + np.einsum("hng,n->hg", logs, weights)
        self._fetches = self._fetches * aged + float(weights.sum())

    def expected_s(self, seens: Sequence[Seen]) -> Times:
        """T_first under every hypothesis, shape (hypotheses, requests)."""
        together = _together(seens)
        free_s = np.array([seen.free_s for seen in seens])
        before_s = free_s - np.array([seen.free_work_s for seen in seens])
        beside_s = np.array([seen.beside_s for seen in seens])
        parts: list[Times] = []
        for discipline in self._candidates:
            fetch_s = np.array([seen.fetch_under_s(discipline) for seen in seens])
            served = service(
                discipline,
                queue_s=np.array([seen.queue_under_s(discipline) for seen in seens]),
                fetch_s=np.broadcast_to(fetch_s, (self._tries(discipline), len(seens))),
                first_byte_s=np.array([seen.first_byte_s for seen in seens]),
                rest=together,
                layers=self._layers,
                limit_s=self._limits_s[:, np.newaxis] if discipline is Discipline.TIME_LIMITED else 0.0,
            )
            behind = (discipline in _IN_ONE_PIECE) | (before_s <= served.held_from_s)
            after_s = free_s + np.where(behind, served.work_s, 0.0)
            parts.append(np.maximum(served.first_token_s, after_s) + beside_s)
        return np.concatenate(parts)

    def verdict(self) -> Verdict:
        """What the fetches so far say."""
        self._count()
        if self._fetches == 0.0:
            return Verdict(None, nan, 1.0, frozenset(self._candidates), 0.0)
        over_scales = _log_mean(self._log)
        evidence = np.array([_log_mean(over_scales[self._owner == n]) for n in range(len(self._candidates))])
        best = int(np.argmax(evidence))
        close = evidence > evidence[best] - ALIKE_LOG
        share = np.exp(evidence - evidence[best])
        named = self._candidates[best]
        tried = over_scales[self._owner == best]
        return Verdict(
            discipline=named,
            limit_s=float(self._limits_s[np.argmax(tried)]) if named is Discipline.TIME_LIMITED else nan,
            probability=float(share[close].sum() / share.sum()),
            alike=frozenset(one for one, near in zip(self._candidates, close.tolist(), strict=True) if near),
            fetches=self._fetches,
        )

    def state(self) -> dict[str, object]:
        """Plain values for `restore`."""
        self._count()
        return {
            "candidates": [discipline.value for discipline in self._candidates],
            "limits_s": self._limits_s.tolist(),
            "log": self._log.tolist(),
            "fetches": self._fetches,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from what `state` gave out. Raises `ValueError` when it tried other hypotheses or is damaged."""
        same = (
            state.get("candidates") == self.state()["candidates"] and state.get("limits_s") == self._limits_s.tolist()
        )
        require(same, "state", state, "of other candidates or limits")
        evidence, fetches = np.asarray(state.get("log"), dtype=np.float64), state.get("fetches")
        require(evidence.shape == self._log.shape and bool(np.isfinite(evidence).all()), "log", state.get("log"))
        if not isinstance(fetches, (int, float)) or not isfinite(fetches) or fetches < 0:
            raise ValueError(f"fetches = {fetches!r} is out of range")
        self._log, self._fetches, self._pending = evidence, float(fetches), []

    def _tries(self, discipline: Discipline) -> int:
        return len(self._limits_s) if discipline is Discipline.TIME_LIMITED else 1


def _together(seens: Sequence[Seen]) -> Rest:
    """C(x) of all of them, as arrays."""
    none_s = [_known(seen.rest.none_reused_s) for seen in seens]
    return Rest(
        np.array([float(seen.rest.all_reused_s) for seen in seens]),
        np.array(none_s),
        np.array([float(seen.rest.bend_s) for seen in seens]),
        np.array([float(seen.rest.step_share) for seen in seens]),
    )


def _known(value_s: Seconds | None) -> float:
    assert value_s is not None, "checked when it was observed"
    return float(value_s)


def _log_mean(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Log of the mean of what `logs` are logs of, along the last axis."""
    most = logs.max(axis=-1)
    return np.asarray(most + np.log(np.exp(logs - most[..., np.newaxis]).mean(axis=-1)))
