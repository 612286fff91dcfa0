"""What each replica can be told now about the way a prompt's state gets there, and what that leaves of the paths.

Model     a replica that looks the store up by itself takes what is there unasked; what else it reads, it reads because
          it is told: with the request itself (it fetches as its discipline says), or ahead of it (the state is brought
          into its host memory while the request queues, so it must be there before the replica looks, at its turn)
Valid     estimates of an estimator whose engines do not decide, which a fleet of told engines is
Blind to  what telling ahead saves: a fetch counts from the turn of the request, as if it were not ahead
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from estimators.candidates import Estimates
from estimators.first_token import in_turn_mask
from estimators.paths import COLUMN, PATHS
from estimators.view import FleetView

Mask = npt.NDArray[np.bool_]

_LOCAL, _RECOMPUTE, _REMOTE, _PEER, _HOST, _DISK = (COLUMN[path] for path in PATHS)


@dataclass(slots=True)
class Told:
    """Of every replica, shape (rows,); changed in place.

    peer, store : it can be told to read another replica's memory, or the store
    ahead_peer, ahead_store : it is told so ahead of the request
    asks_store : it looks the store up by itself, whatever it is told
    """

    peer: Mask
    store: Mask
    ahead_peer: Mask
    ahead_store: Mask
    asks_store: Mask

    @classmethod
    def nothing(cls, rows: int) -> Told:
        """Nobody can be told anything, and nobody looks the store up."""
        return cls(*np.zeros((5, rows), dtype=np.bool_))


def narrow(estimates: Estimates, told: Told, view: FleetView) -> None:
    """Take away from estimates just made, as of engines that do all they are told, what these will not do."""
    possible, reused = estimates.possible, estimates.reused_tokens
    if len(possible) <= _REMOTE:
        return
    _fall_to_store(estimates, told.asks_store)
    unasked = possible[_REMOTE] & told.asks_store
    possible[_REMOTE] &= told.asks_store | told.store
    for path in (_LOCAL, _RECOMPUTE, *range(_HOST, len(possible))):
        possible[path] &= ~unasked
    if len(possible) > _PEER:
        more = reused[_PEER] > np.where(unasked, reused[_REMOTE], reused[_LOCAL])
        possible[_PEER] &= told.peer & more
    if told.ahead_store.any() or told.ahead_peer.any():
        late = ~(in_turn_mask(view.disciplines) & (estimates.queue_s >= estimates.fetch_s))
        possible[_REMOTE] &= told.asks_store | ~(told.ahead_store & late[_REMOTE])
        possible[_PEER : _PEER + 1] &= ~(told.ahead_peer & late[_PEER : _PEER + 1])


def _fall_to_store(estimates: Estimates, asks: Mask) -> None:
    """Where blocks are gone, a replica that looks the store up by itself has the store's part, on every path."""
    hit, stored = estimates.hit_probability, estimates.stored_probability
    asked = estimates.possible[_REMOTE] | (stored[_REMOTE] > 0.0)  # else the store has too little to be asked for
    store = np.where(asked, stored[_REMOTE] + hit[_REMOTE], 0.0)
    fallen = np.where(asks, store * (1.0 - hit), stored)
    fallen[_RECOMPUTE] = stored[_RECOMPUTE]
    fallen[_REMOTE] = stored[_REMOTE]
    stored[:] = fallen
