"""Parts of a model shape: number formats, latent attention, recurrent layers, experts, shards.

Each is a section inside `model` of a fleet file, and each counts only what follows from its own keys.

Valid     matrices without bias; an MLP has three matrices (gate, up, down)
Blind to  norms, biases, rotary tables, convolution weights: under 0.1 % of the weights of any model in docs/models.md
Source    latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1; gated delta rule: Yang et al., arXiv 2412.06464;
          Mamba-2 has the same projections and state: Dao and Gu, arXiv 2405.21060
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from estimators.ranges import require

Count = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class NumberFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How values are stored, and in which arithmetic matrices of them are multiplied.

    bits : of one value, 1 to 32
    scale_bits : stored beside each group of values: scale and zero point together; 0 for plain formats
    group : values that share one scale; None for plain formats
    math : the card's peak that products with these weights can reach; int4 weights are unpacked to bf16 first
    """

    bits: Annotated[int, msgspec.Meta(ge=1, le=32)]
    scale_bits: NotNegative = 0
    group: Count | None = None
    math: Literal["bf16", "fp8"] = "bf16"

    def __post_init__(self) -> None:
        require((self.scale_bits > 0) == (self.group is not None), "group", self.group, "only right with scale_bits")

    @property
    def bytes_per_value(self) -> float:
        """Bytes of one value of a large matrix, its share of the scales included."""
        return (self.bits + self.scale_bits / (self.group or 1)) / 8

    def vector_bytes(self, values: int) -> int:
        """Bytes of a vector of `values` stored by itself, as K and V of one head are: groups do not cross vectors.

        >>> NumberFormat(bits=4, scale_bits=32, group=128).vector_bytes(128)
        68
        """
        groups = -(-values // self.group) if self.group else 0
        return -(-(values * self.bits + groups * self.scale_bits) // 8)


FP8 = NumberFormat(bits=8, math="fp8")


def plain_format(value_bytes: int) -> NumberFormat:
    """Unscaled values of `value_bytes` (1 to 4); one byte is fp8."""
    return FP8 if value_bytes == 1 else NumberFormat(bits=8 * value_bytes)


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `latent`: multi-head latent attention (MLA).

    rank : width of the latent vector kept for each token (kv_lora_rank)
    rope, nope : dimensions of a query or key head with and without position (qk_rope_head_dim, qk_nope_head_dim)
    value : dimensions of a value head (v_head_dim)
    query_rank : width of the compressed query (q_lora_rank); None: queries are not compressed
    expanded : the engine keeps K and V of every head instead of the latent
    """

    rank: Count
    rope: Count
    nope: Count
    value: Count
    query_rank: Count | None = None
    expanded: bool = False

    def weights(self, *, hidden: int, heads: int) -> int:
        """Weights of the projections of one layer."""
        query_width = heads * (self.nope + self.rope)
        query = hidden * query_width
        if self.query_rank is not None:
            query = self.query_rank * (hidden + query_width)
        keys_values = hidden * (self.rank + self.rope) + self.rank * heads * (self.nope + self.value)
        return query + keys_values + heads * self.value * hidden

    def token_bytes(self, *, heads: int, stored: NumberFormat) -> int:
        """Bytes kept for one token in one layer by a GPU that has `heads` of the heads; the latent is never split."""
        if self.expanded:
            return heads * (stored.vector_bytes(self.nope + self.rope) + stored.vector_bytes(self.value))
        return stored.vector_bytes(self.rank + self.rope)

    def prefill_pair_flops(self, heads: int) -> int:
        """FLOPs of one (query, key) pair in one layer, K and V expanded: scores and weighted sum."""
        return 2 * heads * (self.nope + self.rope + self.value)

    def absorbed_pair_flops(self, heads: int) -> int:
        """The same on the latent itself, as decode steps do it."""
        return 2 * heads * (2 * self.rank + self.rope)

    def expansion_flops(self, heads: int) -> int:
        """FLOPs to expand the latent of one cached token in one layer."""
        return 2 * self.rank * heads * (self.nope + self.value)


class Recurrent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `recurrent`: layers with a state of fixed size (linear attention, gated delta rule, Mamba-2).

    key_heads, key_dim : heads and width of keys and queries (Mamba-2: groups and state size)
    value_heads, value_dim : heads and width of values, and of the output gate
    conv : width of the short convolution before the state; 1 for none
    state_value_bytes : bytes of one value of the state; engines keep it in 4 unless told otherwise
    """

    key_heads: Count
    key_dim: Count
    value_heads: Count
    value_dim: Count
    conv: Count = 4
    state_value_bytes: Count = 4

    @property
    def state_values(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    def weights(self, hidden: int) -> int:
        """Weights of the projections of one layer: q, k, v, output gate, two scalars a value head, output."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return hidden * (2 * keys + 2 * values + 2 * self.value_heads) + values * hidden

    def state_bytes(self, value_bytes: int) -> int:
        """State of one sequence in one layer: the matrices, and the last inputs of the convolution."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return self.state_values * self.state_value_bytes + (self.conv - 1) * channels * value_bytes

    @property
    def token_flops(self) -> int:
        """FLOPs on the state for one token: read with the key, update, read with the query."""
        return 6 * self.state_values


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `experts`: a mixture of experts in place of the MLP.

    count, chosen : routed experts of a layer, and how many of them each token passes; chosen <= count
    intermediate : inner width of one routed expert
    shared_intermediate : inner width of all shared experts together, which every token passes; 0 for none
    dense_layers : layers that keep the plain MLP (DeepSeek's first_k_dense_replace)
    weights : format of the routed experts; None: as the other matrices
    """

    count: Count
    chosen: Count
    intermediate: Count
    shared_intermediate: NotNegative = 0
    dense_layers: NotNegative = 0
    weights: NumberFormat | None = None

    def __post_init__(self) -> None:
        require(self.chosen <= self.count, "chosen", self.chosen, f"more than the {self.count} experts there are")


def active_experts(*, count: int, chosen: int, tokens: float) -> float:
    """Expected number of different experts that `tokens` (>= 0) tokens touch, each choosing `chosen` of `count`.

    E(1 - (1 - k/E)^T): choices alike for all experts, tokens independent. Real routers are uneven and neighbouring
    tokens agree, so a step touches somewhat fewer.

    >>> round(active_experts(count=128, chosen=8, tokens=64))
    126
    """
    require(1 <= chosen <= count, "chosen", chosen, f"outside 1 to {count}")
    require(0 <= tokens < float("inf"), "tokens", tokens)
    return float(count * (1.0 - (1.0 - chosen / count) ** tokens))


class Shards(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `shards`: over how many GPUs one replica is spread.

    tensor : GPUs that share every layer (tensor parallel)
    pipeline : groups of layers one after another (pipeline parallel)
    expert_ranks : data-parallel ranks, each a replica of its own, that hold the routed experts together (expert
        parallel); taken to be alike busy
    """

    tensor: Count = 1
    pipeline: Count = 1
    expert_ranks: Count = 1


def stage_layers(*, layers: int, stages: int) -> list[int]:
    """Layers of each pipeline stage, in order. As vLLM splits them: what is left over goes before the last stage.

    Raises
    ------
    ValueError : a stage would have no layer.

    >>> stage_layers(layers=10, stages=4)
    [2, 3, 3, 2]
    """
    require(1 <= stages <= layers, "pipeline", stages, f"outside 1 to the {layers} layers")
    sizes = [layers // stages] * stages
    for place in range(layers % stages):
        sizes[-2 - place] += 1
    return sizes
