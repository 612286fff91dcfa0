"""Time of a prefill and of a decode step from shape and card, before any observation.

Model     prefill: max(FLOPs / reached FLOP/s, bytes / reached bytes/s), bytes: the weights its tokens touch, and KV
          decode step: max((touched weights + KV of the batch) / reached bytes/s, FLOPs / reached FLOP/s)
          tensor parallel divides both; pipeline parallel divides work over stages that a step passes one by one
Valid     work that fills the card; a start value, corrected by calibration
Blind to  step overhead, small-batch inefficiency, attention kernels slower than matrix products, links between GPUs,
          projections that every GPU of a tensor parallel group repeats
Source    Williams, Waterman, Patterson, CACM 52(4), 2009
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from estimators.hardware import Card
from estimators.ranges import require
from estimators.shape_costs import ShapeCosts, costs_of
from estimators.shapes import ModelShape, PrefillWork, prefill_work


@dataclass(frozen=True, slots=True)
class Rates:
    """A replica's speed in the units bookings are made of. All > 0, the later ones >= 0.

    linear_s_per_token : matrix work of one prompt token, seconds
    attention_s_per_pair : attention between one new and one earlier token, seconds
    head_s : output head for one sampled token, seconds
    weights_s : one pass over all weights, what a step of many tokens reads, seconds
    context_s_per_token : reading the KV of one context token in a decode step, seconds
    experts_s : the part of weights_s that is routed experts; a step skips those that its tokens do not touch
    decode_attention_s_per_pair : attention of a decode step to one context token, seconds
    pipeline_stages : stages a step passes one after another; the other times are those of the whole pipeline busy
    """

    linear_s_per_token: float
    attention_s_per_pair: float
    head_s: float
    weights_s: float
    context_s_per_token: float
    experts_s: float = 0.0
    decode_attention_s_per_pair: float = 0.0
    pipeline_stages: int = 1

    def prefill_s(self, *, new_tokens: float, cached_tokens: float) -> float:
        """Prefill of `new_tokens` (>= 1) after `cached_tokens` (>= 0), every layer seeing every token, seconds.

        For models with windows, latents or experts see `Roofline`.
        """
        require(new_tokens >= 1, "new_tokens", new_tokens, "below 1: an engine always computes one token")
        return self.work_s(prefill_work(new_tokens=new_tokens, cached_tokens=cached_tokens))

    def work_s(self, work: PrefillWork) -> float:
        return max(self.compute_s(work), self.weights_s)

    def compute_s(self, work: PrefillWork) -> float:
        """The arithmetic of `work`, one sampled token included, seconds."""
        return work.tokens * self.linear_s_per_token + work.pairs * self.attention_s_per_pair + self.head_s

    def decode_step_s(self, *, context_tokens: float, batch: float = 0.0, untouched: float = 0.0) -> float:
        """One decode step, seconds.

        Parameters
        ----------
        context_tokens : context of the whole batch, >= 0; sum of `ShapeCosts.read_tokens` over it
        batch : sequences in the step, >= 0; 0 leaves the arithmetic out
        untouched : share of the routed experts the step does not read, 0 to 1; `ShapeCosts.untouched_share`

        Raises
        ------
        ValueError : an argument is out of range, infinite or NaN.
        """
        require(0 <= context_tokens < float("inf"), "context_tokens", context_tokens)
        require(0 <= batch < float("inf"), "batch", batch)
        require(0 <= untouched <= 1, "untouched", untouched)
        memory_s = self.weights_s - untouched * self.experts_s + context_tokens * self.context_s_per_token
        return max(memory_s, self.decode_compute_s(context_tokens=context_tokens, batch=batch)) if batch else memory_s

    def decode_compute_s(self, *, context_tokens: float, batch: float) -> float:
        """The arithmetic of one decode step, seconds: what it must hide behind its reads."""
        attention_s = context_tokens * self.decode_attention_s_per_pair
        return batch * (self.linear_s_per_token + self.head_s) + attention_s


def rates_of(shape: ModelShape, card: Card) -> Rates:
    """Rates of `shape` on `card`, or on as many of them as `shape.shards` says."""
    tensor, pipeline = shape.shards.tensor, shape.shards.pipeline
    cards = tensor * pipeline
    flops_per_s = card.flops_per_s
    linear_s = (
        2 * shape.matrix_weights / card.math_flops_per_s(shape.weight_format.math)
        + 2 * shape.chosen_weights / card.math_flops_per_s(shape.expert_format.math)
        + shape.state_flops_per_token / flops_per_s
    )
    read = costs_of(shape).read
    experts_bytes = shape.routed_bytes / shape.shards.expert_ranks
    decode_pair_flops = shape.layer_pair_flops
    if shape.latent is not None and not shape.latent.expanded:
        decode_pair_flops = shape.latent.absorbed_pair_flops(shape.heads)
    return Rates(
        linear_s_per_token=linear_s / cards,
        attention_s_per_pair=shape.attention_flops_per_pair / flops_per_s / cards,
        head_s=shape.head_flops / flops_per_s / tensor,
        weights_s=(shape.step_weights_bytes - shape.routed_bytes + experts_bytes) / card.bytes_per_s / tensor,
        context_s_per_token=(read.full_bytes + read.window_bytes) / card.bytes_per_s / pipeline,
        experts_s=experts_bytes / card.bytes_per_s / tensor,
        decode_attention_s_per_pair=shape.attention_layers * decode_pair_flops / flops_per_s / cards,
        pipeline_stages=pipeline,
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """Shape and rates together: the times of one replica, one request or batch at a time."""

    costs: ShapeCosts
    rates: Rates

    @classmethod
    def of(cls, shape: ModelShape, card: Card) -> Roofline:
        return cls(costs_of(shape), rates_of(shape, card))

    def prefill_s(self, *, new_tokens: float, cached_tokens: float, steps: int = 1) -> float:
        """Prefill of `new_tokens` (>= 1) after `cached_tokens` (>= 0) on an otherwise idle replica, seconds.

        steps : engine steps it is split into, >= 1. One step passes the stages of a pipeline one after another;
            more steps follow each other through it.

        Raises
        ------
        ValueError : an argument is out of range, infinite or NaN.
        """
        require(1 <= new_tokens < float("inf"), "new_tokens", new_tokens)
        require(0 <= cached_tokens < float("inf"), "cached_tokens", cached_tokens)
        require(steps >= 1, "steps", steps)
        rates = self.rates
        pairs = float(self.costs.pairs(new_tokens, cached_tokens))
        compute_s = rates.compute_s(PrefillWork(new_tokens, pairs))
        compute_s *= 1.0 + (rates.pipeline_stages - 1) / steps
        untouched = float(self.costs.untouched_share(new_tokens))
        read_tokens = float(self.costs.read_tokens(cached_tokens + new_tokens))
        return max(compute_s, rates.decode_step_s(context_tokens=read_tokens, untouched=untouched))

    def decode_step_s(self, contexts: Sequence[float]) -> float:
        """One decode step of sequences at these `contexts` (at least one, each >= 0), seconds."""
        require(len(contexts) > 0, "contexts", contexts, "empty")
        require(all(0 <= context < float("inf") for context in contexts), "contexts", contexts)
        together = len(contexts) / self.rates.pipeline_stages  # a pipeline keeps as many batches as stages in flight
        return self.rates.decode_step_s(
            context_tokens=sum(float(self.costs.read_tokens(float(context))) for context in contexts),
            batch=len(contexts),
            untouched=float(self.costs.untouched_share(together)),
        )
