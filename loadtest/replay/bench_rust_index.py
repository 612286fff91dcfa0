"""The same questions to the radix tree of `ai-dynamo-runtime`, for `bench_directory`; it needs that package alone.

Work      prompts of 512 blocks over 64 workers, in JSON events of 64 blocks with ready hashes: no msgpack, no tokens to
          hash, so its events are the cheaper ones
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

    def hold(worker: int, length: int) -> list[int]:
        nonlocal spent_s, number
        hashes, parent = [], None
        for _ in range(length // TOGETHER):
            told = [
                {"block_hash": chance.getrandbits(64), "tokens_hash": chance.getrandbits(64)} for _ in range(TOGETHER)
            ]
            stored = {"stored": {"parent_hash": parent, "blocks": told}}
            event = json.dumps({"event_id": number, "data": stored, "dp_rank": 0}).encode()
            started = time.perf_counter()
            tree.apply_event(worker, event)
            spent_s += time.perf_counter() - started
            number += 1
            parent = told[-1]["block_hash"]
            hashes += [block["tokens_hash"] for block in told]
        return hashes

    every = blocks // PROMPT // 40 + 1
    chains = []
    for prompt in range(blocks // PROMPT):
        hashes = hold(prompt % ROWS, PROMPT)
        if prompt % every == 0:
            chains.append(hashes)
    numbers = {
        "bytes a block": (resident_bytes() - before) / blocks,
        "store 64, blocks/s": blocks / spent_s,
        "match 512, us": matched_us(tree, chains),
        "match 8192, us": matched_us(tree, [hold(row, 8192) for row in range(20)]),
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
