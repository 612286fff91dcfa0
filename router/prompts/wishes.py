"""What the fields of a request's head wish for: to go sooner, for whom it is, and until when it is of use.

Valid     x-priority is a whole number, larger is sooner; x-slo-ttft-ms is the longest time to the first token from
          arrival, x-slo-tpot-ms the longest for each further one on average; the tenant's field is named by the
          configuration. Who sends no tenant's name is known by its key's
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
    """As `RequestFacts` has them.

    deadline_s, pace_deadline_s : > 0, of the first token and of each further one; None: the client names none
    """

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    policy: str = ""
    unit: str = ""
    pace_deadline_s: float | None = None


_NONE = Wishes()


def wishes_of(head: Head, tenant_field: bytes | None, unit_field: bytes | None = None) -> Wishes | Refuse:
    """What a request wishes for, or the refusal of what cannot be read.

    tenant_field, unit_field : lower-case names of the fields that say for whom it is and what an experiment assigns
        it by; None: nobody says
    """
    priority, deadline, pace = head.get(b"x-priority"), head.get(b"x-slo-ttft-ms"), head.get(b"x-slo-tpot-ms")
    tenant = None if tenant_field is None else head.get(tenant_field)
    policy = head.get(b"x-tfirst-policy")
    unit = None if unit_field is None else head.get(unit_field)
    if all(value is None for value in (priority, deadline, pace, tenant, policy, unit)):
        return Wishes(tenant=head.client) if head.client else _NONE
    step = 0 if priority is None else _whole(priority)
    if step is None:
        return _bad("x-priority must be a whole number, larger is sooner")
    deadline_s = None if deadline is None else _milliseconds(deadline)
    pace_s = None if pace is None else _milliseconds(pace)
    for given, time_s, field in ((deadline, deadline_s, "x-slo-ttft-ms"), (pace, pace_s, "x-slo-tpot-ms")):
        if given is not None and time_s is None:
            return _bad(f"{field} must be a number of milliseconds above 0")
    name, rule = _text(tenant), _text(policy)
    for text, what in ((name, "the tenant's name"), (rule, "x-tfirst-policy")):
        if len(text) > LONGEST_NAME:
            return _bad(f"{what} must be no longer than {LONGEST_NAME} characters")
    return Wishes(step, name or head.client, deadline_s, rule, _text(unit), pace_s)


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1").strip()


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
