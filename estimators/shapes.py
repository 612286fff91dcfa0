"""Size and arithmetic of a dense decoder with grouped-query attention.

Model     per token and layer: projections q, k, v, o and a gated MLP (three matrices), 2 FLOPs a weight;
          attention 4 x heads x head_dim FLOPs for each (query, earlier token) pair; output head only for
          tokens that are sampled
Valid     dense models, one KV format for all layers
Blind to  MoE, MLA, sliding windows, norms and element-wise work (under 1 % of a prefill)
Source    Qwen3-8B: its config.json; FLOP counting as in Kaplan et al. 2020, section 2.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from estimators.ranges import require

Count = Annotated[int, msgspec.Meta(ge=1)]


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `model` of a fleet file: what must be known of a model to price its work."""

    name: str
    layers: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    value_bytes: Count = 2  # BF16 weights and KV; 1 for fp8

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, input embedding and output head included."""
        return (self.layers * self.layer_weights + 2 * self.vocab * self.hidden) * self.value_bytes

    @property
    def step_weights_bytes(self) -> int:
        """Bytes of weights one decode step reads: all but the input embedding, of which it reads a few rows."""
        return (self.layers * self.layer_weights + self.vocab * self.hidden) * self.value_bytes

    @property
    def linear_flops_per_token(self) -> int:
        return 2 * self.layers * self.layer_weights

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs for one new token looking at one earlier token, all layers: scores and weighted sum."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def head_flops(self) -> int:
        """FLOPs of the output head for one sampled token."""
        return 2 * self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes


# What an unknown model is priced as until calibration has seen enough of it.
QWEN3_8B = ModelShape(
    name="Qwen/Qwen3-8B",
    layers=36,
    hidden=4096,
    intermediate=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
)


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The physical size of one prefill.

    tokens : tokens computed
    pairs : (computed token, visible earlier token) pairs, causal: new x cached + new^2 / 2
    """

    tokens: float
    pairs: float


def prefill_work(*, new_tokens: float, cached_tokens: float) -> PrefillWork:
    """Work of computing `new_tokens` after `cached_tokens` already in place.

    Raises
    ------
    ValueError : a count is negative, infinite or NaN.

    >>> prefill_work(new_tokens=4, cached_tokens=10)
    PrefillWork(tokens=4, pairs=48.0)
    """
    require(0 <= new_tokens < float("inf"), "new_tokens", new_tokens)
    require(0 <= cached_tokens < float("inf"), "cached_tokens", cached_tokens)
    return PrefillWork(new_tokens, new_tokens * cached_tokens + new_tokens * new_tokens / 2)
