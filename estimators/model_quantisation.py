"""In which formats a config.json says that weights are stored.

Valid     fp8 (per tensor, channel or block), GPTQ, AWQ, MXFP4, compressed-tensors with one weight scheme
Blind to  single layers left unquantised beyond attention, router and output head; KV formats, which are a flag of the
          engine and not of the file (`kv` of the fleet file says them), but for compressed-tensors' `kv_cache_scheme`
Source    transformers 4.57 quantisation configs; OCP Microscaling formats v1.0 (MXFP4: 32 values share 8 bits)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from estimators.model_keys import Keys
from estimators.shape_parts import FP8, NumberFormat

_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 2}  # engines serve float32 files in bf16
MXFP4 = NumberFormat(bits=4, scale_bits=8, group=32)


@dataclass(frozen=True, slots=True)
class Stored:
    """Formats of the layers' matrices, of the routed experts and of KV; None: as `value_bytes` says."""

    weights: NumberFormat | None = None
    experts: NumberFormat | None = None
    kv: NumberFormat | None = None


def value_bytes_of(keys: Keys) -> int:
    """Bytes of what is not quantised: `dtype` or `torch_dtype`; bf16 where a file does not say."""
    dtype = keys.get("dtype") or keys.get("torch_dtype") or "bfloat16"
    if dtype not in _VALUE_BYTES:
        raise keys.error("torch_dtype", f"`torch_dtype` is {dtype!r}; known are {', '.join(_VALUE_BYTES)}")
    return _VALUE_BYTES[dtype]


def stored_formats(keys: Keys, config: dict[str, Any] | None) -> Stored:
    """What the section `quantization_config` means; nothing quantised where it is absent."""
    if not config:
        return Stored()
    method = config.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return Stored(weights=FP8)
    if method in ("gptq", "awq"):
        return Stored(weights=_grouped(keys, config, zero_point=method == "awq" or not config.get("sym", True)))
    if method == "mxfp4":
        return Stored(experts=MXFP4)
    if method == "compressed-tensors":
        return _compressed(keys, config)
    raise keys.error(
        "quant_method", f"`quant_method` is {method!r}; known are fp8, gptq, awq, mxfp4, compressed-tensors"
    )


def _grouped(keys: Keys, config: dict[str, Any], *, zero_point: bool) -> NumberFormat:
    """Integers with a 16-bit scale, and perhaps a zero point, for each group of values."""
    bits = config.get("bits") or config.get("w_bit") or config.get("num_bits")
    group = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise keys.error("bits", "`quantization_config` has no usable `bits`")
    if not isinstance(group, int) or group < 1:  # one scale for a whole row: nothing beside the values
        return NumberFormat(bits=bits)
    return NumberFormat(bits=bits, scale_bits=16 + (bits if zero_point else 0), group=group)


def _compressed(keys: Keys, config: dict[str, Any]) -> Stored:
    """compressed-tensors: one group of layers with a scheme for its weights, and perhaps one for KV."""
    groups = list((config.get("config_groups") or {}).values())
    schemes = [group.get("weights") or {} for group in groups]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise keys.error("config_groups", "`config_groups` does not give one weight scheme for all layers")
    kv_scheme = config.get("kv_cache_scheme")
    kv = _scheme(keys, kv_scheme, activations=None) if kv_scheme else None
    return Stored(weights=_scheme(keys, schemes[0], activations=groups[0].get("input_activations")), kv=kv)


def _scheme(keys: Keys, scheme: dict[str, Any], *, activations: dict[str, Any] | None) -> NumberFormat:
    """One scheme; multiplied in fp8 where weights and activations both have 8 bits."""
    bits = scheme.get("num_bits")
    if bits == 8:
        return FP8 if activations is not None and activations.get("num_bits") == 8 else NumberFormat(bits=8)
    return _grouped(keys, scheme, zero_point=not scheme.get("symmetric", True))
