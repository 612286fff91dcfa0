"""Section `directory` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Blocks = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]  # as many as the tables can number


class DirectoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `directory`: how much is believed of what replicas and stores hold, and how long without word of it."""

    # of all replicas and the store together, some 80 bytes each; beyond it the oldest are forgotten, which loses hits
    # and nothing else
    blocks: Blocks = 1 << 23
    source_blocks: Blocks = 1 << 20  # of one replica, or of one model in the store; likewise
    removed_blocks: Blocks = 1 << 17  # names remembered of blocks that are gone: other tiers announce them later
    expected_blocks: Blocks = 1 << 20  # that requests in flight will leave; of those beyond it nothing is expected
    expected_s: Seconds = 120.0  # how long a request in flight is expected to leave its blocks
    missed_s: Seconds = 30.0  # how long a copy that was not there, or did not come, gets no credit
    forget_after_s: Seconds = 10.0  # how long a publisher that is not connected, or posts nothing, is believed
    # taken for the cache of a replica without events that does not say its size: more finds more, and more that is gone
    guessed_blocks: Blocks = 2048
