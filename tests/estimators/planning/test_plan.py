from __future__ import annotations

from dataclasses import replace
from math import inf, isnan

import msgspec
import pytest

from estimators.planning.changes import faster
from estimators.planning.deployments import (
    Organisation,
)
from estimators.planning.plan import (
    Assessment,
    Question,
    Targets,
    assess,
    copies,
    copies_that_hold,
    limits,
    misses_of_copies,
    ranked,
)
from tests.estimators.planning.example_9_8 import EXAMPLE, all_cards, question


def first(asked: Question) -> Assessment:
    return ranked(asked)[0]


def test_example_9_8_chooses_a100_for_prefill_h20_for_decode_and_the_direct_way() -> None:
    one = first(question())
    chosen = one.deployment
    assert (chosen.organisation, chosen.prefill, chosen.decode) == (Organisation.SPLIT, (4, 0), (0, 4))
    assert chosen.limited_by == "decode pool"
    assert one.drained_at_s == pytest.approx(43, abs=0.5)
    assert one.usd_per_thousand_good == pytest.approx(0.63, abs=0.006)


def test_the_way_by_store_carries_the_same_and_answers_one_move_later() -> None:
    asked = question()
    direct, by_store = (assess(asked, all_cards(asked, one)) for one in (Organisation.SPLIT, Organisation.SPLIT_STORE))
    assert by_store.deployment.per_s == direct.deployment.per_s
    assert by_store.idle_first_token_s - direct.idle_first_token_s == pytest.approx(0.0483, abs=0.0001)


def test_whole_replicas_fall_behind_and_ideal_chunks_are_late() -> None:
    asked = question()
    whole = assess(asked, all_cards(asked, Organisation.REPLICAS))
    chunks = assess(asked, all_cards(asked, Organisation.CHUNKED))
    assert (whole.good_share, whole.drained_at_s, isnan(whole.first_token_s)) == (0.0, inf, True)
    assert whole.misses == {"rate": "carries 3.02 of 3.5 requests/s"}
    assert chunks.drained_at_s == pytest.approx(63, abs=1.0)
    assert not chunks.holds


@pytest.mark.parametrize(
    ("organisation", "prefill", "drained_s"),
    [
        (Organisation.REPLICAS, None, 35.1),
        (Organisation.SPLIT, (4, 0), 43.2),
        (Organisation.SPLIT, None, 26.0),
    ],
)
def test_a_prefix_hit_clears_the_start_sooner_with_other_roles(
    organisation: Organisation, prefill: tuple[int, int] | None, drained_s: float
) -> None:
    asked = question(replace(EXAMPLE, cached_tokens=6144))
    assert assess(asked, all_cards(asked, organisation, prefill)).drained_at_s == pytest.approx(drained_s, abs=0.06)


def test_long_answers_need_three_fleets_to_keep_up_and_four_to_clear_the_start() -> None:
    asked = question(replace(EXAMPLE, output_tokens=4097))
    one = assess(asked, all_cards(asked, Organisation.SPLIT))
    assert one.deployment.prefill == (2, 0)
    many = copies(asked, one)
    assert (many.steady, many.in_time, many.cards) == (3, 4, 32)


@pytest.mark.parametrize(
    ("targets", "holding"),
    [
        (Targets(), 3),
        (Targets(first_token_s=2.0), 4),
        (Targets(first_token_s=0.1), None),
        (Targets(pace_s=0.001), None),
    ],
)
def test_copies_that_hold_are_the_fewest_that_miss_nothing(targets: Targets, holding: int | None) -> None:
    asked = replace(question(replace(EXAMPLE, output_tokens=4097)), targets=targets)
    one = assess(asked, all_cards(asked, Organisation.SPLIT))
    assert copies_that_hold(asked, one) == holding
    for many in range(1, 7):
        assert bool(misses_of_copies(asked, one, many)) == (holding is None or many < holding)


def test_pairs_that_read_the_store_again_are_limited_to_seven_a_second_by_its_link() -> None:
    asked = question(EXAMPLE, replace(EXAMPLE, stored_tokens=8192))
    rates = all_cards(asked, Organisation.SPLIT_STORE).rates_rps
    assert rates["link"] / 2 == pytest.approx(6.9, abs=0.05)


@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_each_limit_is_where_the_answer_changes(factor: float) -> None:
    """On either side of every limit, with the whole assessment and not with the formula that gave it."""
    asked = question()
    chosen = all_cards(asked, Organisation.SPLIT)
    bound = limits(asked, chosen)

    def holds(changed: Question) -> bool:
        return assess(changed, all_cards(changed, Organisation.SPLIT, (4, 0))).holds

    assert holds(replace(asked, arrival_rps=bound.arrival_rps * factor)) == (factor < 1)
    assert holds(replace(asked, ready_s=bound.ready_s * factor)) == (factor < 1)
    assert holds(faster(asked, bound.speed * factor)) == (factor > 1)
    narrow = replace(asked.facts, network_bytes_per_s=bound.link_bytes_per_s * factor)
    assert holds(replace(asked, facts=narrow)) == (factor > 1)


def test_targets_that_nothing_meets_leave_a_ranking_by_what_is_carried() -> None:
    found = ranked(question(first_token_s=0.5))
    assert not any(one.holds for one in found)
    counted_on = [one for one in found if one.deployment.organisation is not Organisation.CHUNKED]
    keeps_up = [not isnan(one.first_token_s) for one in counted_on]
    assert keeps_up == sorted(keeps_up, reverse=True)


def test_the_first_choice_is_the_cheapest_that_holds_and_can_be_counted_on() -> None:
    asked = replace(question(replace(EXAMPLE, output_tokens=129)), arrival_rps=2.0)
    found = ranked(asked)
    holding = [one for one in found if one.holds and one.deployment.organisation is not Organisation.CHUNKED]
    assert found[0] is holding[0]
    assert found[0].usd_per_thousand_good == min(one.usd_per_thousand_good for one in holding)
    assert found[0].cards < 8


def test_dear_cards_are_avoided_and_unknown_prices_are_not_free() -> None:
    asked = replace(question(replace(EXAMPLE, output_tokens=129)), arrival_rps=1.0)
    dear = tuple(
        replace(kind, card=msgspec.structs.replace(kind.card, usd_per_hour=100.0 if kind.name == "A100" else 1.0))
        for kind in asked.facts.cards
    )
    one = first(replace(asked, facts=replace(asked.facts, cards=dear)))
    assert one.deployment.counts[0] == 0
    unknown = first(replace(question(price=None), arrival_rps=1.0))
    assert isnan(unknown.usd_per_thousand_good)
    countable = [
        one
        for one in ranked(replace(question(), arrival_rps=1.0))
        if one.holds and one.deployment.organisation is not Organisation.CHUNKED
    ]
    assert unknown.cards == min(one.cards for one in countable)


def test_the_pace_is_that_of_the_batch_the_load_keeps_running() -> None:
    asked = question()
    light, heavy = (
        assess(one, all_cards(one, Organisation.SPLIT)).pace_s
        for one in (replace(asked, arrival_rps=0.5), replace(asked, arrival_rps=4.5))
    )
    full_s = 27.4e-3
    assert light < heavy <= full_s * 1.01
    assert heavy == pytest.approx(full_s, rel=0.05)


def test_prefills_between_steps_stretch_the_pace_of_whole_replicas() -> None:
    asked = replace(question(), arrival_rps=2.0)
    whole, apart = (
        assess(asked, all_cards(asked, one)).pace_s for one in (Organisation.REPLICAS, Organisation.CHUNKED)
    )
    assert whole > apart
    missed = replace(asked, targets=replace(asked.targets, pace_s=whole * 0.9))
    assert not assess(missed, all_cards(asked, Organisation.REPLICAS)).holds


def test_fewer_first_tokens_are_in_time_the_tighter_the_deadline() -> None:
    asked = question()
    chosen = all_cards(asked, Organisation.SPLIT)
    shares = [
        assess(replace(asked, targets=replace(asked.targets, first_token_s=limit)), chosen).good_share
        for limit in (0.9, 1.0, 1.5, 3.0, inf)
    ]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_deployment_that_may_not_be_so_busy_must_carry_more() -> None:
    asked = replace(question(), ready_s=0.0, targets=Targets(most_busy=0.7))
    assert asked.needed_rps == pytest.approx(3.5 / 0.7)
    one = assess(asked, all_cards(asked, Organisation.SPLIT))
    assert one.misses == {"rate": "76.8% busy, not 70% at most"}
    bound = limits(asked, one.deployment)
    assert bound.arrival_rps == pytest.approx(0.7 * one.deployment.per_s)
    assert assess(replace(asked, arrival_rps=bound.arrival_rps * 0.999), one.deployment).holds


def test_an_upper_bound_is_never_the_answer() -> None:
    """Only ideal chunks would hold here; the first choice is still one that can be counted on, and does not."""
    asked = replace(question(replace(EXAMPLE, output_tokens=2049)), arrival_rps=2.6, ready_s=0.0, targets=Targets())
    found = ranked(asked)
    assert [one for one in found if one.holds] == [
        one for one in found if one.holds and one.deployment.organisation is Organisation.CHUNKED
    ]
    assert found[0].deployment.organisation is not Organisation.CHUNKED
    assert not found[0].holds


def test_a_fleet_that_holds_exactly_the_load_is_not_kept_up_with() -> None:
    asked = question()
    one = assess(asked, all_cards(asked, Organisation.SPLIT))
    level = replace(asked, arrival_rps=one.deployment.per_s, targets=Targets(), ready_s=0.0)
    assert copies(level, one).steady == 2


def test_a_start_longer_than_its_target_is_refused() -> None:
    with pytest.raises(ValueError, match="ready_s"):
        replace(question(), ready_s=60.0)
