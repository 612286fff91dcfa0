"""The table of cards against what its chips can do by construction, and what a fleet file may change of it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from estimators.hardware import CARDS, TABLE, Card

DOCS = Path(__file__).parents[2] / "docs" / "hardware.md"

# Multipliers on the chip, dense: (compute units, BF16 FLOPs a unit and clock with FP32 sums, boost clock in GHz).
CHIPS = {
    "A100": (108, 2048, 1.410),
    "A10G": (80, 512, 1.710),
    "A10": (72, 1024, 1.695),
    "A40": (84, 1024, 1.740),
    "L4": (58, 1024, 2.040),
    "L40S": (142, 1024, 2.520),
    "H100": (132, 4096, 1.830),
    "H100-PCIe": (114, 4096, 1.620),
    "RTX-4090": (128, 512, 2.520),
    "RTX-5090": (170, 512, 2.407),
    "RTX-PRO-6000": (188, 1024, 2.617),
    "MI300X": (304, 2048, 2.100),
    "MI325X": (304, 2048, 2.100),
    "MI355X": (256, 4096, 2.400),
    "Gaudi2": (2, 2 * 256 * 256, 1.650),
    "Gaudi3": (8, 2 * 256 * 256, 1.750),
}

# Width of the memory bus in bits, and Gbit/s on each of its lines.
BUSES = {
    "A100-40GB": (5120, 2.43),
    "A100": (5120, 3.19),
    "A10": (384, 12.5),
    "A10G": (384, 12.5),
    "A40": (384, 14.5),
    "L4": (192, 12.5),
    "L40S": (384, 18.0),
    "H100": (5120, 5.23),
    "H200": (6144, 6.25),
    "RTX-4090": (384, 21.0),
    "RTX-5090": (512, 28.0),
    "RTX-PRO-6000": (512, 28.0),
    "MI300X": (8192, 5.2),
    "MI325X": (8192, 6.0),
    "MI355X": (8192, 8.0),
    "Gaudi2": (6144, 3.27),
    "Gaudi3": (8192, 3.6),
}


@pytest.mark.parametrize("name", CHIPS)
def test_peaks_are_what_the_chip_can_do_without_sparsity(name: str) -> None:
    """A sparse figure taken for a dense one would be off by two; makers round and clocks differ by a percent or so."""
    units, flops_per_clock, clock_ghz = CHIPS[name]
    assert CARDS[name].peak_tflops == pytest.approx(units * flops_per_clock * clock_ghz / 1e3, rel=0.02)


@pytest.mark.parametrize("name", BUSES)
def test_bandwidths_are_what_the_memory_bus_carries(name: str) -> None:
    bits, gbit_s = BUSES[name]
    assert CARDS[name].memory_gb_s == pytest.approx(bits * gbit_s / 8, rel=0.03)


@pytest.mark.parametrize("name", [entry.name for entry in TABLE if entry.card.fp8_tflops is not None])
def test_fp8_is_twice_bf16_wherever_there_is_fp8(name: str) -> None:
    """Gaudi 3 alone has one rate for both."""
    ratio = (CARDS[name].fp8_tflops or 0.0) / CARDS[name].peak_tflops
    assert ratio == pytest.approx(1.0 if name == "Gaudi3" else 2.0, rel=0.02)


def test_every_card_names_its_source_and_none_is_listed_twice() -> None:
    assert len(CARDS) == len(TABLE)
    assert all(entry.source and 2020 <= entry.year <= 2026 for entry in TABLE)


def test_the_documented_table_is_the_one_in_use() -> None:
    number = r"([0-9.]+|-)"
    line = re.compile(rf"\| `([^`]+)` \| {number} \| {number} \| {number} \| {number} \| (.+?), (\d{{4}}) \|")
    rows = [line.fullmatch(text) for text in DOCS.read_text(encoding="utf-8").splitlines() if text.startswith("| `")]
    documented = [match.groups() for match in rows if match is not None]
    used = [
        (
            entry.name,
            *(
                "-" if value is None else f"{value:g}"
                for value in (
                    entry.card.peak_tflops,
                    entry.card.fp8_tflops,
                    entry.card.memory_gb_s,
                    entry.card.memory_gib,
                )
            ),
            entry.source,
            str(entry.year),
        )
        for entry in TABLE
    ]
    assert documented == used


def test_without_fp8_arithmetic_fp8_runs_at_the_bf16_rate() -> None:
    assert CARDS["A100"].math_flops_per_s("fp8") == CARDS["A100"].flops_per_s
    assert CARDS["L4"].math_flops_per_s("fp8") == 2 * CARDS["L4"].flops_per_s


def test_a_faster_card_has_all_rates_scaled_and_the_same_memory_and_price() -> None:
    card = msgspec.structs.replace(CARDS["H100"], usd_per_hour=2.5)
    fast = card.faster(3.0)
    for math in ("bf16", "fp8"):
        assert fast.math_flops_per_s(math) == pytest.approx(3 * card.math_flops_per_s(math))
    assert fast.bytes_per_s == pytest.approx(3 * card.bytes_per_s)
    assert (fast.memory_gib, fast.usd_per_hour) == (80, 2.5)
    assert CARDS["A100"].faster(2.0).fp8_tflops is None


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused_by_name(speed: float) -> None:
    with pytest.raises(ValueError, match="speed"):
        CARDS["A100"].faster(speed)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("peak_tflops", 0),
        ("fp8_tflops", -1),
        ("compute_share", 1.2),
        ("memory_share", 0),
        ("usd_per_hour", -1),
        ("sm", 8),
    ],
)
def test_a_card_out_of_range_is_refused_by_the_keys_name(key: str, wrong: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert({"peak_tflops": 100, "memory_gb_s": 1000, "memory_gib": 40, key: wrong}, Card)


def test_a_price_that_is_not_known_is_not_zero() -> None:
    assert all(entry.card.usd_per_hour is None for entry in TABLE)
