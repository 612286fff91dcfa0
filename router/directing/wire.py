"""How engines and LMCache are told, as bytes; and what the answers of LMCache say.

Model     a peer to read, with the request: field `x-kv-cache-source-host-port` of its head, host:port of the peer; or
          `"remote_kv_source": {"kv_request_id", "remote_host", "remote_port"}` in `kv_transfer_params` of its body.
          Ahead of the request: LMCache's controller copies (POST /move) or keeps (POST /pin) what an instance has of a
          prompt, and its coordinator loads what the store has (POST /cache/prefetches), which is taken back by
          DELETE /cache/prefetches/INSTANCE/ID
Valid     llm-d's routing sidecar from 2026; vLLM's OffloadingConnector behind it; LMCache 0.5.6
Blind to  releases that name the member `p2p`. LMCache 0.5.6 has no way to take a copy, a pin or a prefetch back: it
          answers the last with 404 or 405, which says so, and goes on
Source    llm-d's routing sidecar (KV cache source header and OffloadingConnector P2P parameters), LMCache's controller
          and coordinator, by their documentation and schemas
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

SOURCE_HEADER = b"x-kv-cache-source-host-port"
TRANSFER_FIELD = "kv_transfer_params"

MOVE_PATH = "/move"
PIN_PATH = "/pin"
PREFETCH_PATH = "/cache/prefetches"


class BadReply(ValueError):
    """An answer that is none to the call; the message says why."""


class _Started(msgspec.Struct, frozen=True):
    """Controller: num_tokens it found. Coordinator: 0 chunks is a prompt too short, which has no request_id."""

    num_tokens: int | None = None
    request_id: str | None = None
    chunks: int | None = None


_started = msgspec.json.Decoder(_Started)
_encode = msgspec.json.encode


def source_field(host: str, port: int) -> tuple[bytes, bytes]:
    """The header field that names the peer to read."""
    shown = f"[{host}]" if ":" in host else host
    return SOURCE_HEADER, f"{shown}:{port}".encode()


def source_member(host: str, port: int, own_id: str) -> bytes:
    """The member of `kv_transfer_params` that names the peer to read. own_id : of this read, unique at its reader"""
    source = {"kv_request_id": own_id, "remote_host": host, "remote_port": port}
    return b'"remote_kv_source":' + _encode(source)


def move_body(ids: bytes, *, source: str, target: str, location: str) -> bytes:
    """Body of POST /move, which leaves the source its copy. ids : JSON list of token ids"""
    return _with_ids(
        {"old_position": [source, location], "new_position": [target, location], "copy": True}, b"tokens", ids
    )


def pin_body(ids: bytes, *, instance: str, location: str) -> bytes:
    """Body of POST /pin."""
    return _with_ids({"instance_id": instance, "location": location}, b"tokens", ids)


def prefetch_body(ids: bytes, *, instance: str, model: str, world_size: int, salt: str) -> bytes:
    """Body of POST /cache/prefetches."""
    told: dict[str, Any] = {"instance_id": instance, "model_name": model, "world_size": world_size, "cache_salt": salt}
    return _with_ids(told, b"token_ids", ids)


def prefetch_path(instance: str, request_id: str) -> str:
    """Path of one prefetch under way."""
    return f"{PREFETCH_PATH}/{quote(instance, safe='')}/{quote(request_id, safe='')}"


def found_tokens(body: bytes) -> int:
    """Tokens that the controller will copy or keep. Raises BadReply."""
    started = _read(body)
    if started.num_tokens is None or started.num_tokens < 0:
        raise BadReply("no num_tokens in it")
    return started.num_tokens


def prefetch_id(body: bytes) -> str | None:
    """What the coordinator calls a prefetch it has begun; None: there was nothing to load. Raises BadReply."""
    started = _read(body)
    if not started.request_id and started.chunks is None:
        raise BadReply("neither request_id nor chunks in it")
    return started.request_id or None


def _read(body: bytes) -> _Started:
    try:
        return _started.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadReply(f"not an answer of LMCache: {exc}") from exc


def _with_ids(told: dict[str, Any], name: bytes, ids: bytes) -> bytes:
    """`told` with one more member, whose JSON is copied as it came: a long prompt's ids are megabytes."""
    return b"".join((_encode(told)[:-1], b',"', name, b'":', ids, b"}"))
