"""Rules as they are named on a command line, with their settings, and what each is called.

Model     rules with commas between them, the settings of one behind its colon and with commas too:
          `round_robin,e2e:own_pace=0.5,queue_behind=2,ttft` is three rules. A part with `=` and without a colon goes
          on with the settings of the rule before it
Valid     rules of `tfirst policies`; values are numbers, `true`, `false` or words
Blind to  values with a comma in them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.config import PolicyConfig
from router.errors import ConfigError
from router.plugins import build_policy, policy_factory, settings_of

WORDS = {"true": True, "false": False}


def rules_of(texts: Sequence[str], *, orders: Sequence[str] = ()) -> list[PolicyConfig]:
    """Every rule in `texts`, each once, in order; checked as far as that needs no run.

    orders : names that are taken as rules too, though no policy is called so; they have no settings

    Raises
    ------
    ConfigError : no rule, an unknown one, or a setting that is malformed or does not fit its rule.
    """
    named: list[tuple[str, dict[str, Any]]] = []
    for text in texts:
        named += _parts(text)
    rules: dict[str, PolicyConfig] = {}
    for name, settings in named:
        rule = PolicyConfig(name=name, settings=settings)
        _check(rule, orders)
        rules.setdefault(label(rule), rule)
    if not rules:
        raise ConfigError("--policy names no policy")
    return list(rules.values())


def rule_of(text: str) -> PolicyConfig:
    """The one rule in `text`. Raises ConfigError as `rules_of` does, and when there are several."""
    rules = rules_of([text])
    if len(rules) > 1:
        raise ConfigError(f"--policy {text}: one rule is wanted, and this names {len(rules)}")
    return rules[0]


def label(rule: PolicyConfig) -> str:
    """What a rule is called: its name, and its settings where it was given some.

    >>> label(PolicyConfig(name="e2e", settings={"queue_behind": 2, "own_pace": 0.5}))
    'e2e:own_pace=0.5,queue_behind=2'
    """
    settings = ",".join(f"{key}={_written(value)}" for key, value in sorted(rule.settings.items()))
    return f"{rule.name}:{settings}" if settings else rule.name


def _parts(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(rule, settings) of each rule in one text, as written."""
    named: list[tuple[str, dict[str, Any]]] = []
    has_colon = False
    for part in filter(None, map(str.strip, text.split(","))):
        name, colon, setting = part.partition(":")
        if "=" in name:  # settings go on
            if not has_colon:
                raise ConfigError(f"--policy: {part!r} is a setting without a rule; it is written RULE:{part}")
            setting = part
        else:
            has_colon = bool(colon)
            named.append((name.strip(), {}))
        if setting:
            key, value = _setting(named[-1][0], setting)
            named[-1][1][key] = value
    return named


def _setting(rule: str, text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise ConfigError(f"--policy {rule}: {text!r} is not a setting; it is written NAME=VALUE")
    return key, _value(value)


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check(rule: PolicyConfig, orders: Sequence[str]) -> None:
    if rule.name in orders:
        if rule.settings:
            raise ConfigError(f"--policy {label(rule)}: {rule.name} has no settings")
        return
    known = settings_of(policy_factory(rule.name))
    for key in rule.settings:
        if key not in known.defaults and not known.takes_any:
            has = f"it has {', '.join(known.defaults)}" if known.defaults else "it has none"
            raise ConfigError(f"--policy {label(rule)}: {rule.name} has no setting {key!r}; {has}")
    build_policy(rule.name, rule.settings, 0)
