"""How the router reaches its replicas: with which keys and certificates, at which addresses.

Model     relayed requests and the router's own calls carry the key a replica wants, chosen by the origin that is really
          asked, so that a redirect takes no key elsewhere. What clients sent to prove themselves stays here, except
          where the router stands in nobody's way: without keys of its own it passes, or where it is told to
Valid     http and https replicas; every connection is judged by the address that was reached, before a request is sent
Blind to  ZMQ: event publishers are addresses of their own, and are told nothing
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from estimators.view import is_nobody
from router.config import RouterConfig, addresses_for
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec
from router.gate import CREDENTIALS
from router.http.contract import Endpoint
from router.http.tls import upstream_context
from router.signals.fetch import Fetcher

Field = tuple[bytes, bytes]


class Outbound:
    """What is decided once about all replicas.

    addresses : judge of where they may be
    tls, tls_name : for https replicas; None: the system's trust store, the URL's host
    drops : lower-case names of client fields that are not sent on

    Raises
    ------
    ConfigError : a named environment variable holds no usable key, or a certificate file cannot be used
    """

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self.addresses = addresses_for(config)
        tls = config.upstream_tls
        self.tls: ssl.SSLContext | None = None if tls is None else upstream_context(tls)
        self.tls_name = None if tls is None else tls.server_name
        self._replicas = fleet.replicas
        self._default = fleet.api_key_env or config.api_key_env
        self._prompts_url = config.prompts.url
        self._keys: list[str | None]
        self._key_at: dict[tuple[str, str, int], str]
        self.members_changed()
        forwards = config.forward_credentials
        if forwards is None:
            forwards = config.client_keys is None and not self._key_at
        self.drops: frozenset[bytes] = frozenset() if forwards else CREDENTIALS
        self._replaces = not forwards  # relayed requests carry the router's key in place of the client's

    def members_changed(self) -> None:
        """The fleet's replicas are others than before, each of which `check` has passed."""
        self._keys = [
            None if is_nobody(replica.name) else key_in("api_key_env", replica.api_key_env or self._default)
            for replica in self._replicas
        ]
        self._key_at = {
            _origin(replica.url or ""): key
            for replica, key in zip(self._replicas, self._keys, strict=True)
            if key is not None
        }
        default_key = key_in("api_key_env", self._default)
        if self._prompts_url is not None and default_key is not None:
            self._key_at.setdefault(_origin(self._prompts_url), default_key)

    def check(self, replica: ReplicaSpec) -> None:
        """Raise `ConfigError` for a replica that cannot join a running router: by its address, or by its key."""
        self.addresses.check_urls([replica.url or ""])
        key = key_in("api_key_env", replica.api_key_env or self._default)
        if key is not None and not self._replaces:
            raise ConfigError(
                f"replica {replica.name!r} wants a key, and this router has passed clients' own ones on since it was"
                " started without one: restart it with the key"
            )

    @property
    def keeps_credentials(self) -> bool:
        """Whether calls made on a client's behalf must not carry its own key."""
        return bool(self.drops) or bool(self._key_at)

    def fields(self, row: int) -> list[Field]:
        """Fields added to a request that is relayed to this replica."""
        key = self._keys[row]
        return [(b"Authorization", b"Bearer " + key.encode())] if key is not None and self._replaces else []

    def endpoints(self) -> list[Endpoint]:
        """Every endpoint of the fleet, once, for what is sent to all; what it wants is the router's own key."""
        found: dict[str, Endpoint] = {}
        for replica, key in zip(self._replicas, self._keys, strict=True):
            if is_nobody(replica.name):
                continue
            url = (replica.url or "").rstrip("/")
            fields = () if key is None else ((b"Authorization", b"Bearer " + key.encode()),)
            found.setdefault(url, Endpoint(replica.name, url, fields))
        return list(found.values())

    def headers(self, base_url: str) -> dict[str, str]:
        """Headers of the router's own calls to this URL."""
        key = self._key_at.get(_origin(base_url))
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def fetcher(self, base_url: str, *, max_body_bytes: int) -> Fetcher:
        """Owner of one kept connection for calls made many times a second."""
        return Fetcher(
            base_url,
            self.headers(base_url),
            max_body_bytes=max_body_bytes,
            tls=self.tls,
            tls_name=self.tls_name,
            refused=self.addresses.refused,
        )

    def session(self) -> aiohttp.ClientSession:
        """For all other calls. Made inside a running loop; the caller closes it."""
        connector = aiohttp.TCPConnector(
            limit=0, ssl=self.tls if self.tls is not None else True, socket_factory=self._socket
        )
        return aiohttp.ClientSession(connector=connector, middlewares=(self._prepare,))

    async def _prepare(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Add what this origin, and no other, is to see; asked again for each redirect."""
        if "authorization" not in request.headers:
            request.headers.update(self.headers(str(request.url.origin())))
        if self.tls_name is not None and request.url.scheme == "https":
            request.server_hostname = self.tls_name
        return await handler(request)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """A socket for one resolved address, or `OSError` where no replica may be."""
        family, kind, protocol, _, where = address
        reason = self.addresses.refused(where[0], where[1])
        if reason is not None:
            raise OSError(errno.EADDRNOTAVAIL, reason)
        return socket.socket(family, kind, protocol)


def key_in(setting: str, variable: str | None) -> str | None:
    """The key that the environment variable named by a setting holds; None when the setting names none.

    Raises
    ------
    ConfigError : the variable is not set, or cannot be a header's value
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"{setting} names the environment variable {variable}, which holds no usable key")
    return key


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
