"""Finds policies and subcommands by entry point, so that a user's own rule is installed, not patched in."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rule can be given. defaults : by name; takes_any : other names are its own business"""

    defaults: dict[str, Any]
    takes_any: bool


def settings_of(factory: PolicyFactory) -> Settings:
    """Settings of a rule: its own, then those of the classes to which it passes other keywords on."""
    defaults: dict[str, Any] = {}
    for maker in getattr(factory, "__mro__", (factory, object)):
        if maker is object:
            break
        parameters = inspect.signature(maker).parameters.values()
        named = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
        defaults = {parameter.name: parameter.default for parameter in named} | defaults
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return Settings(defaults, takes_any=False)
    return Settings(defaults, takes_any=True)


def build_policy(name: str, settings: dict[str, Any], seed: int) -> Policy:
    """An instance of the policy `name`; `ConfigError` when `settings` do not fit it."""
    factory = policy_factory(name)
    for key, usual in settings_of(factory).defaults.items():
        given = settings.get(key)
        if given is not None and isinstance(usual, int | float) and not isinstance(given, int | float):
            raise ConfigError(f"policy {name!r}: {key} must be a number, not {given!r}")
    try:
        return factory(np.random.default_rng(seed), **settings)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"policy {name!r}: {exc}") from exc
