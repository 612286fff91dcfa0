from __future__ import annotations

import pytest

from router.config import PolicyConfig
from router.errors import ConfigError
from router.rules import label, rule_of, rules_of


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


def test_names_beyond_the_policies_are_taken_where_they_are_said_and_have_no_settings() -> None:
    assert rules_of(["central_fcfs,e2e"], orders=("central_fcfs",))[0] == PolicyConfig(name="central_fcfs")
    with pytest.raises(ConfigError, match="central_fcfs has no settings"):
        rules_of(["central_fcfs:x=1"], orders=("central_fcfs",))
    with pytest.raises(ConfigError, match="there is no policy 'central_fcfs'"):
        rules_of(["central_fcfs"])


def test_where_one_rule_is_wanted_two_are_refused() -> None:
    assert rule_of("e2e:own_pace=1,queue_behind=2").settings == {"own_pace": 1, "queue_behind": 2}
    with pytest.raises(ConfigError, match="one rule is wanted, and this names 2"):
        rule_of("e2e,ttft")


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
