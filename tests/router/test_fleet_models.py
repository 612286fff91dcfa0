"""How a fleet file names models and cards: by hand, by a config.json, or by a known name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from estimators.hardware import CARDS
from estimators.model_config import read_config
from estimators.shape_parts import Latent, NumberFormat
from estimators.shapes import QWEN3_8B
from router.errors import ConfigError
from router.fleet import Fleet, load_fleet

CONFIGS = Path(__file__).parents[1] / "vectors" / "hf_configs"
REPLICAS = "replicas: [{name: a, card: A100, url: 'http://h:1'}]\n"


def loaded(folder: Path, text: str) -> Fleet:
    """The fleet file `text` in `folder`, with all vectors in `folder/models`."""
    shutil.copytree(CONFIGS, folder / "models", dirs_exist_ok=True)
    path = folder / "fleet.yaml"
    path.write_text(text + REPLICAS)
    return load_fleet(path)


def test_a_config_json_beside_the_fleet_file_is_the_model(tmp_path: Path) -> None:
    fleet = loaded(tmp_path, "model: {config: models/deepseek_v3.json}\n")
    assert fleet.model == read_config((CONFIGS / "deepseek_v3.json").read_text())


def test_keys_beside_the_config_change_that_shape(tmp_path: Path) -> None:
    fleet = loaded(
        tmp_path, "model: {config: models/llama_3_3_70b.json, name: llama, kv: {bits: 8}, shards: {tensor: 4}}\n"
    )
    assert fleet.model is not None
    assert (fleet.model.name, fleet.model.shards.tensor) == ("llama", 4)
    assert fleet.model.kv == NumberFormat(bits=8)
    assert fleet.model.layers == 80


def test_one_key_of_a_section_changes_that_key_alone(tmp_path: Path) -> None:
    fleet = loaded(tmp_path, "model: {config: models/deepseek_v3.json, latent: {expanded: true}}\n")
    assert fleet.model is not None
    assert fleet.model.latent == Latent(rank=512, rope=64, nope=128, value=128, query_rank=1536, expanded=True)


def test_further_models_may_have_configs_too(tmp_path: Path) -> None:
    fleet = loaded(tmp_path, "models: {small: {config: models/qwen3_0_6b.json}}\n")
    assert fleet.models["small"].layers == 28


def test_a_model_written_out_is_read_as_before(tmp_path: Path) -> None:
    section = "{name: Qwen/Qwen3-8B, layers: 36, hidden: 4096, intermediate: 12288, heads: 32, kv_heads: 8, "
    fleet = loaded(tmp_path, f"model: {section} head_dim: 128, vocab: 151936}}\n")
    assert fleet.model == QWEN3_8B


def test_a_model_with_every_section_can_be_written_by_hand(tmp_path: Path) -> None:
    text = """
model:
  {name: m, layers: 8, hidden: 64, intermediate: 128, heads: 4, kv_heads: 2, head_dim: 16, vocab: 1000, tied: true,
   pattern: [recurrent, window, full, full], window: 32, query_gate: true,
   weights: {bits: 4, scale_bits: 16, group: 128}, kv: {bits: 8, math: fp8},
   recurrent: {key_heads: 2, key_dim: 8, value_heads: 4, value_dim: 8},
   experts: {count: 16, chosen: 2, intermediate: 32, shared_intermediate: 32, dense_layers: 1, weights: {bits: 4}},
   shards: {tensor: 2, pipeline: 2}}
"""
    fleet = loaded(tmp_path, text)
    assert fleet.model is not None
    assert fleet.model.kinds.count("full") == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: {config: models/nowhere.json}\n", r"model\.config .*nowhere\.json: No such file"),
        ("model: {config: fleet.yaml}\n", r"model\.config .*fleet\.yaml: config\.json of an unknown architecture"),
        ("model: {config: models/qwen3_8b.json, depth: 3}\n", "depth"),
        ("model: {config: models/qwen3_8b.json, shards: {tensor: 3}}\n", "shards.tensor"),
        ("model: 3\n", "Expected `object"),
        ("cards: [A100]\n", "cards"),
        ("cards: {A100: 312}\n", "cards"),
    ],
)
def test_what_does_not_fit_is_named_with_the_file(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        loaded(tmp_path, text)
    assert "fleet.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_that_misses_a_key_stops_start_up_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}')
    with pytest.raises(ConfigError, match=r"config\.json of LlamaForCausalLM: `hidden_size` is missing"):
        loaded(tmp_path, "model: {config: config.json}\n")


def test_a_known_card_keeps_what_the_file_does_not_say(tmp_path: Path) -> None:
    fleet = loaded(tmp_path, "speed: 2\ncards: {A100: {memory_share: 0.6, usd_per_hour: 1.8}}\n")
    card = fleet.card("A100")
    assert (card.memory_share, card.usd_per_hour) == (0.6, 1.8)
    assert card.peak_tflops == 2 * CARDS["A100"].peak_tflops


def test_a_new_card_needs_its_peak_bandwidth_and_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory_gb_s"):
        loaded(tmp_path, "cards: {Mine: {peak_tflops: 100}}\n")
    fleet = loaded(tmp_path, "cards: {Mine: {peak_tflops: 100, memory_gb_s: 1000, memory_gib: 40}}\n")
    assert fleet.card("Mine").fp8_tflops is None


def test_a_card_that_nobody_knows_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("replicas: [{name: a, card: Z1, url: 'http://h:1'}]\n")
    with pytest.raises(ConfigError, match=r"'Z1' is neither .* known are A10, A100"):
        load_fleet(path)
