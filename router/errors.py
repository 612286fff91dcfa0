"""Errors the router raises, with their facts as attributes; they become HTTP once, at the edge."""

from __future__ import annotations


class RouterError(Exception):
    """Base of everything the router raises on purpose."""


class RequestUnacceptable(RouterError):
    """The client's bytes cannot become a request; nothing of them was forwarded.

    status : HTTP status of the answer, 400..599
    kind : the error's `type` in the answer, for example "BadRequestError"
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


class ReplicaUnreachable(RouterError):
    """No connection to an endpoint could be made within its limit."""

    def __init__(self, base_url: str, reason: str) -> None:
        super().__init__(f"no connection to {base_url}: {reason}")
        self.base_url = base_url
        self.reason = reason


class AnswerUnacceptable(RouterError):
    """A replica's bytes are not an HTTP answer this router can relay."""


class ConfigError(RouterError):
    """A configuration or fleet file, or a flag, that cannot be used. Start-up stops with exit status 2."""


class PortInUse(RouterError):
    """An address to listen on that cannot be had. Start-up stops with exit status 1."""

    def __init__(self, host: str, port: int, what: str, why: str) -> None:
        super().__init__(f"cannot listen on {host}:{port} for {what}: {why}")
        self.host = host
        self.port = port
