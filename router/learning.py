"""What outcomes teach: how fast replicas are, how long answers get, how much traffic there is, how estimates fail.

Model     prefill by `samples.py` and `estimators.calibration`; pace as a ratio to the ideal decode step; output
          lengths and characters per token; traffic for each model apart; what each replica does about a fetch by
          `estimators.discipline`; the rest in `outcomes.py`
Valid     answers that were complete; failed and cancelled requests teach no times
Blind to  what no answer reports
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.arrivals import Traffic
from estimators.calibration import PrefillCalibration, ScaleCalibration
from estimators.estimates import Estimates, Estimator, Surroundings
from estimators.hit_probability import Evidence
from estimators.output_length import Kind, OutputLength, kind_of
from estimators.prefill_features import Beside
from estimators.queueing import beside_one, decode_step_one_s
from estimators.request import RequestFacts
from estimators.stored import mapping
from estimators.tiers import Tier
from estimators.view import FleetView, is_nobody
from policies.base import Choice
from router.actions import Ended
from router.bookings import Booking
from router.fetch_habits import FetchHabits
from router.outcomes import Outcomes, parts_of
from router.prompts import CharactersPerToken
from router.samples import Computed, PrefillSamples

_LEVELS = tuple(Evidence)  # strongest first
_STRENGTH = {level: place for place, level in enumerate(_LEVELS)}

DEPARTED = 1024  # replicas that are gone, of which it is kept what was learned, should they come back
MODELS_APART = 64  # models whose traffic is learned apart
LONGEST_ANSWER_TOKENS = 1_000_000  # beyond what any model's context holds
CALIBRATED_SAMPLES = 20  # first tokens after which a replica's times are more observed than believed

# Context booked against KV memory in use: requests that share blocks need less than the sum of their contexts.
LEAST_OCCUPIED = 0.05  # of the capacity; with less booked the ratio is noise
LEAST_OCCUPANCY, LARGEST_OCCUPANCY = 0.1, 1.5
OCCUPANCY_GAIN = 0.1
FULL_MEMORY = 0.97  # of KV memory in use: prefills wait for room, and sequences are thrown out for each other


@dataclass(frozen=True, slots=True)
class PrefixCounters:
    """Totals of a replica's prefix cache since it started, tokens: asked for and found in HBM, and beyond it."""

    queries: float
    hits: float


class Learning:
    """Owns every running estimate of one router, and keeps the learned columns of the fleet view.

    spreads : how far each replica may be from its roofline, relative; see `PrefillCalibration`
    learn_disciplines : what replicas do about a fetch is learned; else it stays as configured
    """

    def __init__(
        self,
        view: FleetView,
        estimator: Estimator,
        characters_per_token: CharactersPerToken,
        spreads: list[float],
        *,
        learn_disciplines: bool = False,
    ) -> None:
        self._view = view
        self._estimator = estimator
        self._samples = PrefillSamples(
            view,
            work_s=self._work_s,
            beside=self._beside,
            step_tokens=estimator.step_tokens,
            on_sample=self._prefill_took,
            disturbed=self._disturbed,
        )
        self._prefill = [
            PrefillCalibration(row, spread=spread) for row, spread in zip(view.coefficients, spreads, strict=True)
        ]
        self._pace = [ScaleCalibration() for _ in range(view.rows)]
        self._traffic: dict[str, Traffic] = {}
        self._kind: tuple[RequestFacts, Kind] | None = None  # of the request asked about last
        self._kinds: dict[str, Kind] = {}  # of whole models
        self._output = OutputLength()
        self._characters_per_token = characters_per_token
        self._names_reuse: set[int] = set()  # rows whose usage has named reused tokens
        self._counters: list[PrefixCounters | None] = [None] * view.rows
        self._outcomes = None if estimator.doubt is None else Outcomes(estimator.doubt)
        self._fetches = FetchHabits(view, estimator, self._disturbed) if learn_disciplines else None
        self._departed: dict[str, tuple[dict[str, Any], float]] = {}  # what was learned of each, and when it was left

    def surroundings(self, request: RequestFacts, replicas: int, now_s: float) -> Surroundings:
        """What else goes on for this model. Per-replica rates would feed back, so all its `replicas` share one."""
        traffic = self._traffic_of(request)
        return Surroundings(
            arrival_rps=traffic.rate_rps(now_s) / max(replicas, 1),
            mean_compute_s=traffic.mean_compute_s,
            mean_context_tokens=traffic.mean_context_tokens,
            output_tokens=max(1.0, self._output.expected(request.max_tokens, self._kind_of(request))),
            others_output_tokens=max(1.0, self._output.running_tokens(self._kind_of_model(request))),
        )

    def remaining_tokens(self, request: RequestFacts) -> float:
        """Output a request like this has yet to produce when met at a random moment of its decode, expected."""
        running = self._output.running_tokens(self._kind_of(request))
        return running if request.max_tokens is None else min(running, float(request.max_tokens))

    def arrived(self, request: RequestFacts, now_s: float) -> None:
        """A generation arrived."""
        self._traffic_of(request).arrived(now_s)

    def placed(self, booking: Booking, choice: Choice, estimates: Estimates, now_s: float) -> None:
        """It was booked; to be told right after the ledger is."""
        if booking.request.generates:
            booking.kind = self._kind_of(booking.request)
            self._samples.placed(booking, now_s)
            if self._outcomes is not None and booking.request.streams:
                self._outcomes.placed(booking, now_s)
            if self._fetches is not None:
                self._fetches.placed(booking, choice, estimates, now_s)

    def first_token(self, booking: Booking, now_s: float) -> None:
        """Its first token came; to be told before the ledger is."""
        self._samples.first_token(booking, now_s)
        if booking.request.generates and booking.request.streams:
            if self._outcomes is not None:
                self._outcomes.first_token(booking, now_s)
            if self._fetches is not None:
                self._fetches.first_token(booking, now_s)

    def answered(self, booking: Booking, ended: Ended, now_s: float) -> None:
        """It was answered well and completely."""
        request = booking.request
        if not request.generates:
            return
        ended = self._with_reuse(booking.row, ended)
        if not request.prompt_exact and ended.prompt_tokens is not None:
            self._characters_per_token.observe(request.prompt_characters, ended.prompt_tokens)
        self._traffic_of(request).answered(booking.compute_s, request.prompt_tokens)
        self._samples.ended(booking, computed_by(booking, ended), now_s)
        if self._outcomes is not None and request.streams:
            self._outcomes.answered(booking, ended.cached_tokens, now_s)
        if self._fetches is not None and request.streams:
            self._fetches.answered(booking, ended.cached_tokens)
        tokens = produced_by(request, ended)
        if tokens:
            capped = request.max_tokens is not None and tokens >= request.max_tokens
            if request.sent_tokens is None:  # the length of a rest is no length of an answer
                self._output.observe(tokens, booking.kind or kind_of_request(request), ended=not capped)
            if request.streams:
                self._pace_was(booking, tokens, now_s)
            else:
                self._whole_answer_took(booking, tokens, now_s)

    def ended(self, booking: Booking, now_s: float) -> None:
        """It ended, whatever the way; what `answered` has not used teaches nothing."""
        self._samples.ended(booking, None, now_s)
        if self._outcomes is not None:
            self._outcomes.gone(booking)
        if self._fetches is not None:
            self._fetches.ended(booking)

    def restarted(self, row: int) -> None:
        """`row` came back with nothing of what it had."""
        if self._estimator.doubt is not None:
            self._estimator.doubt.hits.forget(row)

    def leaves(self, row: int, name: str, now_s: float) -> None:
        """The replica of `row`, called `name`, goes: what was learned of it is kept for when it comes back."""
        self._keep_departed(name, self._state_of(row, now_s), now_s)

    def joins(self, row: int, name: str, *, spread: float, calibrated: bool, now_s: float) -> None:
        """`row` is that of another replica, as the view says already: all is learned anew, or known from before.

        spread : as for all of them at the start; calibrated : its card is known
        """
        view, doubt = self._view, self._estimator.doubt
        self._samples.renew(row)
        self._prefill[row] = PrefillCalibration(view.coefficients[row], spread=spread)
        self._pace[row] = ScaleCalibration()
        self._names_reuse.discard(row)
        self._counters[row] = None
        if self._fetches is not None:
            self._fetches.renew(row)
        if doubt is not None:
            doubt.hits.renew(row, name)
            doubt.spread.renew(row, name, calibrated=calibrated)
        known = self._departed.pop(name, None)
        if known is not None:
            learned, left_s = known
            self._restore_row(row, learned, now_s=now_s, age_s=max(0.0, now_s - left_s))

    def renamed(self, row: int, name: str) -> None:
        """`row` is called so from now on."""
        doubt = self._estimator.doubt
        if doubt is not None:
            doubt.hits.name(row, name)
            doubt.spread.name(row, name)

    def counted(self, row: int, now: PrefixCounters, now_s: float) -> None:
        """`row` reported the totals of its prefix cache."""
        before, self._counters[row] = self._counters[row], now
        if self._estimator.doubt is None or before is None:
            return
        queries, hits = now.queries - before.queries, now.hits - before.hits
        if queries >= 0 and hits >= 0:  # else it started anew
            self._estimator.doubt.hits.counted(row, Tier.HBM, hit_tokens=hits, query_tokens=queries, now_s=now_s)

    def kv_used(self, row: int, share: float) -> None:
        """`row` reported that `share` (0..1) of its KV memory is in use: how much less than what is booked there.

        Decodes of others are taken to have the context of ours; to be told after them.
        """
        view = self._view
        decodes, context = view.decode_batch.item(row), view.decode_context_tokens.item(row)
        mean_tokens = context / decodes if decodes else 0.0
        foreign = view.foreign_decoding.item(row)
        booked = context + view.head_tokens.item(row)
        booked += foreign * mean_tokens if foreign > 0 else 0.0
        capacity = view.capacity_tokens.item(row)
        if booked > LEAST_OCCUPIED * capacity:  # NaN: unknown capacity
            ratio = min(max(share * capacity / booked, LEAST_OCCUPANCY), LARGEST_OCCUPANCY)
            view.occupancy[row] += OCCUPANCY_GAIN * (ratio - view.occupancy[row])

    def calibration_state(self, samples: int) -> str:
        """How far a replica's times may be trusted, after so many first tokens."""
        return calibration_state(samples)

    def evidence_of(self, booking: Booking, now_s: float) -> str | None:
        """What the hit probability of a booking rests on: its weakest tier; None where nothing is reused."""
        doubt = self._estimator.doubt
        if doubt is None:
            return None
        if booking.reused_tokens <= 0.0:
            return None
        weakest = -1
        for part in parts_of(booking):
            weakest = max(weakest, _STRENGTH[doubt.hits.evidence(booking.row, part.tier, now_s)])
        return _LEVELS[weakest].value if weakest >= 0 else None

    # State that survives a restart

    def state(self, now_s: float) -> dict[str, Any]:
        """All that was learned of the replicas, as plain values, by name."""
        doubt = self._estimator.doubt
        replicas = {name: self._replica_state(row) for row, name in enumerate(self._view.names) if not is_nobody(name)}
        learned: dict[str, Any] = {"replicas": replicas}
        if doubt is not None:
            learned["hits"] = doubt.hits.state(now_s)
            learned["spread"] = doubt.spread.state(now_s)
            learned["conformal"] = doubt.conformal.state()
        return learned

    def _state_of(self, row: int, now_s: float) -> dict[str, Any]:
        """All that was learned of one replica, as plain values."""
        doubt = self._estimator.doubt
        learned = {"replica": self._replica_state(row)}
        if doubt is not None:
            learned["hits"] = doubt.hits.state_of(row, now_s)
            learned["spread"] = doubt.spread.state_of(row, now_s)
        return learned

    def _replica_state(self, row: int) -> dict[str, Any]:
        return {
            "rates": self._rates(row),
            "prefill": self._prefill[row].state(),
            "pace": self._pace[row].state(),
            "fetches": None if self._fetches is None else self._fetches.state(row),
        }

    def restore(self, learned: Mapping[str, Any], *, now_s: float, age_s: float) -> list[str]:
        """Take over what `state` gave `age_s` ago, for replicas that are still there and still the same.

        Returns a sentence for every part that could not be used; nothing of such a part is taken over.
        """
        passed_over: list[str] = []
        known = learned.get("replicas", {})
        if not isinstance(known, dict):
            passed_over.append("part 'replicas' of the learned state is not used: it is no mapping")
            known = {}
        for row, name in enumerate(self._view.names):
            if name in known:
                try:
                    self._restore_replica(row, mapping(known[name], "replica"), age_s)
                except (ValueError, KeyError, TypeError) as exc:
                    passed_over.append(f"what was learned of replica {name!r} is not used: {exc}")
        doubt = self._estimator.doubt
        if doubt is None:
            return passed_over
        parts: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "hits": lambda state: doubt.hits.restore(state, now_s=now_s, age_s=age_s),
            "spread": lambda state: doubt.spread.restore(state, now_s=now_s, age_s=age_s),
            "conformal": lambda state: doubt.conformal.restore(state),
        }
        for part, restore in parts.items():
            if part in learned:
                try:
                    restore(mapping(learned[part], part))
                except ValueError as exc:
                    passed_over.append(f"part {part!r} of the learned state is not used: {exc}")
        return passed_over

    def _restore_replica(self, row: int, state: Mapping[str, Any], age_s: float) -> None:
        """Corrections are factors on a roofline, and say nothing about another one."""
        if not np.allclose(np.array(state["rates"], dtype=np.float64), self._rates(row), rtol=1e-6, atol=0.0):
            raise ValueError("it had another card, model or speed then")
        pace = ScaleCalibration()  # a new one, so that a bad prefill leaves the old one as it was
        pace.restore(mapping(state["pace"], "pace"), age_s=age_s)
        self._prefill[row].restore(mapping(state["prefill"], "prefill"), age_s=age_s)
        if self._fetches is not None and state.get("fetches") is not None:
            self._fetches.restore(row, mapping(state["fetches"], "fetches"))
        self._pace[row] = pace
        self._view.pace_scale[row] = pace.scale
        self._view.samples[row] = self._prefill[row].samples

    def _restore_row(self, row: int, learned: Mapping[str, Any], *, now_s: float, age_s: float) -> None:
        """Take over what `_state_of` gave; of another card, model or speed nothing is."""
        doubt = self._estimator.doubt
        try:
            self._restore_replica(row, learned["replica"], age_s)
        except ValueError:
            return
        if doubt is not None:
            doubt.hits.restore_row(row, learned["hits"], now_s=now_s, age_s=age_s)
            doubt.spread.restore_row(row, learned["spread"], now_s=now_s, age_s=age_s)

    def _keep_departed(self, name: str, learned: dict[str, Any], left_s: float) -> None:
        self._departed.pop(name, None)
        self._departed[name] = learned, left_s
        if len(self._departed) > DEPARTED:
            del self._departed[next(iter(self._departed))]

    def _rates(self, row: int) -> list[float]:
        view = self._view
        columns = (
            view.linear_s_per_token,
            view.attention_s_per_pair,
            view.head_s,
            view.weights_s,
            view.context_s_per_token,
        )
        return [float(column[row]) for column in columns]

    # Inside

    def _work_s(self, row: int, new_tokens: float, cached_tokens: float) -> tuple[float, float]:
        return self._estimator.work_s(row, new_tokens, cached_tokens, self._view)

    def _beside(self, row: int) -> Beside:
        """What each step of `row` holds besides a prefill, now; foreign decodes are of unknown context."""
        return beside_one(self._view, row, 0.0)

    def _disturbed(self, row: int) -> bool:
        """Whether something else may hold up our prefills: those of others, or full memory. Unknown is taken for no."""
        view = self._view
        return bool(view.foreign_waiting[row] > 0 or view.kv_used_share[row] > FULL_MEMORY)

    def _prefill_took(self, row: int, features: npt.NDArray[np.float64], took_s: float, blur_s: float) -> None:
        self._prefill[row].observe(features, observed_s=took_s, blur_s=blur_s)
        self._view.samples[row] = self._prefill[row].samples

    def _pace_was(self, booking: Booking, tokens: int, now_s: float) -> None:
        row, view = booking.row, self._view
        took_s = now_s - booking.first_token_at_s
        if tokens < 2 or not took_s > 0:  # NaN: nobody saw its first token
            return
        ideal_s = decode_step_one_s(view, row, self._beside(row))
        view.pace_scale[row] = self._pace[row].observe(float(took_s / (tokens - 1) / ideal_s))

    def _whole_answer_took(self, booking: Booking, tokens: int, now_s: float) -> None:
        """Without a stream only the end is seen; it moves prefill and pace a little, each by its part in the time."""
        row, view = booking.row, self._view
        step_s = decode_step_one_s(view, row, self._beside(row))
        decode_s = float(view.pace_scale[row] * step_s) * (tokens - 1)
        expected_s = booking.forecast.first_token_s + decode_s
        took_s = now_s - booking.placed_at_s
        if not (took_s > 0 and expected_s > 0):
            return
        ratio = took_s / expected_s
        self._prefill[row].nudge(ratio, weight=min(1.0, booking.compute_s / expected_s))
        view.pace_scale[row] = self._pace[row].nudge(ratio, weight=min(1.0, decode_s / expected_s))

    def _with_reuse(self, row: int, ended: Ended) -> Ended:
        """Some engines leave the reuse out of their usage when it is zero: one that has named it before means that."""
        if ended.cached_tokens is not None:
            self._names_reuse.add(row)
        elif row in self._names_reuse and ended.prompt_tokens is not None:
            return replace(ended, cached_tokens=0)
        return ended

    def _traffic_of(self, request: RequestFacts) -> Traffic:
        """Traffic of the request's base model, whose replicas its aliases and adapters share.

        Beyond a number of names, which clients could choose freely, they share one.
        """
        model = request.base_model or request.model
        traffic = self._traffic.get(model)
        if traffic is None:
            if len(self._traffic) >= MODELS_APART:
                model = ""
            traffic = self._traffic.setdefault(model, Traffic())
        return traffic

    def _kind_of_model(self, request: RequestFacts) -> Kind:
        """All answers of the request's model: what those that run already are like."""
        model = request.base_model or request.model
        kind = self._kinds.get(model)
        if kind is None:
            kind = kind_of(model=model)
            if len(self._kinds) < MODELS_APART:
                self._kinds[model] = kind
        return kind

    def _kind_of(self, request: RequestFacts) -> Kind:
        """`kind_of_request`, worked out once for the questions of one decision."""
        if self._kind is None or self._kind[0] is not request:
            self._kind = request, kind_of_request(request)
        return self._kind[1]


def calibration_state(samples: int) -> str:
    """How far a replica's times may be trusted, after so many first tokens."""
    return "calibrated" if samples >= CALIBRATED_SAMPLES else "uncalibrated"


def kind_of_request(request: RequestFacts) -> Kind:
    """The group whose answers a request's output length is learned with."""
    return kind_of(
        model=request.base_model or request.model,
        route=request.path,
        prompt_tokens=request.prompt_tokens,
        session=request.session,
    )


def produced_by(request: RequestFacts, ended: Ended) -> int | None:
    """Output tokens of an answer: as reported, else about one for each event; None where that cannot be.

    No answer is longer than the client's limit or than any context, whatever an engine says.
    """
    tokens = ended.output_tokens if ended.output_tokens is not None else ended.events
    most = LONGEST_ANSWER_TOKENS if request.max_tokens is None else request.max_tokens
    return tokens if 0 < tokens <= most else None


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
