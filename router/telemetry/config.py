"""Section `tracing` of the configuration."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/\s?#@]+(/[^\s?#]*)?$")]

NOT_INSTALLED = "tracing.endpoint needs the extra otlp: pip install 'tfirst[otlp]'"


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `tracing`: where spans go, by OTLP over HTTP. No endpoint: there are none, and they cost nothing."""

    endpoint: Url | None = None  # for example http://collector:4318/v1/traces
    share: Share = 0.05  # of requests whose client does not say whether its trace is sampled; else the client decides
    service_name: Annotated[str, msgspec.Meta(min_length=1)] = "tfirst"  # what spans call the router
    timeout_s: Seconds = 5.0  # for one batch, and for all that is left at shut-down; the rest is dropped

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            check_address(self.endpoint)


def check_address(url: str) -> None:
    """Raises ValueError where host or port of a URL can be none."""
    try:
        parts = urlsplit(url)
        known = bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{url!r} names no host and port")
