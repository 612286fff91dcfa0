from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.model_list import merged

CARD: dict[str, Any] = {
    "id": "m",
    "object": "model",
    "created": 1700000000,
    "owned_by": "vllm",
    "root": "/models/m",
    "parent": None,
    "max_model_len": 40960,
    "permission": [{"id": "modelperm-1"}],
}
ADAPTER = {**CARD, "id": "ad-1", "parent": "m"}


def test_a_model_that_one_endpoint_serves_keeps_its_card_as_it_came() -> None:
    assert merged([[CARD, ADAPTER], [{"id": "n"}]], {}) == [ADAPTER, CARD, {"id": "n"}]


def test_of_a_model_that_several_serve_what_they_agree_on_is_told() -> None:
    other = {**CARD, "created": 1600000000, "max_model_len": 8192, "permission": [{"id": "modelperm-2"}], "root": "/x"}
    (card,) = merged([[CARD], [other]], {})
    assert card == {
        "id": "m",
        "object": "model",
        "created": 1600000000,
        "owned_by": "vllm",
        "parent": None,
        "max_model_len": 8192,
    }


def test_a_length_that_one_of_them_does_not_tell_is_not_told() -> None:
    silent = {key: value for key, value in CARD.items() if key != "max_model_len"}
    (card,) = merged([[CARD], [silent]], {})
    assert "max_model_len" not in card


def test_an_alias_has_the_card_of_its_model_unless_a_model_has_its_name() -> None:
    aliases = {"short": "m", "n": "m", "dangling": "gone"}
    cards = {card["id"]: card for card in merged([[CARD], [{"id": "n"}]], aliases)}
    assert cards.keys() == {"m", "n", "short"}
    assert cards["short"] == {**CARD, "id": "short"}
    assert cards["n"] == {"id": "n"}


_value = st.none() | st.integers(0, 3) | st.text("ab", max_size=1)
_cards = st.fixed_dictionaries({"id": st.sampled_from("mno")}, optional={"created": _value, "x": _value})


@given(lists=st.lists(st.lists(_cards, max_size=3), max_size=4))
def test_each_model_is_listed_once_and_every_field_comes_from_a_replica(lists: list[list[dict[str, Any]]]) -> None:
    cards = merged(lists, {})
    assert [card["id"] for card in cards] == sorted({card["id"] for one in lists for card in one})
    for card in cards:
        said = [one for some in lists for one in some if one["id"] == card["id"]]
        assert all(any(one.get(key) == value for one in said) for key, value in card.items())
    assert merged([], {}) == []
