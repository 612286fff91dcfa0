"""TLS contexts of either side of the traffic port, made of files and checked before anything listens.

Model     Python's defaults for servers and clients, TLS 1.2 and later, HTTP/1.1 alone in ALPN
Valid     PEM files; a certificate file may hold its chain and, where no key file is named, its key
Blind to  revocation, and certificates that expire while the router runs: read them again in time
"""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from router.errors import ConfigError


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `tls`: the traffic port's own certificate. Without the section it speaks plain HTTP."""

    certificate: str  # PEM file, with its chain
    key: str | None = None  # PEM file, not encrypted; unset: in the certificate's file
    client_ca: str | None = None  # clients must show a certificate signed by one of these; unset: none is asked for


class UpstreamTlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `upstream_tls`: how replicas with https URLs are believed, and what they are shown."""

    ca: str | None = None  # PEM file of those who may sign; unset: the system's
    verify: bool = True  # off: anybody on the way can read prompts and forge answers
    server_name: str | None = None  # name in the replicas' certificates and for SNI; unset: the URL's host
    certificate: str | None = None  # shown to replicas that ask for one
    key: str | None = None  # unset: in the certificate's file


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """Context to listen with.

    Raises
    ------
    ConfigError : a file is missing, is no PEM, or does not fit the others
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, "tls", config.certificate, config.key)
    if config.client_ca is not None:
        _load_ca(context, "tls.client_ca", config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def read_again(context: ssl.SSLContext, config: TlsConfig) -> None:
    """Take renewed files into a context in use; open connections keep what they have. A `client_ca` is only added to.

    Raises
    ------
    ConfigError : as from `server_context`; the context is as it was
    """
    server_context(config)
    _load_chain(context, "tls", config.certificate, config.key)
    if config.client_ca is not None:
        _load_ca(context, "tls.client_ca", config.client_ca)


def upstream_context(config: UpstreamTlsConfig) -> ssl.SSLContext:
    """Context to connect to https replicas with.

    Raises
    ------
    ConfigError : a file is missing, is no PEM, or does not fit the others; or two settings contradict each other
    """
    if not config.verify and config.ca is not None:
        raise ConfigError("upstream_tls: with verify off, ca has no effect; remove one of the two")
    if config.certificate is None and config.key is not None:
        raise ConfigError("upstream_tls.key is set without a certificate")
    context = ssl.create_default_context() if config.ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if config.ca is not None:
        _load_ca(context, "upstream_tls.ca", config.ca)
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.certificate is not None:
        _load_chain(context, "upstream_tls", config.certificate, config.key)
    return context


def _load_chain(context: ssl.SSLContext, section: str, certificate: str, key: str | None) -> None:
    _check_readable(f"{section}.certificate", certificate)
    if key is not None:
        _check_readable(f"{section}.key", key)

    def no_password() -> str:
        raise ConfigError(
            f"{section}.key {key or certificate} is encrypted; the router has nobody to ask for a password"
        )

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            why = f"the key {key or 'in it'} belongs to another certificate"
        else:
            why = f"it, or the key {key or 'in it'}, is no usable PEM file"
        raise ConfigError(f"{section}.certificate {certificate}: {why}") from exc


def _load_ca(context: ssl.SSLContext, setting: str, path: str) -> None:
    _check_readable(setting, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as exc:
        raise ConfigError(f"{setting} {path} holds no usable PEM certificate") from exc


def _check_readable(setting: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{setting} {path}: {exc.strerror}") from exc
