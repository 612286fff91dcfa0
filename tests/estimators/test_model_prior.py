from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from estimators.hardware import CARDS
from estimators.model_config import read_config
from estimators.model_prior import NEUTRAL_CARD, NEUTRAL_SHAPE, prior_of
from estimators.roofline import rates_of
from estimators.shape_parts import Shards
from estimators.shapes import QWEN3_8B, ModelShape

CONFIGS = Path(__file__).parents[1] / "vectors" / "hf_configs"

# Model, card and GPUs as people serve them: the weights fit and fill at least a twenty-fifth of the memory.
SERVED = [
    ("qwen3_8b", "L4", 1),
    ("qwen3_8b", "RTX-4090", 1),
    ("qwen3_8b", "H20", 1),
    ("qwen3_8b", "H100", 1),
    ("llama_3_1_8b", "B200", 1),
    ("llama_3_1_8b_awq", "A10G", 1),
    ("qwen3_0_6b", "L4", 1),
    ("gemma_3_4b", "L4", 1),
    ("gemma_3_27b", "H100", 1),
    ("qwen3_30b_a3b", "H100", 1),
    ("qwen3_next_80b_a3b", "H200", 2),
    ("gpt_oss_20b", "L40S", 1),
    ("gpt_oss_120b", "H100", 1),
    ("llama_3_3_70b", "A100", 4),
    ("llama_3_3_70b", "H200", 2),
    ("qwen3_235b_a22b_fp8", "H100", 4),
    ("deepseek_v3", "H200", 8),
    ("deepseek_v3", "H20", 8),
]

TINY = ModelShape(name="tiny", layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=1000)


@pytest.mark.parametrize(("shape", "card"), [(None, None), (TINY, None), (None, "H100")])
def test_whatever_is_unknown_is_neutral_and_makes_the_prior_wide(shape: ModelShape | None, card: str | None) -> None:
    told = prior_of(TINY, CARDS["H100"])
    prior = prior_of(shape, CARDS[card] if card else None)
    assert prior.shape == (shape or NEUTRAL_SHAPE)
    assert prior.card == (CARDS[card] if card else NEUTRAL_CARD)
    assert (prior.known, told.known) == (False, True)
    assert prior.spread > told.spread


def test_the_neutral_replica_is_qwen3_8b_on_an_a100() -> None:
    assert NEUTRAL_SHAPE is QWEN3_8B
    assert NEUTRAL_CARD is CARDS["A100"]


def test_a_fleets_speed_applies_to_the_neutral_card_alone() -> None:
    """A named card comes at the fleet's speed already."""
    assert prior_of(TINY, None, speed=8.0).card == CARDS["A100"].faster(8.0)
    assert prior_of(TINY, CARDS["H100"], speed=8.0).card == CARDS["H100"]


@pytest.mark.parametrize(("name", "card", "tensor"), SERVED)
def test_what_people_serve_lies_within_the_documented_distance_of_neutral(name: str, card: str, tensor: int) -> None:
    shape = read_config((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    shape = msgspec.structs.replace(shape, shards=Shards(tensor=tensor))
    filled = shape.weights_bytes / tensor / 2**30 / CARDS[card].memory_gib
    assert 0.04 < filled < 0.9
    rates, neutral = rates_of(shape, CARDS[card]), rates_of(NEUTRAL_SHAPE, NEUTRAL_CARD)
    assert 1 / 14 < rates.linear_s_per_token / neutral.linear_s_per_token < 4.5
    assert 1 / 4.1 < rates.weights_s / neutral.weights_s < 7
    assert 1 / 6.1 < shape.kv_bytes_per_token / NEUTRAL_SHAPE.kv_bytes_per_token < 3.5
