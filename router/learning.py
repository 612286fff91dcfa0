"""What outcomes teach: how fast replicas are, how long answers get, how much traffic there is.

Model     prefill by `samples.py` and `estimators.calibration`; pace as a ratio to the ideal decode step; output
          length and characters per token as running means; traffic for each model apart
Valid     answers that were complete; failed and cancelled requests teach nothing
Blind to  what no answer reports
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estimators.arrivals import Traffic
from estimators.calibration import PrefillCalibration, ScaleCalibration
from estimators.estimates import Estimator, Surroundings
from estimators.output_length import OutputLength
from estimators.request import RequestFacts
from estimators.view import FleetView
from router.actions import Ended
from router.bookings import Booking
from router.prompts import CharactersPerToken
from router.samples import Computed, PrefillSamples

MODELS_APART = 64  # models whose traffic is learned apart


class Learning:
    """Owns every running estimate of one router, and keeps the learned columns of the fleet view.

    spread : how far a replica may be from its roofline, relative; see `PrefillCalibration`
    """

    def __init__(
        self, view: FleetView, estimator: Estimator, characters_per_token: CharactersPerToken, spread: float
    ) -> None:
        self._view = view
        self._samples = PrefillSamples(view, estimator, self._prefill_took)
        self._prefill = [PrefillCalibration(row, spread=spread) for row in view.coefficients]
        self._pace = [ScaleCalibration() for _ in range(view.rows)]
        self._traffic: dict[str, Traffic] = {}
        self._output = OutputLength()
        self._characters_per_token = characters_per_token

    def surroundings(self, request: RequestFacts, replicas: int, now_s: float) -> Surroundings:
        """What else goes on for this model. Per-replica rates would feed back, so all its `replicas` share one."""
        traffic = self._traffic_of(request)
        return Surroundings(
            arrival_rps=traffic.rate_rps(now_s) / max(replicas, 1),
            mean_compute_s=traffic.mean_compute_s,
            mean_context_tokens=traffic.mean_context_tokens,
            output_tokens=max(1.0, self._output.expected(request.max_tokens)),
            others_output_tokens=self._output.mean_tokens,
        )

    def arrived(self, request: RequestFacts, now_s: float) -> None:
        """A generation arrived."""
        self._traffic_of(request).arrived(now_s)

    def first_token(self, booking: Booking, now_s: float) -> None:
        """Its first token came; to be told before the ledger is."""
        self._samples.first_token(booking, now_s)

    def answered(self, booking: Booking, ended: Ended, now_s: float) -> None:
        """It was answered well and completely."""
        request = booking.request
        if not request.generates:
            return
        if not request.prompt_exact and ended.prompt_tokens is not None:
            self._characters_per_token.observe(request.prompt_characters, ended.prompt_tokens)
        self._traffic_of(request).answered(booking.compute_s, request.prompt_tokens)
        self._samples.ended(booking, computed_by(booking, ended), now_s)
        tokens = ended.output_tokens if ended.output_tokens is not None else ended.events
        if tokens:
            self._output.observe(tokens)
            self._pace_was(booking, tokens, now_s)

    def ended(self, booking: Booking, now_s: float) -> None:
        """It ended, whatever the way; what `answered` has not used teaches nothing."""
        self._samples.ended(booking, None, now_s)

    def _prefill_took(self, row: int, features: npt.NDArray[np.float64], shared_s: float, took_s: float) -> None:
        self._prefill[row].observe(features, extra_s=shared_s, observed_s=took_s)

    def _pace_was(self, booking: Booking, tokens: int, now_s: float) -> None:
        row, view = booking.row, self._view
        took_s = now_s - booking.first_token_at_s
        if tokens < 2 or not took_s > 0:  # NaN: nobody saw its first token
            return
        ideal_s = view.weights_s[row] + view.decode_context_tokens[row] * view.context_s_per_token[row]
        view.pace_scale[row] = self._pace[row].observe(float(took_s / (tokens - 1) / ideal_s))

    def _traffic_of(self, request: RequestFacts) -> Traffic:
        """Traffic of the request's base model, whose replicas its aliases and adapters share.

        Beyond a number of names, which clients could choose freely, they share one.
        """
        model = request.base_model or request.model
        if model not in self._traffic and len(self._traffic) >= MODELS_APART:
            model = ""
        return self._traffic.setdefault(model, Traffic())


def computed_by(booking: Booking, ended: Ended) -> Computed | None:
    """What the engine computed for a prompt. Its own word counts; without it, an exact prompt's expected reuse does."""
    request = booking.request
    prompt = float(request.prompt_tokens) if request.prompt_exact else ended.prompt_tokens
    reused = ended.cached_tokens
    if reused is None and request.prompt_exact:
        reused = int(booking.reused_tokens)
    if prompt is None or reused is None:
        return None
    return Computed(new_tokens=max(1.0, prompt - reused), reused_tokens=max(0.0, min(reused, prompt - 1)))
