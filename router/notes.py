"""What a receipt says of one decision: every candidate that was possible, as numbers, written down when it is wanted.

Model     a decision keeps its estimates, which nobody changes afterwards, and copies of what of the fleet view and the
          directory moves on. Candidates are made of them when the request has ended, in any thread: they cost more
          than the estimates themselves, and neither a request that waits for its choice nor the loop should wait for
          them. Regret is the first token less what was expected of the best other candidate, the usual error of that
          replica's estimates allowed for
Valid     estimates whose arrays are their own (`Estimator.estimate` lends `age_s`, which is copied, and `pace_scale`
          and `weights_s`, which are not read here)
Blind to  evidence that came while the request ran: what a hit probability rests on is told as of when it is written
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan

import numpy as np
import numpy.typing as npt

from estimators.estimates import LEVELS, Estimates
from estimators.hit_probability import TIER_ROW, Evidence
from estimators.mixture import spread_quantile_s
from estimators.paths import COLUMN, PATHS, Path
from estimators.routes import Held
from estimators.tiers import Tier
from estimators.view import FleetView
from policies.base import Choice
from policies.objectives.price import is_none_free
from router.bookings import Booking
from router.learning import Learning, calibration_state
from router.receipts import Candidate, Receipt

_LOCAL, _RECOMPUTE = COLUMN[Path.LOCAL], COLUMN[Path.RECOMPUTE]
_BEYOND = {Path.REMOTE: Tier.REMOTE, Path.PEER: Tier.HBM, Path.HOST: Tier.HOST, Path.DISK: Tier.DISK}

_LEVELS = tuple(Evidence)  # strongest first

Places = npt.NDArray[np.int64]  # columns and rows of candidates, (2, n)


class Notes:
    """One decision, made at `now_s` by what is `held`. The fleet view and what is held are not kept."""

    __slots__ = (
        "_age_s",
        "_blocks_age_s",
        "_choice",
        "_disciplines",
        "_estimates",
        "_guessed",
        "_names",
        "_now_s",
        "_samples",
        "_store_guessed",
        "chosen",
    )

    def __init__(self, estimates: Estimates, choice: Choice, held: Held, view: FleetView, now_s: float) -> None:
        self._estimates = estimates
        self._choice = choice
        self._guessed = held.approximate
        self._store_guessed = held.store_approximate
        self._blocks_age_s = None if held.age_s is None else held.age_s.copy()
        self._names = view.names
        self._now_s = now_s
        self._age_s = now_s - view.sampled_at_s
        self._samples = view.samples.copy()
        self._disciplines = view.disciplines.copy()
        self.chosen = self._chosen()

    def candidates(self) -> tuple[list[Candidate], int | None]:
        """All that were possible, and the place of the chosen one among them; None where it was not possible."""
        return self._written(np.stack(np.nonzero(self._estimates.possible)))

    def complete(self, receipt: Receipt, *, best: int | None) -> None:
        """Name the candidates in a receipt that ended, and what it regrets.

        best : how many are named beside the chosen one, the ones with the soonest first tokens; None: all that were
            possible, with quantiles and evidence. Reads nothing that changes, so any thread may ask for it
        """
        places = np.stack(np.nonzero(self._estimates.possible))
        others = places[:, ~self._is_choice(places)]
        expected_s = self._usual_s(others)
        waited_s = receipt.waited_s
        if waited_s is not None and len(expected_s):
            receipt.regret_s = waited_s - float(expected_s.min())
        receipt.possible = places.shape[1]
        if best is not None and others.shape[1] > best:
            nearest = others[:, np.argsort(expected_s, kind="stable")[:best]]
            places = np.concatenate((places[:, self._is_choice(places)], nearest), axis=1)
        receipt.candidates, receipt.chosen = self._written(places)
        if receipt.chosen is None:  # a rule took what was not possible; it is named all the same
            receipt.candidates, receipt.chosen = [self.chosen, *receipt.candidates], 0
            receipt.possible += 1
        if best is None:
            self._detail(receipt.candidates, places)

    def regret_s(self, waited_s: float) -> float | None:
        """What `complete` says of regret, its first token `waited_s` from the choice; None: no other was possible."""
        places = np.stack(np.nonzero(self._estimates.possible))
        expected_s = self._usual_s(places[:, ~self._is_choice(places)])
        return waited_s - float(expected_s.min()) if len(expected_s) else None

    def _is_choice(self, places: Places) -> npt.NDArray[np.bool_]:
        return np.asarray((places[0] == COLUMN[self._choice.path]) & (places[1] == self._choice.row))

    def _usual_s(self, places: Places) -> npt.NDArray[np.float64]:
        """First tokens expected, with what observed ones usually are off there."""
        shift = np.broadcast_to(self._estimates.shift, len(self._names))[places[1]]
        return np.asarray(self._estimates.expected_s[places[0], places[1]] * np.exp(shift))

    def _detail(self, candidates: Iterable[Candidate], places: Places) -> None:
        """What is worked out for the chosen candidate at once, for all others too."""
        quantiles_s = self._quantiles_s(places)
        others = [one for one in candidates if one is not self.chosen]
        for one, column, row, p90_s, p99_s in zip(
            others, *places[:, ~self._is_choice(places)].tolist(), *quantiles_s.tolist(), strict=True
        ):
            path = PATHS[column]
            one.first_token_p90_s, one.first_token_p99_s = p90_s, p99_s
            one.evidence = self._evidence(one, path, row)
            one.discipline = self._disciplines[row].value if one.fetched_tokens else None

    def _quantiles_s(self, places: Places) -> npt.NDArray[np.float64]:
        """Of all but the chosen one, (levels, n), corrected as those of the chosen one were."""
        estimates = self._estimates
        chosen = self._is_choice(places)
        columns, rows = places
        hit, stored = estimates.hit_probability[columns, rows], estimates.stored_probability[columns, rows]
        probability = np.stack((hit, stored, 1.0 - hit - stored))
        times_s = (
            estimates.first_token_s[columns, rows],
            estimates.stored_s[rows],
            estimates.first_token_s[_RECOMPUTE, rows],
        )
        scale = np.broadcast_to(estimates.scale, len(self._names))[rows]
        shift = np.broadcast_to(estimates.shift, len(self._names))[rows]
        raw = np.stack([spread_quantile_s(probability, np.stack(times_s), q, scale=scale, shift=shift) for q in LEVELS])
        issued = np.array([self.chosen.first_token_p90_s or np.nan, self.chosen.first_token_p99_s or np.nan])
        if chosen.any():  # the same prompt, so the same correction
            factor = issued / raw[:, chosen][:, 0]
            raw *= np.where(np.isnan(factor), 1.0, factor)[:, None]
        return np.asarray(np.maximum.accumulate(raw, axis=0)[:, ~chosen])

    def _evidence(self, one: Candidate, path: Path, row: int) -> str | None:
        """What its hit probability rests on: the weakest of the tiers it reads."""
        doubt = self._estimates.doubt
        if doubt is None:
            return None
        levels = [doubt.hits.evidence(row, tier, self._now_s) for tier in self._tiers(one, path)]
        return max(levels, key=_LEVELS.index).value if levels else None

    def _tiers(self, one: Candidate, path: Path) -> list[Tier]:
        """What it reads there. A peer's HBM is not this replica's, and nothing is known of it here."""
        tiers = [Tier.HBM] if one.local_tokens else []
        if one.fetched_tokens and path is not Path.PEER:
            tiers.append(_BEYOND[path])
        return tiers

    def _blocks_age(self, one: Candidate, path: Path, row: int) -> float | None:
        """The oldest word of the blocks it reuses, seconds; None where it reuses nothing or that is not known."""
        ages_s = self._blocks_age_s
        if ages_s is None:
            return None
        known = [ages_s[TIER_ROW[tier], row].item() for tier in self._tiers(one, path)]
        return max((age_s for age_s in known if not isnan(age_s)), default=None)

    def _chosen(self) -> Candidate:
        """The chosen candidate; what only it has is left to the caller."""
        row, path = self._choice.row, self._choice.path
        one = self._estimates.one(path, row)
        local = 0 if path is Path.RECOMPUTE else int(one.local_tokens)
        fetched = int(one.reused_tokens) - local
        age_s = self._age_s.item(row)
        return Candidate(
            replica=self._names[row],
            path=path.value,
            queue_s=one.queue_s,
            fetch_s=one.fetch_s,
            compute_s=one.compute_s,
            first_token_s=one.first_token_s,
            expected_s=one.expected_s,
            hit_probability=one.hit_probability,
            local_tokens=local,
            fetched_tokens=fetched,
            pace_s=one.pace_s,
            queue_price_s=one.queue_price_s,
            decode_price_s=one.decode_price_s,
            signal_age_s=None if isnan(age_s) else age_s,
            calibration=calibration_state(self._samples.item(row)),
            approximate=self._is_guess(row, path, local, fetched),
            ready_s=one.ready_s,
        )

    def _is_guess(self, row: int, path: Path, local: int, fetched: int) -> bool:
        """Whether some of what this candidate reuses is there by guess: its own copies, its peer's or the store's."""
        guessed, peers = self._guessed, self._estimates.peers
        if path is Path.REMOTE and fetched and self._store_guessed:
            return True
        if guessed is None:
            return False
        from_guess = path is Path.PEER and fetched > 0 and peers is not None and bool(guessed[peers[row]])
        return from_guess or (local > 0 and bool(guessed[row]))

    def _levelling_s(self, places: Places) -> list[float] | list[None]:
        """What those at `places` cost whoever would take a short queue; None each while a replica is free."""
        columns, rows = places
        if not is_none_free(self._estimates):
            return [None] * len(rows)
        levelling_s: list[float] = self._estimates.levelling_price_s[columns, rows].tolist()
        return levelling_s

    def _written(self, places: Places) -> tuple[list[Candidate], int | None]:
        """Those at `places`, and the place of the chosen one among them."""
        estimates, chosen = self._estimates, None
        columns, rows = places
        numbers = zip(  # whole columns at once: element by element costs more than the estimate itself
            columns.tolist(),
            rows.tolist(),
            estimates.queue_s[rows].tolist(),
            estimates.fetch_s[columns, rows].tolist(),
            estimates.compute_s[columns, rows].tolist(),
            estimates.first_token_s[columns, rows].tolist(),
            estimates.expected_s[columns, rows].tolist(),
            estimates.hit_probability[columns, rows].tolist(),
            estimates.reused_tokens[_LOCAL, rows].tolist(),
            estimates.reused_tokens[columns, rows].tolist(),
            estimates.pace_s[rows].tolist(),
            estimates.queue_price_s[columns, rows].tolist(),
            estimates.decode_price_s[columns, rows].tolist(),
            self._age_s[rows].tolist(),
            self._samples[rows].tolist(),
            estimates.ready_s[columns, rows].tolist(),
            self._levelling_s(places),
            strict=True,
        )
        candidates: list[Candidate] = []
        guesses = self._store_guessed or (self._guessed is not None and self._guessed.any())
        # fmt: off
        for (
            column, row, queue, fetch, compute, first, mean, hit, local, reused, pace, behind, beside, age_s, samples,
            ready, levelling,
        ) in numbers:
            # fmt: on
            path = PATHS[column]
            if row == self._choice.row and path is self._choice.path:
                chosen = len(candidates)
                candidates.append(self.chosen)
                self.chosen.blocks_age_s = self._blocks_age(self.chosen, path, row)
                self.chosen.levelling_price_s = levelling
                continue
            own = 0 if path is Path.RECOMPUTE else int(local)
            candidates.append(
                Candidate(  # by position: names cost as much again, for every candidate of every decision
                    self._names[row],
                    path.value,
                    queue,
                    fetch,
                    compute,
                    first,
                    mean,
                    hit,
                    own,
                    int(reused) - own,
                    pace,
                    behind,
                    beside,
                    None if isnan(age_s) else age_s,
                    calibration_state(samples),
                )
            )
            candidates[-1].ready_s, candidates[-1].levelling_price_s = ready, levelling
            candidates[-1].blocks_age_s = self._blocks_age(candidates[-1], path, row)
            if guesses:
                candidates[-1].approximate = self._is_guess(row, path, own, int(reused) - own)
        return candidates, chosen


def note_choice(receipt: Receipt, choice: Choice, estimates: Estimates) -> None:
    """The choice and what it rested on; candidates are written down when the request has ended."""
    receipt.candidates, receipt.chosen = [], None
    receipt.reason = choice.reason.value
    receipt.probability = choice.probability
    around = estimates.around
    receipt.expected_output_tokens = around.output_tokens
    receipt.arrival_rps = around.arrival_rps
    receipt.mean_compute_s = around.mean_compute_s


def note_chosen(chosen: Candidate, booking: Booking, view: FleetView, learning: Learning, now_s: float) -> None:
    """What is worked out for the chosen candidate alone."""
    row = booking.row
    chosen.first_token_p90_s, chosen.first_token_p99_s = booking.forecast.quantiles_s
    chosen.evidence = learning.evidence_of(booking, now_s)
    chosen.discipline = view.disciplines[row].value if chosen.fetched_tokens else None


def write_candidates(receipt: Receipt, notes: Notes | None, *, every: bool) -> None:
    """The candidates of its last decision, at the end of a request; every : all that were possible, else the chosen."""
    if receipt.candidates or notes is None:
        return
    if every:
        notes.complete(receipt, best=None)
    else:
        receipt.candidates, receipt.chosen = [notes.chosen], 0
