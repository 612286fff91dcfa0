from __future__ import annotations

import pytest

from loadtest.replay.rules import label, rules_of
from router.config import PolicyConfig
from router.errors import ConfigError


def test_settings_go_on_until_the_next_rule() -> None:
    rules = rules_of(["round_robin, e2e:own_pace=0.5,queue_behind=2 ,ttft", "prefix_hash:prefix_tokens=512"])
    assert [(rule.name, rule.settings) for rule in rules] == [
        ("round_robin", {}),
        ("e2e", {"own_pace": 0.5, "queue_behind": 2}),
        ("ttft", {}),
        ("prefix_hash", {"prefix_tokens": 512}),
    ]


def test_the_order_of_settings_makes_no_other_variant() -> None:
    rules = rules_of(["e2e:own_pace=1,queue_behind=2,e2e:queue_behind=2,own_pace=1,e2e:own_pace=2"])
    assert [label(rule) for rule in rules] == ["e2e:own_pace=1,queue_behind=2", "e2e:own_pace=2"]


def test_a_label_read_again_is_the_rule_it_names() -> None:
    rule = PolicyConfig(name="e2e", settings={"running_decodes": 1e-07, "own_pace": 3})
    assert rules_of([label(rule)]) == [rule]


@pytest.mark.parametrize("order", ["central_fcfs", "central_sjf"])
def test_central_orders_are_rules_without_settings(order: str) -> None:
    assert rules_of([order]) == [PolicyConfig(name=order)]
    with pytest.raises(ConfigError, match="has no settings"):
        rules_of([f"{order}:x=1"])


@pytest.mark.parametrize("text", ["e2e:", "e2e: ", "e2e"])
def test_a_colon_without_settings_is_the_plain_rule(text: str) -> None:
    assert rules_of([text]) == [PolicyConfig(name="e2e")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("own_pace=1", "a setting without a rule"),
        ("e2e:own_pace=", "NAME=VALUE"),
        ("e2e:=1", "NAME=VALUE"),
        ("e2e:own_pace=1,ttft,queue_behind=2", "a setting without a rule; it is written RULE:queue_behind=2"),
        ("", "names no policy"),
    ],
)
def test_what_is_no_list_of_rules_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        rules_of([text])
    assert "\n" not in str(caught.value)
