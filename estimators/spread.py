"""How far first tokens fall from their estimates: centre and width of log(observed / predicted), for each replica.

Model     logistic on the logarithmic scale: heavier tails than a normal, closed-form quantiles (mixture.py). Centre
          and log of the scale follow the likelihood's own gradient, natural steps of one over the samples so far,
          at least one over the memory; a sample's pull is bounded, so an absurd one moves little
          A replica is read as a mixture of its own and the fleet's, by its own samples; the fleet without samples as
          the prior. Both fade with time, so silence widens
          One whose load reports stopped, and that answers nothing either, is read wider by its silence: what runs there
          is replaced by requests nobody has told of, until it is known no better than one that was never seen
Valid     ratios of the outcome that happened (hit or miss), predicted before any correction from here
Blind to  what the width depends on beyond the replica (prompt length: conformal.py); asymmetry
Source    logistic scores: Johnson, Kotz, Balakrishnan 1995, ch. 23; natural gradient: Amari 1998
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import exp, inf, isfinite, log, pi, tanh
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.ranges import require
from estimators.stored import mapping, number
from estimators.view import FleetView, is_nobody

Column = npt.NDArray[np.float64]

WIDE_SCALE = 0.7  # of an uncalibrated replica: nine in ten within a factor of 8 either way
LEAST_SCALE = 0.01  # no engine repeats itself better than a few percent
LARGEST_SCALE = 3.0
PRIOR_SAMPLES = 10.0  # weight of the prior against the fleet's first samples
OWN_AFTER = 20.0  # own samples at which they count as much as the fleet's
FURTHEST = 6.0  # scales from the centre at which a sample's pull on the width stops growing
CENTRE_INFORMATION = 1.0 / 3.0  # Fisher information of a standard logistic, of its centre
SCALE_INFORMATION = (3.0 + pi * pi) / 9.0  # and of the log of its scale
STILL = 0.999  # a state faded by less is read as it is
TURNOVER_S = 30.0  # in which all but 1/e of the requests at a replica are others: some hundred tokens at 50 ms each


def widened(scale: Column, *, silent_s: Column, fresh_s: float) -> Column:
    """Scales of replicas that have told nothing for `silent_s`; columns of one shape.

    scale : as learned while reports came, > 0
    silent_s : NaN where there never was a report: what was learned is then as wide as it is without
    fresh_s : silence that means nothing, >= 0
    """
    beyond_s = np.fmax(silent_s - fresh_s, 0.0)
    return np.asarray(scale - (np.maximum(scale, WIDE_SCALE) - scale) * np.expm1(-beyond_s / TURNOVER_S))


class _Residuals:
    """Centre and log scale of one stream of log ratios."""

    __slots__ = ("centre", "heard_s", "log_scale", "samples")

    def __init__(self, centre: float, log_scale: float) -> None:
        self.centre = centre
        self.log_scale = log_scale
        self.samples = 0.0
        self.heard_s = -inf

    def learn(self, error: float, gain: float) -> None:
        scale = exp(self.log_scale)
        z = (error - self.centre) / scale
        z = max(-FURTHEST, min(FURTHEST, z))
        score = tanh(z / 2.0)
        self.centre += gain * scale * score / CENTRE_INFORMATION
        self.log_scale += gain * (z * score - 1.0) / SCALE_INFORMATION
        self.log_scale = max(log(LEAST_SCALE), min(log(LARGEST_SCALE), self.log_scale))

    def state(self, left: float) -> dict[str, float]:
        return {"centre": self.centre, "log_scale": self.log_scale, "samples": self.samples * left}

    def restore(self, state: object, now_s: float, left: float) -> None:
        values = mapping(state, "residuals")
        centre = number(values.get("centre"), "centre")
        log_scale = number(values.get("log_scale"), "log_scale", least=log(LEAST_SCALE), most=log(LARGEST_SCALE))
        samples = number(values.get("samples"), "samples", least=0.0)
        self.centre, self.log_scale, self.samples, self.heard_s = centre, log_scale, samples * left, now_s


class ResidualSpread:
    """Owns what was learned; columns have shape (rows,), in the order of `names`.

    names : of the replicas, in the order of the fleet view, all different
    uncalibrated : those whose card or model is unknown; read at `WIDE_SCALE` or wider until they have own samples
    prior_scale : before anything is known, within LEAST_SCALE..LARGEST_SCALE
    memory : samples looked back on, >= 1
    memory_s : seconds after which samples count 1/e, > 0
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        uncalibrated: Collection[str] = (),
        prior_scale: float = 0.5,
        memory: float = 200.0,
        memory_s: float = 3600.0,
    ) -> None:
        require(len(set(names)) == len(names), "names", names, "not all different")
        require(LEAST_SCALE <= prior_scale <= LARGEST_SCALE, "prior_scale", prior_scale)
        require(1.0 <= memory < inf, "memory", memory)
        require(0.0 < memory_s < inf, "memory_s", memory_s)
        self.names = tuple(names)
        self._memory = memory
        self._memory_s = memory_s
        self._prior_log_scale = log(prior_scale)
        self._least_log_scale = np.array([log(WIDE_SCALE) if name in uncalibrated else -inf for name in names])
        self._start_log_scale = np.maximum(self._least_log_scale, self._prior_log_scale)
        self._fleet = _Residuals(0.0, self._prior_log_scale)
        self._own: list[_Residuals | None] = [None] * len(names)
        # own centre, own log scale, own samples, when last heard
        self._columns = np.zeros((4, len(names)))
        self._columns[3] = -inf
        self._mix(0.0)

    def scale(self, now_s: float) -> Column:
        """Logistic scale of log(observed / predicted), > 0; lent, not to be written."""
        left = self._left(now_s)
        if left >= STILL:
            return self._scale
        faded = self._start_log_scale + left * (self._log_scale - self._start_log_scale)
        return np.asarray(np.exp(faded))

    def scale_at(self, view: FleetView, now_s: float) -> Column:
        """`scale`, widened where a replica of `view` has been silent; lent, not to be written."""
        scale = self.scale(now_s)
        if not now_s - view.oldest_report_s > view.fresh_s:  # nearly always; also where nobody tells anything
            return scale
        heard_s = np.maximum(view.sampled_at_s, self._columns[3])  # of load, or by a first token
        return widened(scale, silent_s=now_s - heard_s, fresh_s=view.fresh_s)

    def shift(self, now_s: float) -> Column:
        """Median of log(observed / predicted); lent, not to be written."""
        left = self._left(now_s)
        return self._shift if left >= STILL else np.asarray(left * self._shift)

    def observe(self, row: int, *, observed_s: float, predicted_s: float, now_s: float) -> None:
        """A first token came after `observed_s`; the outcome that happened was predicted at `predicted_s`; both > 0."""
        require(0 <= row < len(self.names), "row", row)
        require(0.0 < observed_s < inf, "observed_s", observed_s)
        require(0.0 < predicted_s < inf, "predicted_s", predicted_s)
        require(isfinite(now_s), "now_s", now_s)
        error = log(observed_s / predicted_s)
        own = self._own[row] or self._newcomer(row)
        self._own[row] = own
        for residuals in (own, self._fleet):
            residuals.samples *= self._faded(residuals.heard_s, now_s)
            residuals.heard_s = max(residuals.heard_s, now_s)
            residuals.learn(error, max(1.0 / self._memory, 1.0 / (PRIOR_SAMPLES + residuals.samples)))
            residuals.samples = min(residuals.samples + 1.0, self._memory)
        self._publish(row, own)
        self._mix(now_s)

    def forget(self, row: int) -> None:
        """The replica is another one now: it is read as the fleet until it has samples again."""
        self._own[row] = None
        self._columns[:, row] = (0.0, 0.0, 0.0, -inf)
        self._mix(self._fleet.heard_s if isfinite(self._fleet.heard_s) else 0.0)

    def renew(self, row: int, name: str, *, calibrated: bool) -> None:
        """`row` is that of another replica, called `name`; calibrated : its card is known"""
        self.name(row, name)
        self._least_log_scale[row] = -inf if calibrated else log(WIDE_SCALE)
        self._start_log_scale[row] = max(self._least_log_scale[row], self._prior_log_scale)
        self._own[row] = None
        self._columns[:, row] = (0.0, 0.0, 0.0, -inf)
        self._mix(self._mixed_s)

    def name(self, row: int, name: str) -> None:
        """`row` is called so from now on."""
        require(name not in self.names[:row] + self.names[row + 1 :], "name", name, "that of another row")
        self.names = (*self.names[:row], name, *self.names[row + 1 :])

    def state_of(self, row: int, now_s: float) -> dict[str, float]:
        """What was learned of one replica, as plain values, faded to `now_s`; empty when nothing was."""
        own = self._own[row]
        return {} if own is None else own.state(self._faded(own.heard_s, now_s))

    def restore_row(self, row: int, state: Mapping[str, Any], *, now_s: float, age_s: float) -> None:
        """Take over what `state_of` returned `age_s` (>= 0) ago. Raises ValueError for anything else, as `restore`."""
        require(0.0 <= age_s < inf, "age_s", age_s)
        if not state:
            return
        own = _Residuals(0.0, self._prior_log_scale)
        own.restore(state, now_s, exp(-age_s / self._memory_s))
        self._own[row] = own
        self._publish(row, own)
        self._mix(self._mixed_s)

    def state(self, now_s: float) -> dict[str, Any]:
        """What was learned, as plain values, faded to `now_s`; replicas go by name."""
        here = [(row, name) for row, name in enumerate(self.names) if not is_nobody(name)]
        replicas = {name: found for row, name in here if (found := self.state_of(row, now_s))}
        return {"replicas": replicas, "fleet": self._fleet.state(self._faded(self._fleet.heard_s, now_s))}

    def restore(self, state: Mapping[str, Any], *, now_s: float, age_s: float = 0.0) -> None:
        """Take over what `state` returned `age_s` (>= 0) ago; replicas it does not name stay as they are.

        Raises
        ------
        ValueError : it is nothing that `state` returned; then nothing has changed.
        """
        require(0.0 <= age_s < inf, "age_s", age_s)
        left = exp(-age_s / self._memory_s)
        fleet = _Residuals(0.0, self._prior_log_scale)
        fleet.restore(state.get("fleet"), now_s, left)
        restored = {}
        for name, stored in mapping(state.get("replicas"), "replicas").items():
            restored[name] = _Residuals(0.0, self._prior_log_scale)
            restored[name].restore(stored, now_s, left)
        self._fleet = fleet
        for row, name in enumerate(self.names):
            if name in restored:
                self._own[row] = restored[name]
                self._publish(row, restored[name])
        self._mix(now_s)

    def _newcomer(self, row: int) -> _Residuals:
        return _Residuals(float(self._shift[row]), float(self._log_scale[row]))

    def _faded(self, since_s: float, now_s: float) -> float:
        return exp(min(0.0, since_s - now_s) / self._memory_s)

    def _left(self, now_s: float) -> float:
        heard_s = self._fleet.heard_s
        return 1.0 if heard_s == -inf else self._faded(heard_s, now_s)

    def _publish(self, row: int, own: _Residuals) -> None:
        self._columns[:, row] = (own.centre, own.log_scale, own.samples, own.heard_s)

    def _mix(self, now_s: float) -> None:
        """Columns as they are read: own values with the fleet's, the fleet's with the prior."""
        self._mixed_s = now_s
        fleet = self._fleet
        pooled = fleet.samples / (fleet.samples + PRIOR_SAMPLES)
        log_scale = self._prior_log_scale + pooled * (fleet.log_scale - self._prior_log_scale)
        start = np.maximum(self._least_log_scale, log_scale)
        centre, own_log_scale, samples, heard_s = self._columns
        samples = samples * np.exp(np.minimum(heard_s - now_s, 0.0) / self._memory_s)
        share = samples / (samples + OWN_AFTER)
        self._shift = pooled * fleet.centre + share * (centre - pooled * fleet.centre)
        self._log_scale = start + share * (own_log_scale - start)
        self._scale: Column = np.exp(self._log_scale)
