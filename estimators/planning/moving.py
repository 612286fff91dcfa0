"""How long it takes to move running work: copying state that still grows, and changing how cards share a model.

Model     copy in the background: V bytes at first, growing by g a second, copied at B; caught up after V / (B - g).
          What came meanwhile, g V / (B - g), was copied too; the last of it while the source stands still
          switch: bytes over the network, then built in place, then what is prepared (groups, graphs, routes); what is
          prepared beforehand runs beside the transfer
Valid     even growth and rate; one stream on the link
Blind to  finding the target, checking versions; traffic that shares the link
Source    AI Infra textbook, section 9.6.2
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from estimators.ranges import require


@dataclass(frozen=True, slots=True)
class CatchUp:
    """seconds : until the copy is level with its source, inf where it never is; grown_bytes : added meanwhile"""

    seconds: float
    grown_bytes: float


def catch_up(*, state_bytes: float, growth_bytes_per_s: float, copy_bytes_per_s: float) -> CatchUp:
    """A copy of `state_bytes` (>= 0) that grow meanwhile; growth >= 0, copy rate > 0."""
    require(0 <= state_bytes < inf, "state_bytes", state_bytes)
    require(0 <= growth_bytes_per_s < inf, "growth_bytes_per_s", growth_bytes_per_s)
    require(0 < copy_bytes_per_s < inf, "copy_bytes_per_s", copy_bytes_per_s)
    if state_bytes == 0:
        return CatchUp(0.0, 0.0)
    gain = copy_bytes_per_s - growth_bytes_per_s
    if gain <= 0:
        return CatchUp(inf, inf)
    seconds = state_bytes / gain
    return CatchUp(seconds, seconds * growth_bytes_per_s)


def source_bytes(*, state_bytes: float, growth_bytes_per_s: float, at_s: float) -> float:
    """What the source has at `at_s` >= 0, as far as it was there or came since the copy began."""
    require(0 <= at_s < inf, "at_s", at_s)
    return state_bytes + growth_bytes_per_s * at_s


def copied_bytes(*, state_bytes: float, growth_bytes_per_s: float, copy_bytes_per_s: float, at_s: float) -> float:
    """What the copy has at `at_s` >= 0: its link's share until it is level with the source, then as the source."""
    whole = source_bytes(state_bytes=state_bytes, growth_bytes_per_s=growth_bytes_per_s, at_s=at_s)
    return min(copy_bytes_per_s * at_s, whole)


@dataclass(frozen=True, slots=True)
class Switch:
    """Parts of a change of parallelism, seconds, >= 0.

    transfer_s : weights and state over links; build_s : tensors made in place from what came
    prepare_s : communication groups, graphs, taking requests again
    """

    transfer_s: float
    build_s: float
    prepare_s: float

    def __post_init__(self) -> None:
        for name in ("transfer_s", "build_s", "prepare_s"):
            require(0 <= getattr(self, name) < inf, name, getattr(self, name))

    @property
    def serial_s(self) -> float:
        """One after another."""
        return self.transfer_s + self.build_s + self.prepare_s

    def overlapped_s(self, early_share: float) -> float:
        """With that share (0..1) of the preparation done beside transfer and building."""
        require(0 <= early_share <= 1, "early_share", early_share)
        early_s = self.prepare_s * early_share
        return max(self.transfer_s + self.build_s, early_s) + self.prepare_s - early_s


def switch(
    *,
    network_bytes: float,
    network_bytes_per_s: float,
    built_bytes: float,
    memory_bytes_per_s: float,
    prepare_s: float,
) -> Switch:
    """A switch from bytes and rates. Bytes and prepare_s >= 0, rates > 0.

    network_bytes : that pass the busiest link; built_bytes : read and written in the card's own memory
    """
    require(0 <= network_bytes < inf, "network_bytes", network_bytes)
    require(0 < network_bytes_per_s < inf, "network_bytes_per_s", network_bytes_per_s)
    require(0 <= built_bytes < inf, "built_bytes", built_bytes)
    require(0 < memory_bytes_per_s < inf, "memory_bytes_per_s", memory_bytes_per_s)
    return Switch(network_bytes / network_bytes_per_s, built_bytes / memory_bytes_per_s, prepare_s)
