"""How long one engine step lasts on a card.

Model     step = overhead + activations + max(compute, memory), times a log-normal factor with mean 1, and now and
          then times a straggler's factor; a slow replica takes longer for all of it.
          compute: linear FLOPs at an efficiency that saturates with the tokens in the step, plus causal
          attention FLOPs at a lower one; memory: all weights once, plus the KV that decodes read
Valid     steps of 1 to some ten thousand tokens on one card, dense models, BF16
Blind to  tensor parallelism, CUDA graph sizes, quantisation, KV read again by later chunks of one prompt
Source    the shape of the curve follows what chunked prefill shows on real cards (Agrawal et al., Sarathi-Serve,
          OSDI 2024, fig. 4); the constants are round numbers and no measurement of one engine release.
          On purpose not the router's roofline: an estimate that shares its constants is right by construction
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from sim_backends.fleet import Card, Model


@dataclass(frozen=True, slots=True)
class Constants:
    """What separates a card from its data sheet. Shares of 1 unless a unit is named."""

    linear_efficiency: float = 0.465  # of peak, reached by matrix products with very many rows
    unhidden_weight_read: float = 0.5  # of the weight read that the matrix products cannot hide: small chunks pay
    attention_efficiency: float = 0.35  # of peak, by causal attention with its softmax
    memory_efficiency: float = 0.80  # of data sheet bandwidth, by long reads
    activation_passes_hidden: float = 24.0  # reads and writes of the hidden state per layer outside the products
    activation_passes_intermediate: float = 6.0  # the same for the MLP's wide state
    step_overhead_s: float = 1.5e-3  # scheduler, launches, sampling, detokenising: per step, divided by speed


class Jitter:
    """Factors on steps, one for each in turn. Drawn in advance; what was not used can go back.

    sigma : of the log of a log-normal factor with mean 1, >= 0
    straggler_share, straggler_factor : that share of steps (0..1) takes that much longer still (>= 1)
    """

    _DRAWN_AT_ONCE = 1024

    def __init__(
        self, sigma: float, rng: random.Random, *, straggler_share: float = 0.0, straggler_factor: float = 1.0
    ) -> None:
        self._sigma = sigma
        self._straggler_share = straggler_share
        self._straggler_factor = straggler_factor
        self._rng = np.random.default_rng(rng.getrandbits(64))
        self._factors: list[float] = []
        self._next = 0

    def take(self, count: int) -> list[float]:
        """The next `count` factors."""
        while self._next + count > len(self._factors):
            self._factors = self._factors[self._next :] + self._draw()
            self._next = 0
        first, self._next = self._next, self._next + count
        return self._factors[first : self._next]

    def give_back(self, count: int) -> None:
        """The last `count` factors of the last `take` were not used: they come again."""
        assert count <= self._next, "no more goes back than was taken"
        self._next -= count

    def _draw(self) -> list[float]:
        normal = self._rng.standard_normal(self._DRAWN_AT_ONCE)
        factors = np.exp(self._sigma * normal - 0.5 * self._sigma**2)
        if self._straggler_share > 0.0:
            factors[self._rng.random(self._DRAWN_AT_ONCE) < self._straggler_share] *= self._straggler_factor
        drawn: list[float] = factors.tolist()
        return drawn


class ServiceTimes:
    """Step durations of one replica. Owns its stream of chance; calls must come in step order.

    slow_factor : every step planned from now on takes so many times longer, > 0; may be set at any time
    """

    def __init__(
        self,
        model: Model,
        card: Card,
        *,
        speed: float,
        jitter: float,
        rng: random.Random,
        straggler_share: float = 0.0,
        straggler_factor: float = 1.0,
        constants: Constants | None = None,
    ) -> None:
        """`speed` > 0 scales the hardware; for the others see `Jitter`."""
        use = constants or Constants()
        peak = card.peak_tflops * 1e12 * speed
        read_bytes_per_s = card.memory_gb_s * 1e9 * speed * use.memory_efficiency
        linear_flops_per_s = peak * use.linear_efficiency
        weights_read = model.value_bytes * (model.linear_parameters + model.head_parameters)
        activation_bytes = (
            model.layers
            * model.value_bytes
            * (use.activation_passes_hidden * model.hidden + use.activation_passes_intermediate * model.intermediate)
        )
        self._token_s = 2.0 * model.linear_parameters / linear_flops_per_s
        self._emit_s = 2.0 * model.head_parameters / linear_flops_per_s
        self._pair_s = 4.0 * model.layers * model.heads * model.head_dim / (peak * use.attention_efficiency)
        self._weights_s = weights_read / read_bytes_per_s
        self._floor_s = use.unhidden_weight_read * self._weights_s
        self._kv_token_s = model.kv_bytes_per_token / read_bytes_per_s
        self._activation_s = activation_bytes / read_bytes_per_s
        self._overhead_s = use.step_overhead_s / speed
        self.slow_factor = 1.0
        self._jitter = None
        if jitter or straggler_share:
            self._jitter = Jitter(jitter, rng, straggler_share=straggler_share, straggler_factor=straggler_factor)

    def step_s(self, *, tokens: int, pairs: float, kv_tokens_read: int, emitting: int) -> float:
        """Duration of one step, seconds, > 0.

        Parameters
        ----------
        tokens : tokens computed in the step, >= 1
        pairs : query-key pairs, new x cached + new^2 / 2 summed over sequences
        kv_tokens_read : cached tokens that decoding sequences read
        emitting : sequences that emit a token at the end of the step, <= tokens
        """
        compute_s = self._floor_s + tokens * self._token_s + emitting * self._emit_s + pairs * self._pair_s
        memory_s = self._weights_s + kv_tokens_read * self._kv_token_s
        exact_s = self._overhead_s + tokens * self._activation_s + (compute_s if compute_s > memory_s else memory_s)
        return exact_s * (self.slow_factor if self._jitter is None else self._jitter.take(1)[0] * self.slow_factor)

    def decode_ends_s(self, start_s: float, steps: int, *, decoding: int, kv_tokens_read: int) -> list[float]:
        """When `steps` steps of the same `decoding` requests and nothing else end, in order.

        `kv_tokens_read` is that of the first step; each request reads one token more in each next one. To the last
        digit the times that `step_s` gives one by one.
        """
        fixed_s = self._overhead_s + decoding * self._activation_s
        compute_fixed_s = self._floor_s + decoding * self._token_s + decoding * self._emit_s
        weights_s, pair_s, kv_token_s = self._weights_s, self._pair_s, self._kv_token_s
        slow = self.slow_factor
        factors = repeat(1.0, steps) if self._jitter is None else self._jitter.take(steps)
        ends_s: list[float] = []
        at_s = start_s
        for factor in factors:
            compute_s = compute_fixed_s + kv_tokens_read * pair_s
            memory_s = weights_s + kv_tokens_read * kv_token_s
            at_s += (fixed_s + (compute_s if compute_s > memory_s else memory_s)) * (factor * slow)
            ends_s.append(at_s)
            kv_tokens_read += decoding
        return ends_s

    def give_back(self, steps: int) -> None:
        """The last `steps` steps of the last `decode_ends_s` did not take place."""
        if self._jitter is not None:
            self._jitter.give_back(steps)
