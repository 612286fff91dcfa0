"""Which paths the traffic port answers itself, places by prompt, by load or by state, sends to all, or hides.

Model     one table; a path in no row is relayed by load, so that new engine routes work unchanged, unless that is
          switched off
Blind to  state itself: that a stored response lives on one replica is known, and `router.stored_answers` says on which
Source    routes of vLLM 0.33 and SGLang 0.5.23
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote


class Route(Enum):
    """What the traffic port does with a request. A closed set: it may become a metric label."""

    ANSWERED = "answered"  # by the router itself
    GENERATE = "generate"  # runs a prefill: placed by its prompt
    RELAY = "relay"  # placed by load alone
    STORED = "stored"  # goes to the replica that keeps the response it names
    ABORT = "abort"  # goes to the replicas that run the request it names
    TO_ALL = "to_all"  # changes every replica alike, for whoever has the admin key
    ADMIN_ONLY = "admin_only"  # 404 here: it changes or reveals a replica
    UNKNOWN = "unknown"  # in no row: placed by load, or 404


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    methods : those it is about; empty: all
    otherwise : what becomes of the others
    paths : in plain spelling; one that ends with a slash stands for everything below it
    """

    route: Route
    paths: tuple[str, ...]
    methods: frozenset[bytes] = frozenset()
    otherwise: Route = Route.ADMIN_ONLY


STORED_BELOW = "/v1/responses/"
_READS = frozenset({b"GET", b"HEAD"})
_POST = frozenset({b"POST"})

TABLE = (
    Row(Route.ANSWERED, ("/health", "/ready", "/version", "/v1/models"), _READS, Route.RELAY),
    Row(Route.ANSWERED, ("/ping",), _READS | _POST, Route.RELAY),  # hosting platforms probe with either
    Row(
        Route.GENERATE,
        (
            "/v1/chat/completions",
            "/v1/chat/completions/batch",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/generate",
            "/inference/v1/generate",
        ),
        _POST,
        Route.RELAY,
    ),
    Row(
        Route.RELAY,
        (
            "/v1/embeddings",
            "/v2/embed",
            "/encode",
            "/pooling",
            "/classify",
            "/v1/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/realtime",
            "/tokenize",
            "/v1/tokenize",
            "/detokenize",
            "/v1/detokenize",
            "/v1/messages/count_tokens",
            "/v1/chat/completions/render",
            "/v1/completions/render",
            "/v1/responses/render",
            "/v1/messages/render",
            "/v1/chat/completions/derender",
            "/v1/completions/derender",
            "/v1/models/",
            "/model_info",
            "/get_model_info",
        ),
    ),
    Row(Route.STORED, (STORED_BELOW,)),
    Row(Route.ABORT, ("/abort_request",), _POST),
    Row(
        Route.TO_ALL,
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"),
        _POST,
    ),
    Row(
        Route.ADMIN_ONLY,  # everything that changes a replica, stops its work for all clients, or shows its insides
        (
            "/metrics",
            "/metrics/",
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
        ),
    ),
)
_ROWS = {path: row for row in TABLE for path in row.paths if not path.endswith("/")}
_BELOW = tuple((path, row) for row in TABLE for path in row.paths if path.endswith("/"))


def classify(method: bytes, path: str) -> Route:
    """The class of one request.

    Parameters
    ----------
    method : upper-case method, as on the wire
    path : raw path, without the query; a replica decodes it, so the table is asked for the decoded form

    >>> classify(b"POST", "/v1/completions"), classify(b"GET", "//%6Detrics/")
    (<Route.GENERATE: 'generate'>, <Route.ADMIN_ONLY: 'admin_only'>)
    """
    row = _ROWS.get(path)
    if row is not None:
        return row.route if not row.methods or method in row.methods else row.otherwise
    return _classify_plain(method, _plain(path))


def template(path: str) -> str | None:
    """The table's own spelling of a path; None where it is in no row. So few there are that each can be a name.

    >>> template("//v1/completions"), template("/v1/responses/resp_1/cancel"), template("/scan/7")
    ('/v1/completions', '/v1/responses/*', None)
    """
    plain = path if path in _ROWS else _plain(path)
    if plain in _ROWS:
        return plain
    return next((f"{below}*" for below, _ in _BELOW if plain.startswith(below)), None)


def stored_id(path: str) -> str:
    """Id of the stored response that a path of class STORED names.

    >>> stored_id("/v1/responses/resp_1/cancel")
    'resp_1'
    """
    return _plain(path).removeprefix(STORED_BELOW).partition("/")[0]


def _classify_plain(method: bytes, plain: str) -> Route:
    row = _ROWS.get(plain) or next((row for below, row in _BELOW if plain.startswith(below)), None)
    if row is None:
        return Route.UNKNOWN
    route = row.route if not row.methods or method in row.methods else row.otherwise
    return Route.UNKNOWN if route is Route.ANSWERED else route  # who answers compares the path as it was spelled


def _plain(path: str) -> str:
    """Decoded, without empty and dot segments: another spelling must not open a hidden path."""
    decoded = unquote(path) if "%" in path else path
    return "/" + posixpath.normpath(decoded).lstrip("/")
