"""How long the event loop stands still when a replica with a million blocks leaves.

Question  does forgetting all that one replica held, in one go, make streams and probes wait?
Work      a directory of two replicas with a million blocks of 16 tokens each, a quarter of them held by both, announced
          as vLLM does in stores of 64, hashes drawn with a fixed seed; then `clear` of one, as on a restart, and in
          another directory `drop_source` of one, as on removal
Measure   processor time of the call, which is one stretch of the event loop, and of the longest slice in which what is
          forgotten is then swept
Pass      all under 20 ms
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections.abc import Callable

import numpy as np

from estimators.tiers import Tier
from router.directory import Directory
from router.signals.wire import Batch, Stored

BLOCK, TOGETHER, SHARED = 16, 64, 4  # a quarter of the second replica's prompts are the first's
LIMIT_S = 0.020


def filled(blocks: int) -> Directory:
    """Two replicas that hold `blocks` each."""
    chance = np.random.default_rng(0)
    directory = Directory(BLOCK, 2, cap=4 * blocks + (1 << 20))
    for row in range(2):
        directory.add_source(row, "m")
    firsts: list[array[int]] = []
    for row in range(2):
        for number in range(blocks // TOGETHER):
            if row and number % SHARED == 0:
                tokens = firsts[number]
            else:
                tokens = array("I", chance.integers(0, 150_000, TOGETHER * BLOCK, dtype=np.uint32).tobytes())
            if not row:
                firsts.append(tokens)
            keys: list[int] = chance.integers(1, 2**63, TOGETHER, dtype=np.uint64).tolist()
            directory.put(row, Batch(events=[Stored(keys, None, tokens, BLOCK, Tier.HBM)]), 1.0)
    directory.stats()
    return directory


def took_s(blocks: int, forget: Callable[[Directory], None]) -> tuple[float, float]:
    """Seconds that forgetting the first replica takes, and the longest slice of what follows."""
    directory = filled(blocks)
    held = directory.stats().blocks[Tier.HBM]
    stretches_s: list[float] = []
    more = True
    while more:
        began_s = time.process_time()
        if stretches_s:
            more = directory.sweep()
        else:
            forget(directory)
        stretches_s.append(time.process_time() - began_s)
    left = directory.stats().blocks[Tier.HBM]
    assert held - left >= blocks * (SHARED - 1) // SHARED - TOGETHER, "what only it held is gone"
    return stretches_s[0], max(stretches_s[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    args = parser.parse_args()
    late = False
    for name, forget in (
        ("clear", lambda directory: directory.clear(0)),
        ("drop_source", lambda directory: directory.drop_source(0)),
    ):
        call_s, slice_s = took_s(args.blocks, forget)
        late = late or max(call_s, slice_s) >= LIMIT_S
        took = f"{1e3 * call_s:.1f} ms, then slices of {1e3 * slice_s:.1f} ms at most"
        print(f"{name:12} of {args.blocks:,} blocks: {took} (limit {1e3 * LIMIT_S:g} each)", flush=True)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
