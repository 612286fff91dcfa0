"""State size, attention work and expert use of a model, for whole arrays of token counts at once.

Model     full attention layers keep every token; a window layer keeps and sees the last `window`; a recurrent layer
          keeps one state whatever the length. Pairs: each new token at position p sees p + 1/2 earlier ones (the causal
          triangle), min(window, p + 1/2) in a window layer
Valid     token counts >= 0 and finite; nothing is checked here, as these run for every decision
Blind to  blocks an engine keeps beyond a window until it frees them; states saved at block borders
Source    closed forms, tested against counts one token at a time; latent attention: DeepSeek-V2, arXiv 2405.04434
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from estimators.shape_parts import stage_layers
from estimators.shapes import Kind, ModelShape

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of one sequence's state: what grows with every token, what grows up to the window, what does not grow.

    full_bytes : for each token
    window_bytes : for each of the last `window` tokens
    state_bytes : once there is any token
    """

    full_bytes: float
    window_bytes: float
    state_bytes: float

    def at(self, tokens: Any, window: float) -> Any:
        size = tokens * self.full_bytes
        if self.window_bytes:
            size = size + np.minimum(tokens, window) * self.window_bytes
        if self.state_bytes:
            size = size + np.minimum(tokens, 1.0) * self.state_bytes
        return size


@dataclass(frozen=True, slots=True)
class ShapeCosts:
    """What `costs_of` derives once from a shape. Methods take floats or float64 arrays and return the same.

    plain : every layer is full attention without a latent, so that pairs and reads are the plain ones
    window : tokens a window layer sees; inf without such layers
    size : of the whole state, as it is stored and sent
    read : of what each GPU of one stage group reads in a decode step, all stages together; states count twice,
        as they are written too
    stages : of what one GPU of each pipeline stage keeps; equal stages once
    window_share : window layers' part of the attention FLOPs of a pair, 0 to 1
    expansion_pairs : work to expand the latent of one cached token, in pairs; 0 without latent attention
    absorbed_extra : how much dearer a pair is on the latent itself, relative; 0 without latent attention
    chosen_share : routed experts one token passes over all there are; 1 without experts
    expert_ranks : replicas whose tokens pass the same copy of the experts
    """

    plain: bool
    window: float
    size: StateSize
    read: StateSize
    stages: tuple[StateSize, ...]
    window_share: float
    expansion_pairs: float
    absorbed_extra: float
    chosen_share: float
    expert_ranks: int

    @property
    def kv_bytes_per_token(self) -> float:
        """What one more token adds while no window is full."""
        return self.size.full_bytes + self.size.window_bytes

    @property
    def state_bytes(self) -> float:
        """Recurrent state of one sequence, 0 for most models."""
        return self.size.state_bytes

    @overload
    def kv_bytes(self, tokens: float) -> float: ...
    @overload
    def kv_bytes(self, tokens: Array) -> Array: ...
    def kv_bytes(self, tokens: Any) -> Any:
        """State of a context of `tokens`, bytes."""
        return self.size.at(tokens, self.window)

    @overload
    def gpu_kv_bytes(self, tokens: float) -> float: ...
    @overload
    def gpu_kv_bytes(self, tokens: Array) -> Array: ...
    def gpu_kv_bytes(self, tokens: Any) -> Any:
        """The same on the fullest GPU of a replica that is spread over several."""
        sizes = [stage.at(tokens, self.window) for stage in self.stages]
        return sizes[0] if len(sizes) == 1 else np.maximum.reduce(sizes)

    @overload
    def kv_bytes_between(self, start: float, stop: float) -> float: ...
    @overload
    def kv_bytes_between(self, start: Array, stop: Array | float) -> Array: ...
    @overload
    def kv_bytes_between(self, start: float, stop: Array) -> Array: ...
    def kv_bytes_between(self, start: Any, stop: Any) -> Any:
        """Bytes that bring a replica holding the first `start` tokens to `stop`; 0 where stop <= start.

        Window layers need only what the token at `stop` can see, and recurrent layers one state, so fetching in two
        steps moves more than fetching at once.
        """
        return self.size.at(np.maximum(stop - start, 0.0), self.window)

    @overload
    def pairs(self, new: float, cached: float) -> float: ...
    @overload
    def pairs(self, new: Array, cached: Array | float) -> Array: ...
    @overload
    def pairs(self, new: float, cached: Array) -> Array: ...
    def pairs(self, new: Any, cached: Any) -> Any:
        """Attention work of `new` tokens after `cached`, in pairs of `ModelShape.attention_flops_per_pair`.

        Latent attention expands the cached latents first, or works on them as they are, whichever is less.
        """
        whole = new * cached + new * new / 2
        if self.plain:
            return whole
        pairs = whole
        if self.window_share:
            pairs = whole + self.window_share * (window_pairs(new, cached, self.window) - whole)
        if self.expansion_pairs:
            pairs = pairs + np.minimum(cached * self.expansion_pairs, whole * self.absorbed_extra)
        return pairs

    @overload
    def read_tokens(self, context: float) -> float: ...
    @overload
    def read_tokens(self, context: Array) -> Array: ...
    def read_tokens(self, context: Any) -> Any:
        """What a decode step reads for one sequence at `context`, in tokens of which no window is full.

        Times `Rates.context_s_per_token` it is time; sums over sequences add up, sums of contexts do not.
        """
        if not self.read.window_bytes and not self.read.state_bytes:
            return context
        return self.read.at(context, self.window) / (self.read.full_bytes + self.read.window_bytes)

    @overload
    def untouched_share(self, tokens: float) -> float: ...
    @overload
    def untouched_share(self, tokens: Array) -> Array: ...
    def untouched_share(self, tokens: Any) -> Any:
        """Expected share of the routed experts that a step of `tokens` does not read; 0 without experts."""
        if self.chosen_share >= 1.0:
            return 0.0 * tokens
        return ((1.0 - self.chosen_share) ** self.expert_ranks) ** tokens


def window_pairs(new: Any, cached: Any, window: float) -> Any:
    """Pairs of `new` tokens after `cached` in one layer that sees `window` tokens: the sum of min(window, p + 1/2)."""
    before = np.minimum(cached, window)
    ramp = np.minimum(cached + new, window) - before
    return ramp * (before + ramp / 2) + window * (new - ramp)


def costs_of(shape: ModelShape) -> ShapeCosts:
    """Everything that decisions need of `shape`, worked out once."""
    kinds, tensor = shape.kinds, shape.shards.tensor
    windows, recurrent = kinds.count("window"), kinds.count("recurrent")
    latent = shape.latent if shape.latent is not None and not shape.latent.expanded else None
    pair_flops = shape.layer_pair_flops
    read = state_size(shape, kinds, tensor)
    return ShapeCosts(
        plain=not windows and not recurrent and latent is None,
        window=float(shape.window) if windows and shape.window is not None else inf,
        size=state_size(shape, kinds, 1),
        read=StateSize(read.full_bytes, read.window_bytes, 2 * read.state_bytes),
        stages=tuple(dict.fromkeys(stage_sizes(shape))),
        window_share=windows / shape.attention_layers,
        expansion_pairs=latent.expansion_flops(shape.heads) / pair_flops if latent is not None else 0.0,
        absorbed_extra=latent.absorbed_pair_flops(shape.heads) / pair_flops - 1.0 if latent is not None else 0.0,
        chosen_share=shape.experts.chosen / shape.experts.count if shape.experts is not None else 1.0,
        expert_ranks=shape.shards.expert_ranks,
    )


def state_size(shape: ModelShape, kinds: list[Kind], tensor: int) -> StateSize:
    """State of one sequence in layers of these `kinds`, on one of `tensor` GPUs that share them."""
    layer_bytes = shape.layer_kv_bytes(tensor)
    return StateSize(
        full_bytes=float(kinds.count("full") * layer_bytes),
        window_bytes=float(kinds.count("window") * layer_bytes),
        state_bytes=kinds.count("recurrent") * shape.layer_state_bytes / tensor,
    )


def stage_sizes(shape: ModelShape) -> list[StateSize]:
    """State of one sequence on one GPU of each pipeline stage, in order."""
    kinds, sizes, first = shape.kinds, [], 0
    for layers in stage_layers(layers=shape.layers, stages=shape.shards.pipeline):
        sizes.append(state_size(shape, kinds[first : first + layers], shape.shards.tensor))
        first += layers
    return sizes
