"""Whose request this is: keys of clients, of which the router keeps no more than digests, and the admin's key.

Model     a client sends its key; its SHA-256 digest is looked up, and what is found is compared in constant time.
          Whoever times the look-up learns about digests, and nobody can choose a key by its digest
Valid     keys of at least 32 random bytes, as `new_key` makes them: there is nothing to guess, so a slow hash (scrypt)
          would buy nothing and cost 50 ms a request, or a cache of plain keys. Shorter ones of old are refused
Blind to  what a key may do: each opens everything the traffic port serves
Source    RFC 6750 for the header; NIST SP 800-63B 5.1.1.2 asks slow hashes of secrets that people choose
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from router.errors import ConfigError

SHORTEST_KEY = 32  # characters; of hexadecimal digits these are 128 bits
_PREFIX = "tfirst-"  # lets scanners of repositories and logs know a key that leaked
_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})[ \t]+sha256:(?P<digest>[0-9a-fA-F]{64})")


def new_key() -> str:
    """A key nobody has: 256 bits of chance."""
    return _PREFIX + secrets.token_urlsafe(32)


def key_line(name: str, key: str) -> str:
    """The line of the keys file that lets `key` in as `name`.

    Raises
    ------
    ValueError : the name cannot be a label, or the key could be guessed or cannot stand in a header
    """
    if not name_is_usable(name):
        raise ValueError(f"{name!r} cannot name a key: letters, digits, '.', '_' and '-', at most 64 of them")
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"a key has at least {SHORTEST_KEY} printable ASCII characters and no space, all random")
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def name_is_usable(name: str) -> bool:
    """Whether `name` may name a key: it becomes a metric label and stands in receipts."""
    return _LINE.fullmatch(f"{name} sha256:{'0' * 64}") is not None


def bearer(value: bytes | None) -> bytes:
    """The key in an Authorization field; b"" without one.

    >>> bearer(b"bearer  abc"), bearer(b"Basic abc"), bearer(None)
    (b'abc', b'', b'')
    """
    if value is None or value[:7].lower() != b"bearer ":
        return b""
    return value[7:].strip()


class SecretKey:
    """One key that is known in the clear, as from an environment variable. It does not show itself."""

    __slots__ = ("_digest",)

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest()

    def matches(self, given: bytes) -> bool:
        """In a time that tells nothing, not even the length."""
        return hmac.compare_digest(hashlib.sha256(given).digest(), self._digest)


class ClientKeys:
    """The keys that let clients in. names : of each digest."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self._names = {digest: (digest, name) for digest, name in names.items()}

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, name in self._names.values())

    def name_of(self, key: bytes) -> str | None:
        """Who sent `key`; None when nobody has it."""
        digest = hashlib.sha256(key).digest()
        found = self._names.get(digest)
        return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None


def parse_keys(text: str, where: str) -> ClientKeys:
    """Read a keys file: lines of `NAME sha256:DIGEST`; `#` begins a comment. A name may have several keys.

    Raises
    ------
    ConfigError : a line is anything else, a key occurs twice, or there is none. No message repeats a line: somebody may
        have put a key there in the clear
    """
    names: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ConfigError(f"{where}, line {number}: not of the form NAME sha256:DIGEST (see `tfirst key new NAME`)")
        digest = bytes.fromhex(match["digest"])
        if digest in names:
            raise ConfigError(f"{where}, line {number}: the key of {names[digest]} is there already")
        names[digest] = match["name"]
    if not names:
        raise ConfigError(f"{where} holds no key, so no client could be served; `tfirst key new NAME` makes one")
    return ClientKeys(names)


def load_keys(path: Path) -> ClientKeys:
    """Read a keys file from disk. Raises `ConfigError` as `parse_keys`, and when it cannot be read."""
    where = f"keys file {path}"
    try:
        return parse_keys(path.read_text("utf-8"), where)
    except OSError as exc:
        raise ConfigError(f"{where}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{where} is not UTF-8 text") from exc
