"""Time of a prefill and of a decode step from shape and card, before any observation.

Model     prefill: max(FLOPs / reached FLOP/s, weights / reached bytes/s)
          decode step: (weights + KV of the batch) / reached bytes/s
Valid     one card a replica, work that fills the card; a start value, corrected by calibration
Blind to  step overhead, small-batch inefficiency, attention kernels slower than matrix products
Source    Williams, Waterman, Patterson, CACM 52(4), 2009
"""

from __future__ import annotations

from dataclasses import dataclass

from estimators.hardware import Card
from estimators.ranges import require
from estimators.shapes import ModelShape, PrefillWork, prefill_work


@dataclass(frozen=True, slots=True)
class Rates:
    """A replica's speed in the units bookings are made of. All > 0.

    linear_s_per_token : matrix work of one prompt token, seconds
    attention_s_per_pair : attention between one new and one earlier token, seconds
    head_s : output head for one sampled token, seconds
    weights_s : one pass over the weights, the floor of any step, seconds
    context_s_per_token : reading the KV of one context token in a decode step, seconds
    """

    linear_s_per_token: float
    attention_s_per_pair: float
    head_s: float
    weights_s: float
    context_s_per_token: float

    def prefill_s(self, *, new_tokens: float, cached_tokens: float) -> float:
        """Prefill of `new_tokens` (>= 1) after `cached_tokens` (>= 0) on an otherwise idle replica, seconds."""
        require(new_tokens >= 1, "new_tokens", new_tokens, "below 1: an engine always computes one token")
        return self.work_s(prefill_work(new_tokens=new_tokens, cached_tokens=cached_tokens))

    def work_s(self, work: PrefillWork) -> float:
        compute_s = work.tokens * self.linear_s_per_token + work.pairs * self.attention_s_per_pair + self.head_s
        return max(compute_s, self.weights_s)

    def decode_step_s(self, *, context_tokens: float) -> float:
        """One decode step of a batch with `context_tokens` (>= 0) tokens of context in all, seconds."""
        require(0 <= context_tokens < float("inf"), "context_tokens", context_tokens)
        return self.weights_s + context_tokens * self.context_s_per_token


def rates_of(shape: ModelShape, card: Card) -> Rates:
    """Rates of `shape` on one `card`."""
    return Rates(
        linear_s_per_token=shape.linear_flops_per_token / card.flops_per_s,
        attention_s_per_pair=shape.attention_flops_per_pair / card.flops_per_s,
        head_s=shape.head_flops / card.flops_per_s,
        weights_s=shape.step_weights_bytes / card.bytes_per_s,
        context_s_per_token=shape.kv_bytes_per_token / card.bytes_per_s,
    )
