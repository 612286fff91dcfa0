"""What must be known of a model to size its state and price its work.

Model     a stack of layers, each a mixer (full attention, windowed attention or a recurrent state) and an MLP or a
          mixture of experts; 2 FLOPs a weight and token; attention 4 x heads x head_dim FLOPs for each (query,
          visible token) pair; output head only for tokens that are sampled
Valid     decoders; all attention layers alike but for the window, all recurrent layers alike, one KV format
Blind to  norms and element-wise work (under 1 % of a prefill), sparse attention by index, layers that share their KV,
          vision towers, draft heads
Source    Qwen3-8B: its config.json; FLOP counting as in Kaplan et al. 2020, section 2.1
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

import msgspec

from estimators.ranges import require
from estimators.shape_parts import Count, Experts, Latent, NumberFormat, Recurrent, Shards, plain_format, stage_layers

Kind = Literal["full", "window", "recurrent"]


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `model` of a fleet file. The first nine keys describe a dense model; the others say how it differs.

    intermediate : inner width of the MLP; of a model with experts in every layer it is not used
    heads, kv_heads, head_dim : of the attention layers; with `latent` only `heads` is used
    value_bytes : bytes of one weight, KV value and activation: 2 for bf16, 1 for fp8
    tied : the output head is the embedding table
    weights : format of the matrices of the layers where it is not `value_bytes`; embedding and head stay
    kv : format of K and V where it is not `value_bytes`
    pattern : kinds of the first layers, repeated to the end: [window, window, window, window, window, full]
    window : tokens a window layer sees, its own included
    query_gate : attention layers project a gate beside the query
    latent, recurrent, experts, shards are sections of their own, in `shape_parts`.
    """

    name: str  # as the engines call it
    layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)]  # of all kinds
    hidden: Count  # width of the residual stream
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count  # rows of the embedding table
    value_bytes: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    tied: bool = False
    weights: NumberFormat | None = None
    kv: NumberFormat | None = None
    pattern: tuple[Kind, ...] = ("full",)
    window: Count | None = None
    query_gate: bool = False
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    experts: Experts | None = None
    shards: Shards = Shards()

    def __post_init__(self) -> None:
        """Raise `ValueError` where keys contradict each other."""
        require(len(self.pattern) > 0, "pattern", self.pattern, "empty")
        kinds = set(self.kinds)
        require(kinds != {"recurrent"}, "pattern", self.pattern, "without an attention layer, which is not supported")
        require(("window" in kinds) <= (self.window is not None), "window", self.window, "needed by the pattern")
        require(("recurrent" in kinds) <= (self.recurrent is not None), "recurrent", None, "needed by the pattern")
        tensor = self.shards.tensor
        require(self.heads % tensor == 0, "heads", self.heads, f"not a multiple of shards.tensor = {tensor}")
        stage_layers(layers=self.layers, stages=self.shards.pipeline)
        if self.experts is not None:
            dense = self.experts.dense_layers
            require(dense < self.layers, "experts.dense_layers", dense, "not below the number of layers")

    @property
    def kinds(self) -> list[Kind]:
        """The kind of each layer, in order."""
        return [self.pattern[layer % len(self.pattern)] for layer in range(self.layers)]

    @property
    def attention_layers(self) -> int:
        """Layers with K and V, full and windowed."""
        return self.layers if "recurrent" not in self.pattern else self.layers - self.kinds.count("recurrent")

    @property
    def expert_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts is not None else 0

    @property
    def weight_format(self) -> NumberFormat:
        """Of the matrices of the layers, routed experts excepted."""
        return self.weights or plain_format(self.value_bytes)

    @property
    def expert_format(self) -> NumberFormat:
        return (self.experts.weights if self.experts is not None else None) or self.weight_format

    @property
    def kv_format(self) -> NumberFormat:
        return self.kv or plain_format(self.value_bytes)

    @property
    def attention_weights(self) -> int:
        """Weights of the projections of one attention layer."""
        if self.latent is not None:
            return self.latent.weights(hidden=self.hidden, heads=self.heads)
        return self.hidden * self.head_dim * ((3 if self.query_gate else 2) * self.heads + 2 * self.kv_heads)

    @property
    def matrix_weights(self) -> int:
        """Weights of the layers that every token passes: mixers, plain MLPs, shared experts and routers."""
        total = self.attention_layers * self.attention_weights
        if self.recurrent is not None:
            total += (self.layers - self.attention_layers) * self.recurrent.weights(self.hidden)
        total += (self.layers - self.expert_layers) * 3 * self.hidden * self.intermediate
        if self.experts is not None:
            total += self.expert_layers * self.hidden * (3 * self.experts.shared_intermediate + self.experts.count)
        return total

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert, 0 without experts."""
        return 3 * self.hidden * self.experts.intermediate if self.experts is not None else 0

    @property
    def routed_weights(self) -> int:
        """Weights of all routed experts of all layers."""
        return self.expert_layers * self.experts.count * self.expert_weights if self.experts is not None else 0

    @property
    def chosen_weights(self) -> int:
        """Weights of the routed experts that one token passes."""
        return self.expert_layers * self.experts.chosen * self.expert_weights if self.experts is not None else 0

    @property
    def parameters(self) -> int:
        """All weights, embedding and output head included."""
        return self.matrix_weights + self.routed_weights + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def routed_bytes(self) -> float:
        """Bytes of all routed experts."""
        return self.routed_weights * self.expert_format.bytes_per_value

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, input embedding and output head included."""
        embedding = 0 if self.tied else self.vocab * self.hidden * self.value_bytes
        return self.step_weights_bytes + embedding

    @property
    def step_weights_bytes(self) -> int:
        """Bytes a step of many tokens reads: all but the input embedding, of which it reads a few rows."""
        layers = self.matrix_weights * self.weight_format.bytes_per_value + self.routed_bytes
        return ceil(layers) + self.vocab * self.hidden * self.value_bytes

    @property
    def linear_flops_per_token(self) -> int:
        """FLOPs of one token outside attention and output head: only the experts it passes count."""
        return 2 * (self.matrix_weights + self.chosen_weights) + self.state_flops_per_token

    @property
    def state_flops_per_token(self) -> int:
        """FLOPs on recurrent states, all layers."""
        if self.recurrent is None:
            return 0
        return (self.layers - self.attention_layers) * self.recurrent.token_flops

    @property
    def layer_pair_flops(self) -> int:
        """FLOPs of one (new token, visible token) pair of a prefill in one attention layer."""
        if self.latent is not None:
            return self.latent.prefill_pair_flops(self.heads)
        return 4 * self.heads * self.head_dim

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of one new token looking at one earlier token, all attention layers: scores and weighted sum."""
        return self.attention_layers * self.layer_pair_flops

    @property
    def head_flops(self) -> int:
        """FLOPs of the output head for one sampled token."""
        return 2 * self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all attention layers: what a context grows by while no window is full."""
        return self.attention_layers * self.layer_kv_bytes()

    def layer_kv_bytes(self, tensor: int = 1) -> int:
        """K and V of one token in one attention layer on one of `tensor` GPUs, bytes.

        With more GPUs than KV heads every GPU keeps one head, copies included.
        """
        if self.latent is not None:
            return self.latent.token_bytes(heads=self.heads // tensor, stored=self.kv_format)
        return 2 * -(-self.kv_heads // tensor) * self.kv_format.vector_bytes(self.head_dim)

    @property
    def layer_state_bytes(self) -> int:
        """Recurrent state of one sequence in one recurrent layer, 0 where there is none."""
        return self.recurrent.state_bytes(self.value_bytes) if self.recurrent is not None else 0


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
    """Work of computing `new_tokens` after `cached_tokens` already in place, where every layer sees every token.

    Raises
    ------
    ValueError : a count is negative, infinite or NaN.

    >>> prefill_work(new_tokens=4, cached_tokens=10)
    PrefillWork(tokens=4, pairs=48.0)
    """
    require(0 <= new_tokens < float("inf"), "new_tokens", new_tokens)
    require(0 <= cached_tokens < float("inf"), "cached_tokens", cached_tokens)
    return PrefillWork(new_tokens, new_tokens * cached_tokens + new_tokens * new_tokens / 2)
