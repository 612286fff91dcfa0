"""Section `discovery` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.http.contract import Count, Seconds

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class DiscoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `discovery`: how replicas come and go while the router runs."""

    # replicas at a time, those that are leaving included; unset: twice as many as at the start and at least 8 where
    # any can come, else as many as there are
    max_replicas: Count | None = None
    watch_fleet: bool = True  # take up changes of the fleet file
    dns_every_s: Seconds = 5.0  # between two look-ups of a dns:// name
    dns_grace_s: NotNegative = 10.0  # how long an address counts that answers lack: resolvers may tell a part of many
    dns_keep_s: Seconds = 300.0  # how long the last answer counts while look-ups fail; then the name has no replica
