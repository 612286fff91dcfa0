from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.objectives import EndToEnd
from router.errors import ConfigError
from router.plugins import build_policy, policy_factory, settings_of


class Anything:
    """A user's rule that reads its settings by itself."""

    summary = reads = source = "-"

    def __init__(self, rng: np.random.Generator, *, known: int = 3, **others: Any) -> None:
        self.others = others


def test_settings_of_a_rule_are_its_own_and_those_it_passes_on() -> None:
    settings = settings_of(policy_factory("e2e"))
    assert {"own_pace", "queue_behind", "explore", "slo_ttft_ms", "late"} <= settings.defaults.keys()
    assert settings.defaults["meets"] == 0.9
    assert not settings.takes_any


def test_a_rule_that_takes_any_setting_says_so() -> None:
    settings = settings_of(Anything)  # type: ignore[arg-type]
    assert settings.defaults == {"known": 3}
    assert settings.takes_any


def test_settings_passed_on_are_used() -> None:
    policy = build_policy("e2e", {"late": "refuse", "slo_ttft_ms": 100, "own_pace": 0.5}, 0)
    assert isinstance(policy, EndToEnd)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"explore": "often"}, "explore must be a number"),
        ({"late": "never"}, "late"),
        ({"explroe": 0.1}, "explroe"),
        ({"slo_ttft_ms": "fast"}, "slo_ttft_ms"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_policy("e2e", settings, 0)
