"""What a prefill is made of, in seconds at the roofline: the numbers that calibration puts its corrections on.

Model     an engine computes a prompt in steps of at most `step_tokens` tokens, of which every running decode takes
          one. A full step is bound by compute, which hides the reading of weights and KV; the last one, partly
          filled, may be bound by that reading
            linear     matrix work of the new tokens, and of the decodes' tokens in the same steps
            attention  the new tokens with all before them, and the decodes' with their contexts
            steps      passes over the weights, one for each step: what compute does not hide, and fixed work
            constant   one pass over the weights
            memory     what the compute of the last step lacks to the time of reading the weights and the decodes' KV
Valid     one prefill, or several that an engine packs into common steps: give their work and tokens together
Blind to  the last tokens' attention being dearer than the first ones'; decodes that come and go meanwhile
Source    Agrawal et al., Sarathi-Serve, OSDI 2024, sections 3 and 4 (chunked prefill beside decodes)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FEATURES = ("linear", "attention", "steps", "constant", "memory")

Floats = npt.NDArray[np.float64]
Numbers = float | Floats

# As arrays: a Python number among the operands is converted at every call, for as much as the call itself.
_ZERO, _ONE = np.array(0.0), np.array(1.0)


@dataclass(slots=True)  # not frozen: made for every decision, and checked assignments take a microsecond
class Beside:
    """What every step of a prefill holds besides it. Scalars, or arrays that broadcast with the prefill's.

    decodes : running requests past their first token, >= 0; each takes one token of a step
    linear_s : matrix work of their tokens and their output heads, seconds a step, >= 0
    attention_s : attention of their tokens, compute seconds a step, >= 0
    memory_s : reading the weights and all their KV once, seconds, > 0: the least a step takes
    weights_s : reading the weights once, seconds, > 0
    """

    decodes: Numbers
    linear_s: Numbers
    attention_s: Numbers
    memory_s: Numbers
    weights_s: Numbers


def prior_coefficients() -> Floats:
    """The roofline itself: compute where it binds, else memory; no fixed cost."""
    return np.array([1.0, 1.0, 0.0, 0.0, 1.0])


def prefill_features(
    *,
    linear_s: Numbers,
    attention_s: Numbers,
    new_tokens: Numbers,
    beside: Beside,
    step_tokens: int,
) -> Floats:
    """Features of prefills in the order of `FEATURES`, shape (features, ...); seconds, >= 0.

    Nothing is checked: this is called for every candidate of every decision.

    Parameters
    ----------
    linear_s, attention_s : the prefill's own work, seconds at the roofline, >= 0
    new_tokens : tokens computed, > 0; of the arguments this one has the full shape
    step_tokens : tokens an engine computes in one step at most, >= 1; a prefill gets at least one of them
    """
    # Each line is one pass over the arrays: this is the largest part of a decision.
    room = np.maximum(np.subtract(step_tokens, beside.decodes), 1.0)
    features = np.empty((len(FEATURES), *np.shape(new_tokens)))
    steps = np.ceil(np.divide(new_tokens, room))
    own_s = np.add(linear_s, attention_s)
    before_last = (steps * room - room) / new_tokens  # share of the prefill in full steps
    last_s = own_s - own_s * before_last
    np.add(linear_s, steps * beside.linear_s, out=features[0, ...])
    np.add(attention_s, steps * beside.attention_s, out=features[1, ...])
    np.multiply(steps, beside.weights_s, out=features[2, ...])
    features[3] = beside.weights_s
    np.maximum(
        np.subtract(beside.memory_s, np.add(beside.linear_s, beside.attention_s)) - last_s, 0.0, out=features[4, ...]
    )
    return features


def prefill_s(
    *,
    linear_s: Floats,
    attention_s: Floats,
    new_tokens: Floats,
    beside: Beside,
    step_tokens: int,
    coefficients: Floats,
) -> Floats:
    """`prefill_features` times `coefficients`, seconds, without making the features: for every candidate at once.

    The arguments are as there, the first three of shape (candidates, rows); coefficients : (rows, features).
    """
    # All numbers of a row are spread over its candidates in one assignment: every pass after it is over arrays of one
    # shape, at a third of the price.
    by_row = np.empty((len(FEATURES) + 2, new_tokens.shape[-1]))
    by_row[: len(FEATURES)] = coefficients.T
    linear, attention, step_s, constant_s, _memory, room, gap_s = by_row
    constant_s *= beside.weights_s
    step_s *= beside.weights_s
    step_s += linear * beside.linear_s
    step_s += attention * beside.attention_s
    np.subtract(step_tokens, beside.decodes, out=room)
    np.maximum(room, _ONE, out=room)
    np.subtract(beside.memory_s, beside.linear_s, out=gap_s)
    gap_s -= beside.attention_s
    spread = np.empty((len(by_row), *new_tokens.shape))
    spread[:] = by_row[:, None]

    compute_s, attention, step_s, constant_s, memory, room, gap_s = spread
    own_s = linear_s + attention_s
    full = np.divide(new_tokens, room, out=room)  # steps' worth of tokens
    steps = np.ceil(full)
    # The last step's part of the work: own (full - (steps - 1)) / full.
    last_s = full - steps
    last_s *= own_s
    last_s += own_s
    last_s /= full
    gap_s -= last_s
    np.maximum(gap_s, _ZERO, out=gap_s)
    memory *= gap_s
    compute_s *= linear_s
    attention *= attention_s
    step_s *= steps
    compute_s += attention
    compute_s += step_s
    compute_s += constant_s
    compute_s += memory
    return np.asarray(compute_s)
