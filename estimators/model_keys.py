"""One config.json as a set of keys that are there, have a default, or are missed by name.

A missing key is an error that names it and the architecture: a wrong guess here would make every estimate of that
model wrong without a sign.
"""

from __future__ import annotations

from typing import Any


class ModelConfigError(ValueError):
    """A config.json that cannot be turned into a shape. One sentence; `key` is what is missing or not understood."""

    def __init__(self, architecture: str, key: str, problem: str) -> None:
        super().__init__(f"config.json of {architecture}: {problem}")
        self.architecture = architecture
        self.key = key


class Keys:
    """The keys of one model's text part. `defaults` are those of its configuration class, for keys left out."""

    def __init__(self, values: dict[str, Any], architecture: str, defaults: dict[str, Any]) -> None:
        self.architecture = architecture
        self._values = values
        self._defaults = defaults

    def get(self, key: str) -> Any:
        """The value, else the class's default, else None."""
        value = self._values.get(key)
        return self._defaults.get(key) if value is None else value

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def count(self, *names: str) -> int:
        """The first of `names` that is there, which must be a whole number >= 1."""
        for key in names:
            value = self.get(key)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise self.error(key, f"`{key}` is {value!r}, expected a whole number from 1")
            return value
        raise self.error(names[0], f"`{names[0]}` is missing")

    def count_or(self, default: int, *names: str) -> int:
        return self.count(*names) if any(self.has(key) for key in names) else default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"`{key}` is {value!r}, expected true or false")
        return value

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(self.architecture, key, problem)
