"""Which arm a request gets, and what moves when arms change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Choice, Policy
from policies.watcher import Watcher
from router.config import ArmConfig, ExperimentConfig, PolicyConfig, parse_config
from router.errors import ConfigError
from router.experiments import Experiments, OverrideRefused
from router.plugins import build_policy
from tests.builders import a_fleet, a_request, estimate, held

USUAL = PolicyConfig(name="e2e")


def build(settings: PolicyConfig) -> Policy:
    return build_policy(settings.name, settings.settings, seed=1)


def arms(**weights: float) -> dict[str, ArmConfig]:
    names = ("ttft", "e2e", "round_robin", "least_request")
    return {
        name: ArmConfig(weight=weight, policy=PolicyConfig(name=names[index % 4]))
        for index, (name, weight) in enumerate(weights.items())
    }


def an_experiment(config: ExperimentConfig | None = None, **weights: float) -> Experiments:
    return Experiments(USUAL, config or ExperimentConfig(arms=arms(**(weights or {"a": 1.0, "b": 1.0}))), build)


def dealt(experiments: Experiments, units: int = 4000, **changes: Any) -> list[str]:
    facts = (a_request(session=f"s{index}", request_id=f"r{index}", **changes) for index in range(units))
    return [experiments.assigned(request).arm.name for request in facts]


def test_each_arm_gets_its_share_of_units() -> None:
    """Three standard deviations of 4000 draws are at most 2.4 %."""
    counts = Counter(dealt(an_experiment(a=1.0, b=3.0, c=6.0)))
    for name, share in (("a", 0.1), ("b", 0.3), ("c", 0.6)):
        assert counts[name] / 4000 == pytest.approx(share, abs=0.025)


def test_requests_of_one_session_stay_in_one_arm_and_those_without_are_dealt_one_by_one() -> None:
    experiments = an_experiment()
    same = {experiments.assigned(a_request(session="s", request_id=f"r{n}")).arm.name for n in range(50)}
    alone = {experiments.assigned(a_request(request_id=f"r{n}")).arm.name for n in range(50)}
    assert (len(same), len(alone)) == (1, 2)


@given(st.text(), st.text())
def test_any_text_can_be_a_unit(unit: str, name: str) -> None:
    config = ExperimentConfig(arms=arms(a=1.0, b=1.0), name=name)
    assert an_experiment(config).assigned(a_request(session=unit)).arm.name in ("a", "b")


def test_a_new_arm_takes_its_share_from_the_others_and_moves_nobody_else() -> None:
    before, after = dealt(an_experiment(a=1.0, b=1.0)), dealt(an_experiment(a=1.0, b=1.0, c=2.0))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"c"}
    assert len(moved) / 4000 == pytest.approx(0.5, abs=0.025)


def test_a_larger_weight_moves_units_to_that_arm_only() -> None:
    before, after = dealt(an_experiment(a=1.0, b=1.0, c=1.0)), dealt(an_experiment(a=1.0, b=2.0, c=1.0))
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"b"}


def test_another_name_deals_the_units_anew() -> None:
    config = ExperimentConfig(arms=arms(a=1.0, b=1.0), name="other")
    same = [one == other for one, other in zip(dealt(an_experiment()), dealt(an_experiment(config)), strict=True)]
    assert sum(same) / len(same) == pytest.approx(0.5, abs=0.025)


def test_arms_know_their_share_rule_and_unit() -> None:
    assigned = an_experiment(a=0.0, b=2.0).assigned(a_request(session="s"))
    assert (assigned.arm.name, assigned.arm.policy_name, assigned.arm.share) == ("b", "e2e", 1.0)
    assert (assigned.unit, assigned.override) == ("s", False)


@pytest.mark.parametrize(
    ("assign_by", "unit"),
    [("session", "the-session"), ("client", "alice"), ("tenant", "acme"), ("header:x-user", "the-header")],
)
def test_what_a_request_is_assigned_by_is_configured(assign_by: str, unit: str) -> None:
    config = ExperimentConfig(arms=arms(a=1.0), assign_by=assign_by)
    request = a_request(session="the-session", client="alice", tenant="acme", unit="the-header")
    assert an_experiment(config).assigned(request).unit == unit


def test_without_an_experiment_the_usual_rule_decides_and_no_arm_is_named() -> None:
    experiments = Experiments(USUAL, None, build)
    assigned = experiments.assigned(a_request(session="s"))
    assert (assigned.arm.name, assigned.arm.policy_name, experiments.arms) == ("", "e2e", ())


def test_requests_that_generate_nothing_are_in_no_arm() -> None:
    assert an_experiment().assigned(a_request(generates=False)).arm.name == ""


# A client that asks for a rule


def trusting(**more: Any) -> Experiments:
    return an_experiment(ExperimentConfig(arms=arms(a=1.0, b=1.0, c=0.0), trusted=["alice"], **more))


def test_a_trusted_client_may_ask_for_a_rule_or_for_an_arm_even_one_without_traffic() -> None:
    experiments = trusting()
    for asked, rule in (("least_request", "least_request"), ("b", "e2e"), ("c", "round_robin")):
        assigned = experiments.assigned(a_request(client="alice", policy=asked))
        assert (assigned.override, assigned.arm.policy_name) == (True, rule)


@pytest.mark.parametrize(
    ("facts", "status", "says"),
    [
        ({"client": "bob", "policy": "e2e"}, 403, "may not choose"),
        ({"client": "", "policy": "e2e"}, 403, "may not choose"),
        ({"client": "alice", "policy": "nonsense"}, 400, "there is no policy 'nonsense'"),
    ],
)
def test_who_may_not_ask_or_asks_for_nothing_there_is_told_so(facts: dict[str, Any], status: int, says: str) -> None:
    with pytest.raises(OverrideRefused, match=says) as refused:
        trusting().assigned(a_request(**facts))
    assert refused.value.status == status


# Shadows, watching and reloading


class Failing:
    def choose(self, *facts: object) -> Choice:
        raise ZeroDivisionError


class Counting(Watcher):
    """Counts the placements it is told of."""

    def __init__(self) -> None:
        self.placed_count = 0

    def placed(self, *facts: object) -> None:
        self.placed_count += 1

    def choose(self, *facts: object) -> Choice:
        raise AssertionError("not asked here")


def test_a_shadow_says_what_it_would_take_and_one_that_fails_costs_nothing() -> None:
    fleet = a_fleet("A100", "A100")
    config = ExperimentConfig(
        arms=arms(a=1.0), shadows={"one": PolicyConfig(name="ttft"), "bad": PolicyConfig(name="bad")}
    )
    experiments = Experiments(USUAL, config, lambda s: Failing() if s.name == "bad" else build(s))
    told = experiments.shadows(a_request(), fleet, estimate(fleet, held([100, 0])))
    assert [(shadow.arm, shadow.replica, shadow.path) for shadow in told] == [("one", "a100-0", "local")]
    assert experiments.shadow_failures == 1


def test_every_rule_that_watches_is_told_of_every_placement_also_after_a_reload() -> None:
    rules = {name: Counting() for name in ("e2e", "ttft", "later")}
    config = ExperimentConfig(arms={"a": ArmConfig(policy=PolicyConfig(name="ttft"))})
    experiments = Experiments(USUAL, config, lambda settings: rules[settings.name])
    fleet = a_fleet()
    placed: Any = object()
    estimates = estimate(fleet, held([0, 0]))
    watcher = experiments.watcher
    watcher.placed(placed, fleet, estimates)
    experiments.reload(ExperimentConfig(arms={"a": ArmConfig(policy=PolicyConfig(name="later"))}))
    watcher.placed(placed, fleet, estimates)
    assert {name: rule.placed_count for name, rule in rules.items()} == {"e2e": 2, "ttft": 1, "later": 1}


def test_to_begin_or_end_an_experiment_or_to_assign_by_something_else_takes_a_restart() -> None:
    experiments = an_experiment()
    for config in (None, ExperimentConfig(arms=arms(a=1.0), assign_by="client")):
        with pytest.raises(ConfigError, match="restart"):
            experiments.reload(config)


def test_a_reload_keeps_rules_whose_settings_stay_and_a_bad_one_changes_nothing() -> None:
    experiments = an_experiment(a=1.0, b=1.0)
    before = list(experiments.policies)
    experiments.reload(ExperimentConfig(arms=arms(a=5.0, b=1.0)))
    assert [one is other for one, other in zip(before, experiments.policies, strict=True)] == [True] * 3
    bad = ExperimentConfig(arms={"x": ArmConfig(policy=PolicyConfig(name="nonsense"))})
    with pytest.raises(ConfigError, match="nonsense"):
        experiments.reload(bad)
    assert experiments.arms == ("a", "b")


# Configuration


def test_an_experiment_is_a_section_of_the_configuration() -> None:
    config = parse_config(
        "experiment: {name: spring, assign_by: 'header:x-user', arms: {a: {weight: 3, policy: {name: ttft}}, b: {}}}"
    )
    assert config.experiment is not None
    assert config.experiment.arms["a"].policy.name == "ttft"
    assert config.experiment.arms["b"].weight == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "{arms: {}}",
        "{arms: {a: {weight: -1}}}",
        "{arms: {a: {}}, assign_by: moon}",
        "{arms: {a: {}}, assign_by: 'header:'}",
    ],
)
def test_an_experiment_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="experiment"):
        parse_config(f"experiment: {text}")


def test_arms_that_nobody_could_get_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight"):
        an_experiment(ExperimentConfig(arms=arms(a=0.0)))
