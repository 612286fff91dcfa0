"""What a card can do at best, and how much of it each phase reaches.

Valid     dense BF16 peaks from data sheets; `speed` scales the whole card for experiments
Source    see the comment of each row; efficiencies are conventions until a replica is calibrated
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from estimators.ranges import require

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of a fleet file's `cards`.

    peak_tflops : dense BF16 peak, TFLOP/s
    memory_gb_s : memory bandwidth, GB/s (10^9 bytes)
    memory_gib : memory, GiB
    compute_share : share of the peak a prefill reaches
    memory_share : share of the bandwidth a decode step reaches
    """

    peak_tflops: Positive
    memory_gb_s: Positive
    memory_gib: Positive
    compute_share: Share = 0.5  # the textbook's convention (section 9.2.3); calibration takes it from there
    memory_share: Share = 0.8  # large reads on HBM reach 75 to 90 %

    @property
    def flops_per_s(self) -> float:
        """What a prefill reaches, FLOP/s."""
        return self.peak_tflops * 1e12 * self.compute_share

    @property
    def bytes_per_s(self) -> float:
        """What a decode step reaches, bytes/s."""
        return self.memory_gb_s * 1e9 * self.memory_share

    def faster(self, speed: float) -> Card:
        """The same card with peak and bandwidth times `speed` (> 0); memory stays."""
        require(0 < speed < float("inf"), "speed", speed)
        return msgspec.structs.replace(self, peak_tflops=self.peak_tflops * speed, memory_gb_s=self.memory_gb_s * speed)


# Used when a fleet file names a card without describing it.
CARDS: dict[str, Card] = {
    "A100": Card(peak_tflops=312, memory_gb_s=2039, memory_gib=80),  # SXM 80 GB; NVIDIA data sheet, June 2021
    "H20": Card(peak_tflops=148, memory_gb_s=4000, memory_gib=96),  # NVIDIA data sheet, 2023
}
