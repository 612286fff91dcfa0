from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.planning.deployments import (
    CardKind,
    Deployment,
    Facts,
    Organisation,
    RequestKind,
    all_deployments,
    batch_on,
    deployment,
    kinds_of_lengths,
    mean_times,
    moved_bytes,
    organisations,
    sub_fleets,
    times_on,
)
from estimators.planning.known import DEEPSEEK_V3, PLANNED_CARDS
from estimators.shape_parts import Shards
from estimators.shapes import QWEN3_8B

STATE = 8192 * QWEN3_8B.kv_bytes_per_token
PLAIN = RequestKind(input_tokens=8192, output_tokens=1025)


def facts(*kinds: RequestKind, cards: dict[str, int] | None = None, **changes: object) -> Facts:
    counts = cards or {"A100": 4, "H20": 4}
    found = Facts(
        shape=QWEN3_8B,
        kinds=kinds or (PLAIN,),
        cards=tuple(CardKind(name, PLANNED_CARDS[name], count) for name, count in counts.items()),
        batch=32,
        network_bytes_per_s=25e9,
        store=True,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def best(found: Facts, organisation: Organisation, **how: object) -> Deployment:
    one = deployment(found, organisation, **how)  # type: ignore[arg-type]
    assert one is not None
    return one


def test_the_best_split_is_the_best_of_all_splits() -> None:
    """Found by trying each, with rates worked out from seconds here."""
    found = facts(cards={"A100": 3, "L40S": 2, "H20": 2})
    times = [mean_times(times_on(found, kind.card, Organisation.SPLIT), (1.0,)) for kind in found.cards]
    rates = []
    for chosen in product(range(4), range(3), range(3)):
        prefill = sum(many / one.prefill_s for many, one in zip(chosen, times, strict=True))
        rest = [count - many for count, many in zip(found.counts, chosen, strict=True)]
        rates.append(
            min(prefill, sum(many / one.decode_s for many, one in zip(rest, times, strict=True)), 25e9 / STATE)
        )
    assert best(found, Organisation.SPLIT).per_s == pytest.approx(max(rates))


def test_equal_cards_gain_no_throughput_from_a_split() -> None:
    found = facts(cards={"A100": 8})
    assert best(found, Organisation.SPLIT).per_s < best(found, Organisation.REPLICAS).per_s


@settings(max_examples=30)
@given(a=st.integers(1, 4), b=st.integers(1, 4), tokens=st.integers(64, 8000), answer=st.integers(2, 3000))
def test_ideal_chunks_are_never_slower_than_whole_prefills(a: int, b: int, tokens: int, answer: int) -> None:
    found = facts(RequestKind(input_tokens=tokens, output_tokens=answer), cards={"A100": a, "H20": b})
    whole, chunked = best(found, Organisation.REPLICAS).per_s, best(found, Organisation.CHUNKED).per_s
    assert whole <= chunked * (1 + 1e-9) <= 2.0 * whole * (1 + 1e-9)  # at best one of two halves is hidden


def test_two_kinds_take_the_mean_of_their_seconds() -> None:
    """Long answers are counted by seconds and not by requests: rates of two kinds average harmonically."""
    long = RequestKind(input_tokens=8192, output_tokens=4097)
    alone = [best(facts(kind), Organisation.REPLICAS, counts=(4, 0)).per_s for kind in (PLAIN, long)]
    mixed = best(facts(PLAIN, replace(long, share=3.0)), Organisation.REPLICAS, counts=(4, 0)).per_s
    assert 1 / mixed == pytest.approx(0.25 / alone[0] + 0.75 / alone[1], rel=0.02)  # batches differ by what fits


def test_states_move_once_directly_and_twice_by_a_store() -> None:
    found = facts()
    assert moved_bytes(found, PLAIN, Organisation.REPLICAS) == 0.0
    assert moved_bytes(found, PLAIN, Organisation.SPLIT) == STATE
    assert moved_bytes(found, PLAIN, Organisation.SPLIT_STORE) == 2 * STATE


def test_a_stored_prompt_is_read_once_and_nothing_is_computed_for_it() -> None:
    again = replace(PLAIN, stored_tokens=8192)
    found = facts(again)
    assert moved_bytes(found, again, Organisation.SPLIT_STORE) == STATE
    assert moved_bytes(found, again, Organisation.REPLICAS_STORE) == STATE
    assert best(found, Organisation.SPLIT_STORE, counts=(1, 1), prefill=(1, 0)).rates_rps["prefill pool"] == inf
    assert best(found, Organisation.SPLIT, counts=(1, 1), prefill=(1, 0)).rates_rps["prefill pool"] < 2


def test_of_a_prompt_stored_in_part_the_rest_is_written_and_all_is_read() -> None:
    part = replace(PLAIN, cached_tokens=2048, stored_tokens=2048)
    assert moved_bytes(facts(part), part, Organisation.SPLIT_STORE) == pytest.approx(STATE * (0.25 + 0.5 + 1.0))
    assert moved_bytes(facts(part), part, Organisation.REPLICAS_STORE) == pytest.approx(STATE * (0.25 + 0.5))


def test_an_answer_of_one_token_is_handed_to_nobody() -> None:
    short = replace(PLAIN, output_tokens=1)
    found = facts(short)
    assert moved_bytes(found, short, Organisation.SPLIT) == 0.0
    assert best(found, Organisation.SPLIT).decode == (0, 0)


def test_a_narrow_link_limits_a_split_and_is_named() -> None:
    found = facts(network_bytes_per_s=3 * STATE)
    one = best(found, Organisation.SPLIT)
    assert one.limited_by == "link"
    assert one.per_s == pytest.approx(3.0)
    assert best(found, Organisation.SPLIT_STORE).per_s == pytest.approx(1.5)


def test_links_of_the_senders_add_up_and_the_network_does_not() -> None:
    own = facts(peer_bytes_per_s=STATE)
    assert best(own, Organisation.SPLIT, prefill=(4, 0)).rates_rps["link"] == pytest.approx(4.0)
    assert best(own, Organisation.SPLIT_STORE, prefill=(4, 0)).rates_rps["link"] == pytest.approx(25e9 / 2 / STATE)


def test_a_smaller_state_frees_the_link_and_nothing_else() -> None:
    gqa, mla = best(facts(), Organisation.SPLIT), best(facts(state_shape=DEEPSEEK_V3), Organisation.SPLIT)
    assert mla.rates_rps["link"] > 2 * gqa.rates_rps["link"]
    assert (mla.per_s, mla.prefill) == (gqa.per_s, gqa.prefill)


@settings(max_examples=20)
@given(tokens=st.integers(16, 20_000), answer=st.integers(1, 8000))
def test_the_batch_that_fits_leaves_room_for_one_arrival(tokens: int, answer: int) -> None:
    found = facts(RequestKind(input_tokens=tokens, output_tokens=answer), batch=512)
    card = PLANNED_CARDS["A100"]
    batch = batch_on(found, card)

    def needed(many: int) -> float:
        longest = (tokens + answer - 1) * QWEN3_8B.kv_bytes_per_token
        return QWEN3_8B.weights_bytes + many * longest + tokens * QWEN3_8B.kv_bytes_per_token

    room = 0.9 * card.memory_gib * 2**30
    assert needed(batch) <= room
    assert batch == 512 or needed(batch + 1) > room


def test_a_model_that_does_not_fit_is_refused() -> None:
    small = msgspec.structs.replace(PLANNED_CARDS["A100"], memory_gib=10)
    with pytest.raises(ValueError, match="no request fits into 10 GiB"):
        deployment(replace(facts(), cards=(CardKind("small", small, 2),)), Organisation.REPLICAS)


def test_shards_make_a_replica_of_several_cards_that_is_so_much_faster() -> None:
    shards = facts(shape=msgspec.structs.replace(QWEN3_8B, shards=Shards(tensor=2)), cards={"A100": 4})
    assert shards.cards_each == 2
    one, two = best(facts(cards={"A100": 4}), Organisation.REPLICAS), best(shards, Organisation.REPLICAS)
    assert two.per_s == pytest.approx(2 * one.per_s)


def test_what_there_is_no_link_for_is_not_considered() -> None:
    lonely = facts(network_bytes_per_s=None, store=False)
    assert organisations(lonely) == [Organisation.REPLICAS, Organisation.CHUNKED]
    assert Organisation.SPLIT_STORE not in organisations(replace(lonely, peer_bytes_per_s=1e9))
    assert Organisation.REPLICAS_STORE not in organisations(facts())
    assert Organisation.REPLICAS_STORE in organisations(facts(replace(PLAIN, stored_tokens=1)))


def test_every_sub_fleet_is_looked_at_once_and_all_cards_first() -> None:
    found = list(sub_fleets(facts(cards={"A100": 2, "H20": 1})))
    assert found[0] == (2, 1)
    assert sorted(found) == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert list(sub_fleets(facts(cards={"A100": 400, "H20": 400}))) == [(400, 400)]


def test_one_card_cannot_be_split() -> None:
    one = facts(cards={"A100": 1})
    assert deployment(one, Organisation.SPLIT) is None
    assert {found.organisation for found in all_deployments(one)} == {Organisation.REPLICAS, Organisation.CHUNKED}


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": 0.0},
        {"input_tokens": 0},
        {"output_tokens": 0},
        {"cached_tokens": 8192},
        {"cached_tokens": 8000, "stored_tokens": 193},
    ],
)
def test_a_kind_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is"):
        replace(PLAIN, **wrong)


def test_kinds_of_lengths_keep_the_sums() -> None:
    inputs, outputs, cached = [10, 2000, 40, 8000, 300], [5, 10, 15, 20, 25], [0, 1000, 39, 0, 100]
    kinds = kinds_of_lengths(inputs, outputs, cached, most=3)
    assert sum(kind.share for kind in kinds) == 5
    assert sum(kind.share * kind.input_tokens for kind in kinds) == pytest.approx(sum(inputs), abs=3)
    assert sum(kind.share * kind.output_tokens for kind in kinds) == pytest.approx(sum(outputs), abs=3)
    assert sum(kind.share * kind.cached_tokens for kind in kinds) == pytest.approx(sum(cached), abs=3)
    assert len(kinds_of_lengths(inputs, outputs, cached, most=1)) == 1
