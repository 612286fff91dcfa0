"""Public config.json files, cut to the keys that matter, against what their makers say of the models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from estimators.model_config import read_config
from estimators.model_keys import ModelConfigError
from estimators.model_layers import shortest_pattern
from estimators.shape_costs import costs_of
from estimators.shape_parts import FP8, Latent, NumberFormat
from estimators.shapes import QWEN3_8B, Kind, ModelShape

CONFIGS = Path(__file__).parents[1] / "vectors" / "hf_configs"
DOCS = Path(__file__).parents[2] / "docs" / "models.md"
KIB = 1024


def text_of(name: str) -> str:
    return (CONFIGS / f"{name}.json").read_text(encoding="utf-8")


def shape_of(name: str) -> ModelShape:
    return read_config(text_of(name))


def changed(name: str, *, without: str | None = None, **keys: Any) -> dict[str, Any]:
    """A config.json with some keys changed and perhaps one gone, in its text part if it has one."""
    whole: dict[str, Any] = json.loads(text_of(name))
    inner = whole.get("text_config", whole)
    inner.update(keys)
    if without is not None:
        del inner[without]
    return whole


def gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", **settings}


def compressed(**group: Any) -> dict[str, Any]:
    """compressed-tensors with one group of layers."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def active_parameters(shape: ModelShape) -> int:
    """Weights one token passes, embedding excluded."""
    return shape.matrix_weights + shape.chosen_weights + shape.vocab * shape.hidden


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3_8b", 8.19),
        ("qwen3_0_6b", 0.596),
        ("qwen3_30b_a3b", 30.53),
        ("qwen3_235b_a22b_fp8", 235.09),
        ("qwen3_next_80b_a3b", 80.0),
        ("llama_3_1_8b", 8.03),
        ("llama_3_3_70b", 70.55),
        ("llama_3_1_8b_awq", 8.03),
        ("mistral_7b_v0_1", 7.24),
        ("mixtral_8x7b", 46.70),
        ("deepseek_v3", 671.0),
        ("gpt_oss_20b", 20.91),
        ("gpt_oss_120b", 116.83),
        ("gemma_2_9b", 9.24),
        ("gemma_3_4b", 3.88),
        ("gemma_3_27b", 27.01),
    ],
)
def test_weights_add_up_to_the_published_size(name: str, billions: float) -> None:
    """As model cards and checkpoints give it, text part and without draft layers; norms and biases are under 0.5 %."""
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek_v3", 37.0), ("gpt_oss_120b", 5.13), ("gpt_oss_20b", 3.61), ("qwen3_235b_a22b_fp8", 22.0)],
)
def test_active_weights_add_up_to_the_published_number(name: str, billions: float) -> None:
    assert active_parameters(shape_of(name)) / 1e9 == pytest.approx(billions, rel=0.02)


def documented() -> dict[str, list[str]]:
    """The table of public models, cells by the file's name."""
    lines = DOCS.read_text(encoding="utf-8").split("| model |")[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {re.sub("[-.]", "_", row[0].lower()): row[1:] for row in rows}


@pytest.mark.parametrize("name", documented())
def test_the_documented_numbers_are_those_the_router_counts(name: str) -> None:
    shape = shape_of(name)
    costs = costs_of(shape)
    kinds = ", ".join(f"{shape.kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(shape.kinds)))
    assert documented()[name] == [
        f"{shape.parameters / 1e9:.1f}",
        f"{active_parameters(shape) / 1e9:.1f}",
        f"{shape.weights_bytes / 1e9:.1f}",
        kinds + (" (latent)" if shape.latent is not None else ""),
        f"{shape.kv_bytes_per_token / KIB:.0f}",
        f"{costs.kv_bytes(8192.0) / KIB**2:.0f}",
        f"{costs.kv_bytes(131072.0) / KIB**2:.0f}",
    ]


@pytest.mark.parametrize(("name", "gib"), [("gpt_oss_20b", 12.8), ("gpt_oss_120b", 60.8)])
def test_mxfp4_checkpoints_have_their_published_size(name: str, gib: float) -> None:
    """Table 1 of the gpt-oss model card, arXiv 2508.10925; what is missing are the experts' biases."""
    assert shape_of(name).weights_bytes / 2**30 == pytest.approx(gib, rel=5e-3)


def test_the_neutral_shape_is_what_qwen3s_own_file_says() -> None:
    assert read_config(text_of("qwen3_8b"), name=QWEN3_8B.name) == QWEN3_8B


@pytest.mark.parametrize(
    ("name", "kib_per_token", "pattern", "window"),
    [
        ("qwen3_30b_a3b", 96, ("full",), None),
        ("llama_3_1_8b", 128, ("full",), None),
        ("mistral_7b_v0_1", 128, ("window",), 4096),
        ("mixtral_8x7b", 128, ("full",), None),
        ("gpt_oss_20b", 48, ("window", "full"), 128),
        ("gemma_2_9b", 336, ("window", "full"), 4096),
        ("gemma_3_27b", 496, ("window",) * 5 + ("full",), 1024),
        ("qwen3_next_80b_a3b", 24, ("recurrent",) * 3 + ("full",), None),
    ],
)
def test_layers_keep_what_their_kind_keeps(
    name: str, kib_per_token: int, pattern: tuple[Kind, ...], window: int | None
) -> None:
    shape = shape_of(name)
    assert shape.kv_bytes_per_token == kib_per_token * KIB
    assert (shape.pattern, shape.window) == (pattern, window)


def test_deepseek_v3_has_three_dense_layers_a_latent_and_fp8_weights() -> None:
    shape = shape_of("deepseek_v3")
    assert shape.latent == Latent(rank=512, rope=64, nope=128, value=128, query_rank=1536)
    assert (shape.expert_layers, shape.weight_format, shape.kv) == (58, FP8, None)
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.chosen, shape.experts.shared_intermediate) == (256, 8, 2048)


def test_gpt_oss_packs_its_experts_alone() -> None:
    shape = shape_of("gpt_oss_120b")
    assert shape.expert_format == NumberFormat(bits=4, scale_bits=8, group=32)
    assert shape.weight_format == NumberFormat(bits=16)


def test_awq_keeps_a_scale_and_a_zero_point_for_each_group() -> None:
    assert shape_of("llama_3_1_8b_awq").weights == NumberFormat(bits=4, scale_bits=20, group=128)


def test_qwen3_next_keeps_a_state_of_73_7_mib_from_the_first_token() -> None:
    """36 layers of 32 x 128 x 128 values of 4 bytes, and 3 inputs of 8192 channels of 2 bytes for the convolution."""
    assert costs_of(shape_of("qwen3_next_80b_a3b")).state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


def test_gemma_3_4b_leaves_out_what_its_class_assumes() -> None:
    shape = shape_of("gemma_3_4b")
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab, shape.tied) == (8, 4, 256, 262208, True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gptq(bits=4, group_size=128, sym=True), NumberFormat(bits=4, scale_bits=16, group=128)),
        (gptq(bits=4, group_size=64, sym=False), NumberFormat(bits=4, scale_bits=20, group=64)),
        (gptq(bits=8, group_size=-1, sym=True), NumberFormat(bits=8)),
        ({"quant_method": "fp8"}, FP8),
        (compressed(weights={"num_bits": 8}, input_activations={"num_bits": 8}), FP8),
        (compressed(weights={"num_bits": 8}), NumberFormat(bits=8)),
        (
            compressed(weights={"num_bits": 4, "group_size": 128, "symmetric": True}),
            NumberFormat(bits=4, scale_bits=16, group=128),
        ),
    ],
)
def test_each_way_of_quantising_is_the_format_it_stores(config: dict[str, Any], expected: NumberFormat) -> None:
    assert read_config(changed("llama_3_1_8b", quantization_config=config)).weights == expected


def test_a_kv_scheme_in_the_file_is_taken() -> None:
    config = compressed(weights={"num_bits": 8}) | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert read_config(changed("llama_3_1_8b", quantization_config=config)).kv_bytes_per_token == 64 * KIB


def test_a_qwen_file_that_names_a_window_and_turns_it_off_has_none() -> None:
    shape = read_config(changed("qwen3_8b", sliding_window=4096, use_sliding_window=False))
    assert (shape.pattern, shape.window) == (("full",), None)


def test_a_qwen_file_that_turns_its_window_on_has_it_in_the_last_layers() -> None:
    shape = read_config(changed("qwen3_8b", sliding_window=4096, use_sliding_window=True, max_window_layers=28))
    assert shape.kinds == ["full"] * 28 + ["window"] * 8


def test_layers_that_a_qwen_moe_file_names_have_a_plain_mlp() -> None:
    shape = read_config(changed("qwen3_30b_a3b", mlp_only_layers=[0, 5], decoder_sparse_step=2))
    assert shape.expert_layers == 23  # every second one, and not layer 5; layer 0 is plain anyway
    shape = read_config(changed("qwen3_30b_a3b", mlp_only_layers=[0, 5]))
    assert shape.expert_layers == 46


@pytest.mark.parametrize(
    ("name", "key", "architecture"),
    [
        ("qwen3_8b", "num_hidden_layers", "Qwen3ForCausalLM"),
        ("qwen3_8b", "vocab_size", "Qwen3ForCausalLM"),
        ("llama_3_1_8b", "intermediate_size", "LlamaForCausalLM"),
        ("deepseek_v3", "qk_rope_head_dim", "DeepseekV3ForCausalLM"),
        ("deepseek_v3", "num_experts_per_tok", "DeepseekV3ForCausalLM"),
        ("gemma_3_27b", "hidden_size", "Gemma3ForConditionalGeneration"),
        ("gpt_oss_20b", "sliding_window", "GptOssForCausalLM"),
        ("qwen3_next_80b_a3b", "linear_key_head_dim", "Qwen3NextForCausalLM"),
    ],
)
def test_a_missing_key_is_named_in_one_sentence_with_the_architecture(name: str, key: str, architecture: str) -> None:
    with pytest.raises(ModelConfigError, match=f"^config.json of {architecture}: `{key}` is missing$") as caught:
        read_config(changed(name, without=key))
    assert (caught.value.key, caught.value.architecture) == (key, architecture)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_hidden_layers": "36"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["mamba"] * 36}, "mamba"),
        ({"index_topk": 2048}, "index_topk"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"quantization_config": {"quant_method": "secret"}}, "secret"),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
        ({"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 64}, "chosen"),
    ],
)
def test_a_key_that_is_not_understood_is_an_error_and_no_guess(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named) as caught:
        read_config(changed("qwen3_8b", **keys))
    assert str(caught.value).count("config.json of Qwen3ForCausalLM") == 1
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_divide_the_hidden_width_need_a_stated_head_dim() -> None:
    with pytest.raises(ModelConfigError, match="head_dim"):
        read_config(changed("llama_3_1_8b", hidden_size=4097))


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", b"\xff"])
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(ModelConfigError, match="not a JSON object"):
        read_config(text)


def test_a_file_without_a_name_is_called_by_its_architecture() -> None:
    assert shape_of("llama_3_1_8b").name == "LlamaForCausalLM"
    assert (
        read_config(changed("llama_3_1_8b", _name_or_path="meta-llama/Llama-3.1-8B")).name == "meta-llama/Llama-3.1-8B"
    )


@pytest.mark.parametrize(
    ("kinds", "shortest"),
    [("ffff", "f"), ("wfwf", "wf"), ("wfw", "wf"), ("wwf", "wwf"), ("f", "f"), ("wwwwwfwwww", "wwwwwf")],
)
def test_a_pattern_is_the_shortest_that_gives_every_layer(kinds: str, shortest: str) -> None:
    names: dict[str, Kind] = {"f": "full", "w": "window"}
    assert shortest_pattern([names[kind] for kind in kinds]) == tuple(names[kind] for kind in shortest)
