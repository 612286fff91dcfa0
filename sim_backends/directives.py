"""What a request may tell an engine about the way its prompt state gets there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Path(Enum):
    LOCAL = "local"  # the replica's own memory and tiers, the rest is computed
    REMOTE = "remote"  # the shared store too
    PEER = "peer"  # what replica `source` holds of the prompt too
    HAND_OFF = "hand_off"  # all that request `request_id` has computed and kept on replica `source`


@dataclass(frozen=True, slots=True)
class Directive:
    """One request's path. Engines that look the store up by themselves follow only hand-offs and `keep`.

    source : name of the replica to read from, for PEER and HAND_OFF
    request_id : id of the prefill on `source`, for HAND_OFF; else the id this request's own state is kept under
    keep : once it is over, this request's state is kept for a hand-off; on prefill replicas always
    """

    path: Path = Path.LOCAL
    source: str | None = None
    request_id: str | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError when a path lacks what it needs."""
        if self.path in (Path.PEER, Path.HAND_OFF) and self.source is None:
            raise ValueError(f"path {self.path.value} needs a source: the name of a replica")
        if self.path is Path.HAND_OFF and self.request_id is None:
            raise ValueError("path hand_off needs a request_id: that of the prefill on the source")
