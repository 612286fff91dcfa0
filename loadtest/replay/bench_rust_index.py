"""The same questions to the radix tree of `ai-dynamo-runtime`, for `bench_directory`; it needs that package alone.

Work      prompts of 512 blocks over 64 workers, in JSON events of 64 blocks from each in turn, with ready hashes: no
          msgpack, no tokens to hash, so its events are the cheaper ones
Measure   wall time, medians; resident memory
"""

from __future__ import annotations

import json
import random
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

ROWS, PROMPT, TOGETHER = 64, 512, 64


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def matched_us(tree: Any, chains: list[list[int]]) -> float:
    taken = []
    for number in range(60):
        hashes = chains[number % len(chains)]
        started = time.perf_counter()
        found = tree.find_matches(hashes)
        taken.append(time.perf_counter() - started)
        assert max(found.scores.values()) == len(hashes)
    return median(taken) * 1e6


def main() -> None:
    blocks, chance = int(sys.argv[1]), random.Random(0)
    tree = import_module("dynamo._core").RadixTree()
    before, spent_s, number = resident_bytes(), 0.0, 0

    def announce(worker: int, hashes: list[int], parent: int | None) -> int:
        """Adds to the hashes of a chain; returns the parent of what comes next."""
        nonlocal spent_s, number
        told = [{"block_hash": chance.getrandbits(64), "tokens_hash": chance.getrandbits(64)} for _ in range(TOGETHER)]
        stored = {"stored": {"parent_hash": parent, "blocks": told}}
        event = json.dumps({"event_id": number, "data": stored, "dp_rank": 0}).encode()
        started = time.perf_counter()
        tree.apply_event(worker, event)
        spent_s += time.perf_counter() - started
        number += 1
        hashes += [block["tokens_hash"] for block in told]
        return told[-1]["block_hash"]

    def hold(workers: int, length: int) -> list[list[int]]:
        """The first workers announce a prompt each; returns the chains."""
        chains: list[list[int]] = [[] for _ in range(workers)]
        parents: list[int | None] = [None] * workers
        for _ in range(length // TOGETHER):
            for worker in range(workers):
                parents[worker] = announce(worker, chains[worker], parents[worker])
        return chains

    chains: list[list[int]] = []
    for prompt in range(0, blocks // PROMPT, ROWS):
        held = hold(min(ROWS, blocks // PROMPT - prompt), PROMPT)
        if len(chains) <= 40 * prompt * PROMPT // blocks:
            chains.append(held[prompt // ROWS % len(held)])
    numbers = {
        "bytes a block": (resident_bytes() - before) / blocks,
        "store 64, blocks/s": blocks / spent_s,
        "match 512, us": matched_us(tree, chains),
        "match 8192, us": matched_us(tree, hold(20, 8192)),
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
