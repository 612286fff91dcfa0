"""What a `model` section may say, and what it may not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from estimators.shape_parts import FP8, NumberFormat
from estimators.shapes import QWEN3_8B, ModelShape

DENSE: dict[str, Any] = {
    "name": "m",
    "layers": 12,
    "hidden": 64,
    "intermediate": 128,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 16,
    "vocab": 1000,
}


def a_shape(**others: object) -> ModelShape:
    return msgspec.convert({**DENSE, **others}, ModelShape)


def test_a_section_of_nine_keys_is_a_dense_bf16_model_on_one_gpu() -> None:
    shape = a_shape(value_bytes=2)
    assert (shape.kinds, shape.attention_layers, shape.expert_layers) == (["full"] * 12, 12, 0)
    assert shape.weights_bytes == 2 * shape.parameters
    assert (shape.shards.tensor, shape.shards.pipeline) == (1, 1)


def test_a_pattern_is_repeated_and_cut_at_the_last_layer() -> None:
    shape = a_shape(layers=5, pattern=["window", "full"], window=16)
    assert shape.kinds == ["window", "full", "window", "full", "window"]


def test_a_tied_head_is_stored_once_and_read_as_before() -> None:
    apart, tied = a_shape(), a_shape(tied=True)
    assert apart.weights_bytes - tied.weights_bytes == 1000 * 64 * 2
    assert apart.step_weights_bytes == tied.step_weights_bytes


def test_quantised_weights_leave_embedding_and_head_as_they_were() -> None:
    plain, quantised = a_shape(), a_shape(weights={"bits": 4, "scale_bits": 16, "group": 128})
    outside = 2 * 1000 * 64 * 2
    assert quantised.weights_bytes - outside == pytest.approx((plain.weights_bytes - outside) * 4.125 / 16, abs=1)
    assert quantised.kv_bytes_per_token == plain.kv_bytes_per_token


def test_one_byte_values_halve_weights_and_kv() -> None:
    assert a_shape(value_bytes=1).weights_bytes * 2 == a_shape().weights_bytes
    assert a_shape(value_bytes=1).kv_bytes_per_token * 2 == a_shape().kv_bytes_per_token
    assert a_shape(value_bytes=1).weight_format == FP8


def test_experts_may_have_a_format_of_their_own() -> None:
    experts = {"count": 8, "chosen": 2, "intermediate": 32}
    own = a_shape(experts={**experts, "weights": {"bits": 4}})
    assert own.routed_bytes == a_shape(experts=experts).routed_bytes / 4
    assert own.expert_format == NumberFormat(bits=4)
    assert own.weight_format == NumberFormat(bits=16)


def test_only_the_chosen_experts_are_work_for_a_token_and_all_are_weights() -> None:
    few, many = (a_shape(experts={"count": count, "chosen": 2, "intermediate": 32}) for count in (2, 64))
    routers = 12 * 64 * (64 - 2)  # one router column for each expert
    assert many.linear_flops_per_token - few.linear_flops_per_token == 2 * routers
    assert many.routed_weights == 32 * few.routed_weights


def test_leading_dense_layers_keep_their_plain_mlp() -> None:
    experts = {"count": 4, "chosen": 1, "intermediate": 32}
    all_layers, later = a_shape(experts=experts), a_shape(experts={**experts, "dense_layers": 3})
    assert all_layers.routed_weights == 12 * 4 * 3 * 64 * 32
    assert later.routed_weights == 9 * 4 * 3 * 64 * 32
    assert later.matrix_weights - all_layers.matrix_weights == 3 * (3 * 64 * 128 - 64 * 4)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"pattern": []}, "pattern"),
        ({"pattern": ["window", "full"]}, "window"),
        ({"pattern": ["recurrent", "full"]}, "recurrent"),
        (
            {
                "pattern": ["recurrent"],
                "recurrent": {"key_heads": 1, "key_dim": 8, "value_heads": 1, "value_dim": 8},
            },
            "without an attention layer",
        ),
        ({"shards": {"tensor": 3}}, "shards.tensor"),
        ({"shards": {"pipeline": 13}}, "pipeline"),
        ({"experts": {"count": 4, "chosen": 1, "intermediate": 8, "dense_layers": 12}}, "dense_layers"),
        ({"pattern": ["sideways"]}, "sideways"),
        ({"depth": 3}, "depth"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused_by_the_keys_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        a_shape(**wrong)


def test_a_window_that_no_layer_uses_changes_nothing() -> None:
    assert a_shape(window=16).kv_bytes_per_token == a_shape().kv_bytes_per_token


def test_qwen3_8b_is_what_the_textbook_counts() -> None:
    assert QWEN3_8B.parameters / 1e9 == pytest.approx(8.19, abs=0.005)
    assert QWEN3_8B.kv_bytes_per_token == 144 * 1024
