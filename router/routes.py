"""Which paths the traffic port answers itself, places as generation, relays by load, or hides.

Model     one table; a path in no row is relayed by load, so that new engine routes work unchanged
Blind to  state: a stored response or a running request lives on one replica, and the class does not say which
Source    routes of vLLM 0.33 and SGLang 0.5.23
"""

from __future__ import annotations

import posixpath
from enum import Enum
from urllib.parse import unquote


class Route(Enum):
    """What the traffic port does with a request. A closed set: it may become a metric label."""

    ANSWERED = "answered"  # by the router itself
    GENERATE = "generate"  # runs a prefill: placed by its prompt
    RELAY = "relay"  # placed by load alone
    ADMIN_ONLY = "admin_only"  # 404 here: it changes or reveals a replica


_READS = frozenset({b"GET", b"HEAD"})

_ANSWERED: dict[str, frozenset[bytes]] = {
    "/health": _READS,
    "/ready": _READS,
    "/ping": _READS | {b"POST"},  # hosting platforms probe with either
    "/version": _READS,
    "/v1/models": _READS,
}

_GENERATE = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/inference/v1/generate",
    }
)

# Everything that changes a replica, stops its work for all clients, or tells about its insides. Adapters and
# aborts are here because one replica chosen by load is the wrong addressee for them.
_ADMIN_ONLY = frozenset(
    {
        "/metrics",
        "/load",
        "/get_load",
        "/v1/loads",
        "/kv_event_sources",
        "/server_info",
        "/get_server_info",
        "/get_internal_state",
        "/set_internal_state",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/flush_cache",
        "/clear_hicache_storage_backend",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/pause_generation",
        "/continue_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/slow_down",
        "/collective_rpc",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/start_profile",
        "/stop_profile",
        "/start_expert_distribution_record",
        "/stop_expert_distribution_record",
        "/dump_expert_distribution_record",
        "/configure_logging",
        "/update_weights",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weight_version",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/init_weight_transfer_engine",
        "/get_weights_by_name",
        "/abort_request",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
    }
)


def classify(method: bytes, path: str) -> Route:
    """The class of one request.

    Parameters
    ----------
    method : upper-case method, as on the wire
    path : raw path, without the query; a replica decodes it, so the table is asked for the decoded form

    >>> classify(b"POST", "/v1/completions"), classify(b"GET", "//%6Detrics/")
    (<Route.GENERATE: 'generate'>, <Route.ADMIN_ONLY: 'admin_only'>)
    """
    if path in _GENERATE:
        return Route.GENERATE if method == b"POST" else Route.RELAY
    plain = _plain(path)
    if plain in _ADMIN_ONLY or plain.startswith("/metrics/"):
        return Route.ADMIN_ONLY
    if method in _ANSWERED.get(path, ()):  # as spelled: who answers compares the path itself
        return Route.ANSWERED
    return Route.GENERATE if method == b"POST" and plain in _GENERATE else Route.RELAY


def _plain(path: str) -> str:
    """Decoded, without empty and dot segments: another spelling must not open a hidden path."""
    decoded = unquote(path) if "%" in path else path
    return "/" + posixpath.normpath(decoded).lstrip("/")
