"""What a replica is taken for before anything is known of it: a shape, a card, and how far the truth may be.

Model     the neutral shape is Qwen3-8B in bf16, the neutral card an A100: an 8-billion model on a common card. For
          public models on cards that they are served on (tests/estimators/test_model_prior.py) a prompt token takes
          1/14 to 4.5 times as long, a pass over the weights 1/4 to 7 times, and KV is 1/6 to 3.5 times as large, so
          the spread is wide and calibration moves fast
Valid     start values; state `uncalibrated` until observed
Blind to  everything that the engine itself reports: block size and capacity come from there
"""

from __future__ import annotations

from dataclasses import dataclass

from estimators.hardware import CARDS, Card
from estimators.shapes import QWEN3_8B, ModelShape

NEUTRAL_SHAPE = QWEN3_8B
NEUTRAL_CARD = CARDS["A100"]
KNOWN_SPREAD, UNKNOWN_SPREAD = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class Prior:
    """A replica's start.

    known : shape and card are the operator's word and not the neutral ones
    spread : how far the truth may be from the start values, relative; what `PrefillCalibration` starts from
    """

    shape: ModelShape
    card: Card
    known: bool
    spread: float


def prior_of(shape: ModelShape | None, card: Card | None, *, speed: float = 1.0) -> Prior:
    """The prior of a replica whose shape or card may be unknown (None); the neutral card runs at `speed` (> 0)."""
    known = shape is not None and card is not None
    return Prior(
        shape=shape or NEUTRAL_SHAPE,
        card=card or NEUTRAL_CARD.faster(speed),
        known=known,
        spread=KNOWN_SPREAD if known else UNKNOWN_SPREAD,
    )
