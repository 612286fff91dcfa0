from __future__ import annotations

from dataclasses import replace

import pytest

from estimators.planning.changes import CHANGES, faster, variations, wider, with_kinds
from estimators.planning.deployments import Organisation
from estimators.planning.plan import assess, ranked
from tests.estimators.planning.example_9_8 import EXAMPLE, all_cards, question


def test_every_change_is_shown_with_the_old_answer_and_the_new_one() -> None:
    asked = question()
    found = variations(asked, ranked(asked)[0].deployment)
    assert [one.what for one in found] == list(CHANGES)
    slower = next(one for one in found if one.what.startswith("cards at 90"))
    assert slower.same.drained_at_s == pytest.approx(68.5, abs=0.6)
    cached = next(one for one in found if one.what.startswith("three quarters"))
    assert cached.same.drained_at_s == pytest.approx(43.2, abs=0.06)
    assert cached.best is not None
    assert cached.best.holds


def test_without_links_no_change_of_links_is_shown() -> None:
    asked = question()
    lonely = replace(asked, facts=replace(asked.facts, network_bytes_per_s=None, store=False))
    assert wider(lonely, 0.5) is None
    assert "links half as wide" not in [
        one.what for one in variations(lonely, all_cards(lonely, Organisation.REPLICAS))
    ]


def test_changes_of_kinds_reach_every_kind() -> None:
    asked = with_kinds(question(EXAMPLE, EXAMPLE), lambda kind: replace(kind, output_tokens=7))
    assert [kind.output_tokens for kind in asked.facts.kinds] == [7, 7]


def test_at_nine_tenths_of_the_speed_the_start_is_cleared_too_late() -> None:
    asked = faster(question(), 0.9)
    one = assess(asked, all_cards(asked, Organisation.SPLIT))
    assert one.drained_at_s == pytest.approx(68.5, abs=0.6)
    assert one.misses == {"start": "backlog gone after 68.4 s, not 60 s"}
