"""Where a replica's URL may lead: not to this router itself, and not to the metadata of the machine it runs on.

Model     addresses are judged, not names: literal ones when the configuration is read, and at every connection the one
          that was reached, because what a name leads to can change between two look-ups. No request is sent before
Valid     IPv4 and IPv6, and IPv4 inside IPv6 (mapped, 6to4, NAT64)
Blind to  this router behind another address (a load balancer's): there the mark in `Via` refuses the loop
Source    RFC 3927, RFC 4291 section 2.5.6, RFC 6052; metadata services of AWS, Azure, Google (169.254.169.254,
          fd00:ec2::254) and Alibaba (100.100.100.200)
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from router.errors import ConfigError

_METADATA = frozenset({ip_address("fd00:ec2::254"), ip_address("100.100.100.200")})
_NAT64 = ip_network("64:ff9b::/96")
_ANY = ("", "0.0.0.0", "::")

Address = IPv4Address | IPv6Address
Listener = tuple[str, int]  # host and port listened on, as configured


def is_local(address: str) -> bool:
    """Whether this machine has the address: only those can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class SafeAddresses:
    """listeners : of this router
    allow_link_local : lets link-local and metadata addresses pass
    local : whether an address is this machine's; asked only where the port is one of ours
    """

    def __init__(
        self, listeners: Iterable[Listener], *, allow_link_local: bool, local: Callable[[str], bool] = is_local
    ) -> None:
        self._hosts_on: dict[int, set[str]] = {}
        for host, port in listeners:
            self._hosts_on.setdefault(port, set()).add("127.0.0.1" if host == "localhost" else host)
        self._hosts_on.pop(0, None)  # the system's choice is not known yet
        self._allow_link_local = allow_link_local
        self._local = local

    def refused(self, address: str, port: int) -> str | None:
        """Why no replica may be at a numeric address; None when one may."""
        try:
            given = ip_address(address.partition("%")[0])
        except ValueError:
            return f"{address} is no IP address"
        real = _inside(given)
        if not self._allow_link_local and (real.is_link_local or real in _METADATA):
            return f"{address} is a link-local or metadata address (allow_link_local: true permits it)"
        if self._is_ours(str(real), port):
            return f"{address}, port {port}, is this router itself"
        return None

    def check_urls(self, urls: Iterable[str]) -> None:
        """Raise `ConfigError` for a URL whose host is such an address in any spelling; names are left for later."""
        for url in urls:
            parts = urlsplit(url)
            literal = _literal(parts.hostname or "")
            if literal is None:
                continue
            reason = self.refused(literal, parts.port or (443 if parts.scheme == "https" else 80))
            if reason is not None:
                raise ConfigError(f"{url} cannot be a replica: {reason}")

    def _is_ours(self, address: str, port: int) -> bool:
        hosts = self._hosts_on.get(port)
        if hosts is None:
            return False
        if address in hosts or address in _ANY:
            return True
        return not hosts.isdisjoint(_ANY) and self._local(address)


def _literal(host: str) -> str | None:
    """The address a host is, also in the spellings that only the C library knows (`0xA9FEA9FE`); None for a name."""
    if host == "localhost":
        return "127.0.0.1"
    if ":" in host:
        return host
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def _inside(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it does."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
