"""What the fields of a request's head wish for: to go sooner, for whom it is, and until when it is of use.

Valid     x-priority is a whole number, larger is sooner; x-slo-ttft-ms is the longest time to the first token from
          arrival; the tenant's field is named by the configuration. Who sends no tenant's name is known by its key's
Blind to  whether a client may wish for that: whoever is before the router may take such fields away, and without a
          name for the field only keys tell tenants
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from router.actions import Refuse
from router.prompts.body import LONGEST_NAME

_LONGEST_NUMBER = 32  # characters


class Head(Protocol):
    """What is read of a request's head."""

    @property
    def client(self) -> str: ...
    def get(self, name: bytes) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Wishes:
    """As `RequestFacts` has them. deadline_s : > 0, of the first token; None: the client names none"""

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None


_NONE = Wishes()


def wishes_of(head: Head, tenant_field: bytes | None) -> Wishes | Refuse:
    """What a request wishes for, or the refusal of what cannot be read. tenant_field : lower-case name, if any"""
    priority, deadline = head.get(b"x-priority"), head.get(b"x-slo-ttft-ms")
    tenant = None if tenant_field is None else head.get(tenant_field)
    if priority is None and deadline is None and tenant is None:
        return Wishes(tenant=head.client) if head.client else _NONE
    step = 0 if priority is None else _whole(priority)
    if step is None:
        return _bad("x-priority must be a whole number, larger is sooner")
    deadline_s = None if deadline is None else _milliseconds(deadline)
    if deadline is not None and deadline_s is None:
        return _bad("x-slo-ttft-ms must be a number of milliseconds above 0")
    name = "" if tenant is None else tenant.decode("latin-1").strip()
    if len(name) > LONGEST_NAME:
        return _bad(f"the tenant's name must be no longer than {LONGEST_NAME} characters")
    return Wishes(step, name or head.client, deadline_s)


def _whole(value: bytes) -> int | None:
    try:
        return int(value) if len(value) <= _LONGEST_NUMBER else None
    except ValueError:
        return None


def _milliseconds(value: bytes) -> float | None:
    """In seconds; None when it is no time."""
    try:
        time_s = float(value) / 1000.0 if len(value) <= _LONGEST_NUMBER else inf
    except ValueError:
        return None
    return time_s if 0.0 < time_s < inf else None


def _bad(message: str) -> Refuse:
    return Refuse(400, "BadRequestError", message)
