"""What a receipt says of one decision: every candidate that was possible, as numbers, written down when it is wanted.

Model     a decision keeps its estimates, which nobody changes afterwards, and copies of the two columns of the fleet
          view that move on. Candidates are made of them when the request has ended: they cost as much as the estimates
          themselves, and a request that waits for its choice should not wait for them
Valid     estimates whose arrays are their own (`Estimator.estimate` lends `age_s`, `pace_scale` and `weights_s`, which
          are not read here)
"""

from __future__ import annotations

from math import isnan

import numpy as np

from estimators.estimates import Estimates
from estimators.paths import COLUMN, PATHS, Path
from estimators.routes import Held
from estimators.view import FleetView
from policies.base import Choice
from router.bookings import Booking
from router.learning import Learning, calibration_state
from router.receipts import Candidate, Receipt

_LOCAL = COLUMN[Path.LOCAL]


class Notes:
    """One decision, made at `now_s` by what is `held`."""

    __slots__ = (
        *("_choice", "_estimates", "_guessed", "_names", "_now_s", "_sampled_at_s", "_samples", "_store_guessed"),
        "chosen",
    )

    def __init__(self, estimates: Estimates, choice: Choice, held: Held, view: FleetView, now_s: float) -> None:
        self._estimates = estimates
        self._choice = choice
        self._guessed = held.approximate
        self._store_guessed = held.store_approximate
        self._names = view.names
        self._now_s = now_s
        self._sampled_at_s = view.sampled_at_s.copy()
        self._samples = view.samples.copy()
        self.chosen = self._chosen()

    def _chosen(self) -> Candidate:
        """The chosen candidate; what only it has is left to the caller."""
        row, path = self._choice.row, self._choice.path
        one = self._estimates.one(path, row)
        local = 0 if path is Path.RECOMPUTE else int(one.local_tokens)
        fetched = int(one.reused_tokens) - local
        age_s = self._now_s - self._sampled_at_s.item(row)
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

    def candidates(self) -> tuple[list[Candidate], int | None]:
        """All that were possible, and the place of the chosen one among them; None where it was not possible."""
        estimates, chosen = self._estimates, None
        columns, rows = np.nonzero(estimates.possible)
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
            (self._now_s - self._sampled_at_s[rows]).tolist(),
            self._samples[rows].tolist(),
            strict=True,
        )
        candidates: list[Candidate] = []
        guesses = self._store_guessed or (self._guessed is not None and self._guessed.any())
        # fmt: off
        for (
            column, row, queue, fetch, compute, first, mean, hit, local, reused, pace, behind, beside, age_s, samples
        ) in numbers:
            # fmt: on
            path = PATHS[column]
            if row == self._choice.row and path is self._choice.path:
                chosen = len(candidates)
                candidates.append(self.chosen)
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
        receipt.candidates, receipt.chosen = notes.candidates()
    else:
        receipt.candidates, receipt.chosen = [notes.chosen], 0
