"""Receipts as columns: the numbers of many requests, by what they have in common.

Valid     NaN is unknown: nobody saw the first token, or nothing was expected of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan

import numpy as np
import numpy.typing as npt

from router.receipts import Receipt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

LENGTH_EDGES = (1024, 4096, 16384, 65536)  # tokens; a prompt of just this length is in the longer group
NO_ARM = "(none)"


def column(receipts: Sequence[Receipt], read: Callable[[Receipt], float | None]) -> Floats:
    """One number of each receipt; None becomes NaN."""
    values = (read(receipt) for receipt in receipts)
    return np.array([nan if value is None else value for value in values], dtype=np.float64)


def length_group(prompt_tokens: int) -> int:
    """0 (shortest) to len(LENGTH_EDGES)."""
    return int(np.searchsorted(LENGTH_EDGES, prompt_tokens, side="right"))


def length_name(group: int) -> str:
    """What a group is called.

    >>> [length_name(group) for group in (0, 1, 4)]
    ['under 1k', '1k to 4k', '64k and more']
    """
    thousands = [f"{edge // 1024}k" for edge in LENGTH_EDGES]
    if group == 0:
        return f"under {thousands[0]}"
    if group == len(thousands):
        return f"{thousands[-1]} and more"
    return f"{thousands[group - 1]} to {thousands[group]}"


def first_token_s(receipt: Receipt) -> float | None:
    """From arrival, as the client saw it; of answers that ended well."""
    return receipt.first_token_s if receipt.outcome == "ok" else None


def end_to_end_s(receipt: Receipt) -> float | None:
    """From arrival to the end of an answer that ended well."""
    return receipt.ended_s if receipt.outcome == "ok" else None


def per_token_s(receipt: Receipt) -> float | None:
    """Between two output tokens, on average, of an answer that ended well and has at least two.

    A stream without usage has its events counted for tokens: engines send one for each, unless told to send several.
    """
    if receipt.outcome != "ok" or receipt.first_token_s is None or receipt.ended_s is None:
        return None
    tokens = receipt.events if receipt.output_tokens is None else receipt.output_tokens
    if tokens is None or tokens < 2:
        return None
    return (receipt.ended_s - receipt.first_token_s) / (tokens - 1)


def failed(receipt: Receipt) -> float | None:
    """1 for a request that was not answered well through no fault of the client's, 0 for one that was."""
    return {"ok": 0.0, "failed": 1.0, "server_error": 1.0, "refused": 1.0}.get(receipt.outcome or "")


def arm_of(receipt: Receipt) -> str:
    return receipt.arm or NO_ARM
