"""What a section's table of the textbook's numbers is made of."""

from __future__ import annotations

from collections.abc import Callable

Rows = dict[str, Callable[[], tuple[float, str]]]  # id: number and unit, worked out when asked

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
PREFIX_TOKENS = 8192  # input of the chapter's request
OUTPUT_TOKENS = 1025  # of which the prefill samples the first
