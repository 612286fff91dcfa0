"""What a card can do at best, and how much of it each phase reaches.

Valid     dense peaks, without the doubling that data sheets print for structured sparsity; products accumulated in
          FP32; `speed` scales the whole card for experiments
Blind to  clocks under the power limit: low-power cards (L4, A10G) stay well below their peak in long prefills
Source    each row names its own; docs/hardware.md shows the table and how to add a card. Efficiencies are conventions
          until a replica is calibrated
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from estimators.ranges import require

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of a fleet file's `cards`.

    peak_tflops : dense BF16 peak, TFLOP/s
    fp8_tflops : dense FP8 peak, TFLOP/s; None where the card has no FP8 arithmetic, which then runs as BF16
    memory_gb_s : memory bandwidth, GB/s (10^9 bytes)
    memory_gib : memory, GiB
    compute_share : share of the peak a prefill reaches
    memory_share : share of the bandwidth a decode step reaches
    usd_per_hour : rent of one card; None where it is not known, which is not free
    """

    peak_tflops: Positive
    memory_gb_s: Positive
    memory_gib: Positive
    fp8_tflops: Positive | None = None
    compute_share: Share = 0.5  # the textbook's convention (section 9.2.3); calibration takes it from there
    memory_share: Share = 0.8  # large reads on HBM reach 75 to 90 %
    usd_per_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None

    @property
    def flops_per_s(self) -> float:
        """What a BF16 prefill reaches, FLOP/s."""
        return self.peak_tflops * 1e12 * self.compute_share

    @property
    def bytes_per_s(self) -> float:
        """What a decode step reaches, bytes/s."""
        return self.memory_gb_s * 1e9 * self.memory_share

    def math_flops_per_s(self, math: Literal["bf16", "fp8"]) -> float:
        """What a prefill reaches in this arithmetic, FLOP/s."""
        if math == "fp8" and self.fp8_tflops is not None:
            return self.fp8_tflops * 1e12 * self.compute_share
        return self.flops_per_s

    def faster(self, speed: float) -> Card:
        """The same card with peaks and bandwidth times `speed` (> 0); memory stays."""
        require(0 < speed < float("inf"), "speed", speed)
        return msgspec.structs.replace(
            self,
            peak_tflops=self.peak_tflops * speed,
            memory_gb_s=self.memory_gb_s * speed,
            fp8_tflops=None if self.fp8_tflops is None else self.fp8_tflops * speed,
        )


@dataclass(frozen=True, slots=True)
class CardRow:
    """A card of the built-in table, and where its numbers are from.

    source : the maker's document; year : its edition
    """

    name: str
    card: Card
    source: str
    year: int


def row(
    name: str,
    peak_tflops: float,
    fp8_tflops: float | None,
    memory_gb_s: float,
    memory_gib: float,
    source: str,
    year: int,
) -> CardRow:
    """One line of the table below, in its column order."""
    card = Card(peak_tflops=peak_tflops, fp8_tflops=fp8_tflops, memory_gb_s=memory_gb_s, memory_gib=memory_gib)
    return CardRow(name, card, source, year)


# name, dense BF16 TFLOP/s, dense FP8 TFLOP/s, memory GB/s, memory GiB, source, year
# Memory is as sold; engines report what is left of it.
TABLE: tuple[CardRow, ...] = (
    row("A100", 312, None, 2039, 80, "NVIDIA A100 data sheet, 80GB SXM", 2021),
    row("A100-80GB-PCIe", 312, None, 1935, 80, "NVIDIA A100 data sheet, 80GB PCIe", 2021),
    row("A100-40GB", 312, None, 1555, 40, "NVIDIA A100 data sheet, 40GB SXM and PCIe", 2021),
    row("A800", 312, None, 2039, 80, "NVIDIA A800 data sheet, 80GB SXM: an A100 with slower NVLink", 2022),
    row("A10G", 70, None, 600, 24, "NVIDIA A10G data sheet", 2021),
    row("A10", 125, None, 600, 24, "NVIDIA A10 data sheet", 2021),
    row("A40", 149.7, None, 696, 48, "NVIDIA A40 data sheet", 2020),
    row("L4", 121, 242, 300, 24, "NVIDIA L4 data sheet, half of its sparse figures", 2023),
    row("L40S", 362, 733, 864, 48, "NVIDIA L40S data sheet", 2023),
    row("H100", 989.4, 1978.9, 3350, 80, "NVIDIA H100 data sheet, SXM5, half of its sparse figures", 2023),
    row("H100-PCIe", 756, 1513, 2000, 80, "NVIDIA H100 data sheet, PCIe, half of its sparse figures", 2022),
    row("H100-NVL", 835, 1671, 3900, 94, "NVIDIA H100 data sheet, NVL, half of its sparse figures", 2023),
    row("H800", 989.4, 1978.9, 3350, 80, "NVIDIA H800 data sheet, SXM5: an H100 with slower NVLink", 2023),
    row("H20", 148, 296, 4000, 96, "NVIDIA H20 data sheet, 96GB SXM", 2023),
    row("H200", 989.4, 1978.9, 4800, 141, "NVIDIA H200 data sheet, SXM, half of its sparse figures", 2023),
    row("GH200", 989.4, 1978.9, 4000, 96, "NVIDIA GH200 data sheet, 96GB HBM3, half of its sparse figures", 2023),
    row("B200", 2250, 4500, 8000, 180, "NVIDIA DGX B200 data sheet, an eighth, half of its sparse figures", 2024),
    row("GB200", 2500, 5000, 8000, 186, "NVIDIA GB200 NVL72 data sheet, a 72nd, half of its sparse figures", 2024),
    row("RTX-4090", 165.2, 330.3, 1008, 24, "NVIDIA Ada GPU architecture white paper, appendix A", 2023),
    row("RTX-5090", 209.5, 419, 1792, 32, "NVIDIA RTX Blackwell GPU architecture white paper, appendix A", 2025),
    row("RTX-PRO-6000", 503.8, 1007.6, 1792, 96, "NVIDIA RTX PRO Blackwell GPU architecture white paper", 2025),
    row("MI300X", 1307.4, 2614.9, 5300, 192, "AMD Instinct MI300X data sheet", 2023),
    row("MI325X", 1307.4, 2614.9, 6000, 256, "AMD Instinct MI325X data sheet", 2024),
    row("MI355X", 2516.6, 5033.2, 8000, 288, "AMD Instinct MI355X data sheet", 2025),
    row("Gaudi2", 432, 865, 2450, 96, "Intel Gaudi 2 white paper", 2022),
    row("Gaudi3", 1835, 1835, 3700, 128, "Intel Gaudi 3 white paper", 2024),
)

# Used when a fleet file names a card without describing it.
CARDS: dict[str, Card] = {entry.name: entry.card for entry in TABLE}
