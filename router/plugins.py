"""Finds policies and subcommands by entry point, so that a user's own rule is installed, not patched in."""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from policies.base import Policy, PolicyFactory
from router.errors import ConfigError

POLICIES = "tfirst.policies"
COMMANDS = "tfirst.commands"


def found(group: str) -> dict[str, EntryPoint]:
    """Entry points of `group` by name; the first one installed wins a name."""
    by_name: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        by_name.setdefault(point.name, point)
    return dict(sorted(by_name.items()))


def policy_factory(name: str) -> PolicyFactory:
    """The policy called `name`; `ConfigError` lists those that exist when it does not."""
    points = found(POLICIES)
    if name not in points:
        raise ConfigError(f"there is no policy {name!r}; there are: {', '.join(points)}")
    try:
        factory: PolicyFactory = points[name].load()
    except Exception as exc:  # a user's module can fail in any way; the sentence says which one it was
        raise ConfigError(f"policy {name!r} ({points[name].value}) cannot be loaded: {exc}") from exc
    return factory


def build_policy(name: str, settings: dict[str, Any], seed: int) -> Policy:
    """An instance of the policy `name`; `ConfigError` when `settings` do not fit it."""
    factory = policy_factory(name)
    for key, parameter in inspect.signature(factory).parameters.items():
        given, usual = settings.get(key), parameter.default
        if given is not None and isinstance(usual, int | float) and not isinstance(given, int | float):
            raise ConfigError(f"policy {name!r}: {key} must be a number, not {given!r}")
    try:
        return factory(np.random.default_rng(seed), **settings)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"policy {name!r}: {exc}") from exc
