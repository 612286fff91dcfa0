"""Shapes and cards known by name are those of the published files and data sheets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from estimators.hardware import CARDS
from estimators.model_config import read_config
from estimators.planning.known import DEEPSEEK_V3, MODELS, PLANNED_CARDS, QWEN3_235B
from estimators.shapes import ModelShape

CONFIGS = Path(__file__).parents[2] / "vectors" / "hf_configs"


@pytest.mark.parametrize(
    ("shape", "file"), [(QWEN3_235B, "qwen3_235b_a22b_fp8.json"), (DEEPSEEK_V3, "deepseek_v3.json")]
)
def test_a_known_shape_is_the_published_one_with_weights_in_bf16(shape: ModelShape, file: str) -> None:
    published = read_config((CONFIGS / file).read_text(encoding="utf-8"))
    assert shape == msgspec.structs.replace(published, name=shape.name, weights=None)


def test_every_name_is_one_model() -> None:
    assert len({shape.name for shape in MODELS.values()}) == len(MODELS)


def test_planned_cards_reach_half_of_the_data_sheets_peaks() -> None:
    for name, card in PLANNED_CARDS.items():
        assert card.flops_per_s == CARDS[name].peak_tflops * 1e12 / 2
        assert card.bytes_per_s == pytest.approx(CARDS[name].memory_gb_s * 1e9 / 2, rel=0.03)
