"""The shape of a model from its Hugging Face config.json.

Valid     Llama, Mistral, Mixtral, Qwen2, Qwen3 (dense, MoE, Next), DeepSeek V2 and V3 and those built like them,
          gpt-oss, Gemma 1 to 3, and any decoder whose keys mean the same. A key that changes what a layer keeps and is
          not understood is an error, not a guess
Blind to  the vision part of a multimodal model, draft (MTP) layers, biases and norms
Source    the configuration classes of transformers 4.57, whose defaults apply to keys that a file leaves out
"""

from __future__ import annotations

from typing import Any

import msgspec

from estimators.model_keys import Keys, ModelConfigError
from estimators.model_layers import layer_pattern
from estimators.model_quantisation import Stored, stored_formats, value_bytes_of
from estimators.shape_parts import Experts, Latent, Recurrent
from estimators.shapes import Kind, ModelShape

# What the configuration classes assume of keys that published files leave out.
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA3 = {
    **_GEMMA,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "qwen3_next": {"full_attention_interval": 4},
    "qwen3": {"head_dim": 128},
}

# Keys of layers that keep something else than this module knows of, with what they mean.
REFUSED = {
    "index_topk": "sparse attention by index",
    "num_kv_shared_layers": "layers that share their KV",
    "attention_chunk_size": "attention in chunks",
    "global_head_dim": "window layers with other heads than the rest",
    "hybrid_layer_pattern": "window layers with other heads than the rest",
    "hybrid_override_pattern": "layers without an MLP of their own",
    "mamba_d_state": "Mamba layers in this file's own notation",
    "block_configs": "layers of different widths",
}


def read_config(text: str | bytes | dict[str, Any], *, name: str | None = None) -> ModelShape:
    """The shape that a config.json describes.

    Parameters
    ----------
    text : the file, as text or decoded
    name : of the model; None takes the file's `_name_or_path`, else its architecture

    Raises
    ------
    ModelConfigError : it is not JSON, a key is missing, or a key means something the shape cannot express.
    """
    whole = text if isinstance(text, dict) else _decoded(text)
    keys = keys_of(whole)
    for key, meaning in REFUSED.items():
        if keys.get(key):
            raise keys.error(key, f"`{key}` means {meaning}, which is not supported; describe the shape by hand")
    layers = keys.count("num_hidden_layers", "n_layer")
    pattern, window = layer_pattern(keys, layers)
    stored = stored_formats(keys, whole.get("quantization_config") or keys.get("quantization_config"))
    try:
        experts = experts_of(keys, layers, stored)
        return _shape(keys, name or keys.get("_name_or_path") or keys.architecture, pattern, window, stored, experts)
    except ModelConfigError:
        raise
    except ValueError as exc:  # keys that are there and contradict each other
        raise keys.error("", str(exc)) from exc


def _shape(
    keys: Keys, name: str, pattern: tuple[Kind, ...], window: int | None, stored: Stored, experts: Experts | None
) -> ModelShape:
    hidden, heads = keys.count("hidden_size", "n_embd"), keys.count("num_attention_heads", "n_head")
    recurrent = recurrent_of(keys) if "recurrent" in pattern else None
    return ModelShape(
        name=name,
        layers=keys.count("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=_intermediate(keys, experts),
        heads=heads,
        kv_heads=keys.count_or(heads, "num_key_value_heads"),
        head_dim=_head_dim(keys, hidden, heads),
        vocab=keys.count("vocab_size"),
        value_bytes=value_bytes_of(keys),
        tied=keys.flag("tie_word_embeddings"),
        weights=stored.weights,
        kv=stored.kv,
        pattern=pattern,
        window=window,
        query_gate=keys.architecture.startswith(("Qwen3Next", "qwen3_next")) or keys.flag("attn_output_gate"),
        latent=latent_of(keys),
        recurrent=recurrent,
        experts=experts,
    )


def _decoded(text: str | bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ModelConfigError("an unknown architecture", "", f"not a JSON object: {exc}") from exc


def keys_of(whole: dict[str, Any]) -> Keys:
    """The text part of a config.json; what it leaves out is looked up around it, then in its class's defaults."""
    inner = whole.get("text_config") or whole.get("llm_config") or {}
    values = {**{key: value for key, value in whole.items() if not isinstance(value, dict)}, **inner}
    kind = str(values.get("model_type") or "")
    named = whole.get("architectures") or inner.get("architectures") or []
    architecture = str(named[0]) if named else kind or "an unknown architecture"
    return Keys(values, architecture, DEFAULTS.get(kind, {}))


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    """Stated, else hidden over heads, as Llama 3 and Mistral leave it."""
    if keys.has("head_dim"):
        return keys.count("head_dim")
    if hidden % heads:
        raise keys.error("head_dim", f"`head_dim` is missing, and {hidden} over {heads} heads is no whole number")
    return hidden // heads


def _intermediate(keys: Keys, experts: Experts | None) -> int:
    """Width of the plain MLP; a model with experts in every layer need not have one."""
    if experts is not None and experts.dense_layers == 0:
        return keys.count_or(experts.intermediate, "intermediate_size")
    return keys.count("intermediate_size")


def latent_of(keys: Keys) -> Latent | None:
    """Latent attention where `kv_lora_rank` says so."""
    if not keys.has("kv_lora_rank"):
        return None
    return Latent(
        rank=keys.count("kv_lora_rank"),
        rope=keys.count("qk_rope_head_dim"),
        nope=keys.count("qk_nope_head_dim"),
        value=keys.count("v_head_dim"),
        query_rank=keys.count("q_lora_rank") if keys.has("q_lora_rank") else None,
    )


def recurrent_of(keys: Keys) -> Recurrent:
    """Linear attention layers in the notation of Qwen3-Next."""
    return Recurrent(
        key_heads=keys.count("linear_num_key_heads"),
        key_dim=keys.count("linear_key_head_dim"),
        value_heads=keys.count("linear_num_value_heads"),
        value_dim=keys.count("linear_value_head_dim"),
        conv=keys.count("linear_conv_kernel_dim"),
    )


def experts_of(keys: Keys, layers: int, stored: Stored) -> Experts | None:
    """Mixture of experts in the notations of DeepSeek, Qwen, Mixtral and gpt-oss; None for a dense model."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    if not any(keys.get(key) for key in names):
        return None
    intermediate = keys.count("moe_intermediate_size", "intermediate_size")
    shared = keys.get("shared_expert_intermediate_size") or intermediate * (keys.get("n_shared_experts") or 0)
    return Experts(
        count=keys.count(*names),
        chosen=keys.count("num_experts_per_tok", "experts_per_token"),
        intermediate=intermediate,
        shared_intermediate=shared,
        dense_layers=sum(not _has_experts(keys, layer) for layer in range(layers)),
        weights=stored.experts,
    )


def _has_experts(keys: Keys, layer: int) -> bool:
    """Whether this layer has experts and not a plain MLP."""
    if layer < (keys.get("first_k_dense_replace") or 0) or layer in (keys.get("mlp_only_layers") or ()):
        return False
    if layer % (keys.get("moe_layer_freq") or 1):
        return False
    return (layer + 1) % (keys.get("decoder_sparse_step") or 1) == 0
