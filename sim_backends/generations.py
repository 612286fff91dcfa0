"""The engine releases a replica can speak as: what changes on the wire between them, by version.

Each name stands for the releases from its own version up to the next name of its engine.

Source    released vLLM 0.9.2 to 0.33.0 and SGLang 0.5.6 to 0.5.23
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Generation:
    """One wire generation.

    name : as `--events` takes it
    version : the release it answers as and is compared by
    """

    name: str
    engine: Literal["vllm", "sglang"]
    version: tuple[int, int, int]

    @property
    def release(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def is_sglang(self) -> bool:
        return self.engine == "sglang"

    @property
    def topic_in_replay(self) -> bool:
        """Whether replies to a replay request carry the topic as a frame of their own."""
        return self.version >= ((0, 5, 22) if self.is_sglang else (0, 26, 0))

    @property
    def flat_errors(self) -> bool:
        """Whether an error's fields stand at the top of its body and not under `error`."""
        return self.is_sglang or self.version <= (0, 10, 0)

    @property
    def can_send_raw_hashes(self) -> bool:
        """Whether events may carry whole digests as bytes in place of 64-bit integers."""
        return not self.is_sglang and self.version >= (0, 10, 2)

    @property
    def tells_event_sources(self) -> bool:
        """Whether vLLM's /kv_event_sources is there."""
        return not self.is_sglang and self.version >= (0, 31, 0)


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("vllm-0.9", "vllm", (0, 9, 2)),
        Generation("vllm-0.12", "vllm", (0, 12, 0)),
        Generation("vllm-0.17", "vllm", (0, 17, 1)),
        Generation("vllm-0.23", "vllm", (0, 23, 0)),
        Generation("vllm-0.24", "vllm", (0, 24, 0)),
        Generation("vllm-0.33", "vllm", (0, 33, 0)),
        Generation("sglang-0.5.6", "sglang", (0, 5, 6)),
        Generation("sglang-0.5.9", "sglang", (0, 5, 9)),
        Generation("sglang-0.5.18", "sglang", (0, 5, 18)),
        Generation("sglang-0.5.23", "sglang", (0, 5, 23)),
    )
}
DEFAULT = GENERATIONS["vllm-0.33"]
