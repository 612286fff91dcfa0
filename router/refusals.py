"""What the router answers by itself: a status, an error of the API's form, and when to come back."""

from __future__ import annotations

from collections.abc import Iterable

from router.actions import Cause, Refuse, Why
from router.resume.reasons import WhyNot

_NO_MORE = {
    WhyNot.TOO_OFTEN: "no more attempts are made",
    WhyNot.NO_REPLICA: "no other replica could take the request",
    WhyNot.NO_BUDGET: "the budget for second attempts is spent",
}


def unknown_model(model: str, known: Iterable[str]) -> Refuse:
    """Nobody has ever served `model` here. known : models that are served now"""
    names = ", ".join(known) or "none at the moment"
    message = f"The model `{model}` does not exist here; served are: {names}."
    return Refuse(404, "NotFoundError", message, param="model", why=Why.UNKNOWN_MODEL)


def nobody_up(only: str, retry_after_s: int) -> Refuse:
    """No replica of the model can take a request now. only : the one that keeps what it goes on from; "" for any"""
    who = f"replica {only}, which keeps this response, is not up" if only else "no replica is up"
    message = f"{who}; try again shortly"
    return Refuse(503, "ServiceUnavailable", message, retry_after_s=retry_after_s, why=Why.NOBODY_UP)


def keeper_left(replica: str) -> Refuse:
    """The stored response it is about went with a replica that is no part of the fleet any more."""
    message = f"replica {replica}, which kept this response, has left the fleet"
    return Refuse(404, "NotFoundError", message, why=Why.KEEPER_LEFT)


def queue_full(retry_after_s: int) -> Refuse:
    """Every replica is full, and so is the queue."""
    message = "every replica is full and so is the queue"
    return Refuse(429, "RateLimitError", message, retry_after_s=retry_after_s, why=Why.QUEUE_FULL)


def queue_timeout(waited_s: float, retry_after_s: int) -> Refuse:
    """It has waited as long as a request may."""
    message = f"every replica was full for the {waited_s:.1f} s that this request could wait"
    return Refuse(503, "ServiceUnavailable", message, retry_after_s=retry_after_s, why=Why.QUEUE_TIMEOUT)


def too_late(expected_s: float, deadline_s: float, retry_after_s: int) -> Refuse:
    """No replica is expected to meet its deadline."""
    message = f"the first token would take {expected_s:.1f} s, longer than the {deadline_s:g} s it may take"
    return Refuse(429, "RateLimitError", message, retry_after_s=retry_after_s, why=Why.TOO_LATE)


def by_rule(reason: str, retry_after_s: int) -> Refuse:
    """The routing rule itself finds no replica good enough. reason : its own sentence"""
    return Refuse(429, "RateLimitError", reason, retry_after_s=retry_after_s, why=Why.RULE)


def override(status: int, reason: str) -> Refuse:
    """The client may not choose the policy, or there is no such one. reason : which, in a sentence"""
    kind = "PermissionDeniedError" if status == 403 else "BadRequestError"
    return Refuse(status, kind, reason, why=Why.OVERRIDE)


def internal() -> Refuse:
    """The router failed by itself."""
    return Refuse(500, "InternalServerError", "The router failed to place this request.", why=Why.INTERNAL)


def attempts_failed(replica: str, cause: Cause, no_more: WhyNot, retry_after_s: int) -> Refuse:
    """The last attempt failed before any byte was relayed, and no other is made."""
    message = f"replica {replica} failed before any byte was relayed ({cause.value}), and {_NO_MORE[no_more]}"
    if cause is Cause.CONNECT:  # nobody is there: it is not an answer that was bad
        return Refuse(503, "ServiceUnavailable", message, retry_after_s=retry_after_s)
    return Refuse(502, "BadGateway", message, retry_after_s=retry_after_s)
