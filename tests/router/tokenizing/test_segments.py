from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tokenizing.segments import AddedToken, Pieces, places_to_cut
from tests.router.tokenizing.small import SPECIAL, a_tokenizer

FRAGMENTS = (
    *SPECIAL,
    *(
        "<|im_start|",
        "im_end|>",
        "<|",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "user",
        "the quick",
        "Größe",
        "你好",
        "é",
        "🙂",
        "1",
    ),
    *("<pad>", "<mask>", "<w>", "x<|im", "ﬁ"),
)
# Tokens that make a text's parts depend on each other: they must stay inside one piece.
AWKWARD: dict[str, dict[str, Any]] = {
    "left": {"content": "<pad>", "lstrip": True, "rstrip": True},
    "normal": {"content": "<mask>", "normalized": True},
    "word": {"content": "<w>", "single_word": True},
    "longer": {"content": "<|im_start|>user", "normalized": False},
}


def encoder(tokenizer: Any) -> Callable[[list[str]], list[Sequence[int]]]:
    return lambda texts: [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]


def cuts_of(tokenizer: Any, text: str) -> list[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    flags = ("content", "special", "normalized", "lstrip", "rstrip", "single_word")
    return places_to_cut([AddedToken(**{flag: getattr(token, flag) for flag in flags}) for token in added], text)


TOKENIZERS = {
    "bytes": a_tokenizer("bytes"),
    "bos": a_tokenizer("bos"),
    "spaces": a_tokenizer("spaces"),
    "awkward": a_tokenizer("bytes", **{name: dict(flags) for name, flags in AWKWARD.items()}),
    "awkward spaces": a_tokenizer("spaces", **{name: dict(flags) for name, flags in AWKWARD.items()}),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=14).map("".join))
@settings(max_examples=120, deadline=None)
def test_the_tokens_of_the_pieces_are_those_of_the_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = Pieces(encoder(tokenizer), cuts_of(tokenizer, "".join(SPECIAL)), limit_bytes=1 << 20)
    whole = array("I", tokenizer.encode(text, add_special_tokens=False).ids)
    assert pieces.tokens_of(text) == whole
    assert pieces.tokens_of(text) == whole  # now from what was kept


def test_a_text_is_cut_before_special_tokens_and_nowhere_else() -> None:
    pieces = Pieces(encoder(TOKENIZERS["bytes"]), SPECIAL, limit_bytes=0)
    text = "a b<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
    assert pieces.split(text) == ["a b", "<|im_start|>user\nhi", "<|im_end|>\n", "<|im_start|>"]
    assert pieces.split("") == [""]
    assert Pieces(encoder(TOKENIZERS["bytes"]), [], limit_bytes=0).split(text) == [text]


def test_a_token_that_takes_in_its_surroundings_is_no_place_to_cut() -> None:
    safe = AddedToken("<|a|>", special=True)
    unsafe = [
        AddedToken("<|b|>"),
        AddedToken("<|c|>", special=True, normalized=True),
        AddedToken("<|d|>", special=True, lstrip=True),
        AddedToken("<|e|>", special=True, rstrip=True),
        AddedToken("<|f|>", special=True, single_word=True),
        AddedToken("word", special=True),
    ]
    text = "".join(token.content for token in [safe, *unsafe])
    assert places_to_cut([safe, *unsafe], text) == ["<|a|>"]
    assert places_to_cut([safe], "a template without it") == []


@pytest.mark.parametrize("other", ["x<|a", "x<|a|>", "x<|a|>y", "<<|"])
def test_a_token_another_one_can_cover_from_the_left_is_no_place_to_cut(other: str) -> None:
    safe = AddedToken("<|a|>", special=True)
    assert places_to_cut([safe, AddedToken(other)], "<|a|>") == []
    assert places_to_cut([safe, AddedToken("<|a|>and more")], "<|a|>") == ["<|a|>"]


def test_cutting_inside_another_token_would_change_the_tokens() -> None:
    """Why the rule above is there: the library takes the leftmost token."""
    tokenizer = a_tokenizer("bytes", other={"content": "x<|im", "normalized": False})
    careless = Pieces(encoder(tokenizer), ["<|im_end|>"], limit_bytes=0)
    text = "x<|im_end|>"
    assert careless.tokens_of(text) != array("I", tokenizer.encode(text, add_special_tokens=False).ids)
    assert "<|im_end|>" not in cuts_of(tokenizer, "<|im_end|>")


def test_the_next_turn_of_a_chat_tokenises_only_what_is_new() -> None:
    pieces = Pieces(encoder(TOKENIZERS["bytes"]), SPECIAL, limit_bytes=1 << 20)
    turns = [f"<|im_start|>user\nquestion {turn} " + "the quick brown fox " * 200 + "<|im_end|>\n" for turn in range(6)]
    for count in range(1, 7):
        before = pieces.encoded_tokens
        whole = pieces.tokens_of("".join(turns[:count]))
        new = pieces.encoded_tokens - before
        assert new < 1.1 * len(whole) / count
    assert pieces.reused_tokens > pieces.encoded_tokens


def test_what_is_kept_stays_within_its_bytes_and_the_least_used_goes_first() -> None:
    pieces = Pieces(encoder(TOKENIZERS["bytes"]), SPECIAL, limit_bytes=20_000)
    often = "<|im_start|>system\nthe same every time"
    pieces.tokens_of(often)
    for number in range(300):
        pieces.tokens_of(f"{often}<|im_start|>user\nnumber {number} the quick brown fox")
        assert pieces.kept_bytes <= 20_000
    before = pieces.encoded_tokens
    pieces.tokens_of(often)
    assert pieces.encoded_tokens == before


def test_without_room_nothing_is_kept_and_the_tokens_are_the_same() -> None:
    none = Pieces(encoder(TOKENIZERS["bytes"]), SPECIAL, limit_bytes=0)
    text = "<|im_start|>user\nhi<|im_end|>"
    assert none.tokens_of(text) == none.tokens_of(text)
    assert none.kept_bytes == 0
    assert none.reused_tokens == 0
    with pytest.raises(ValueError, match="limit_bytes"):
        Pieces(encoder(TOKENIZERS["bytes"]), SPECIAL, limit_bytes=-1)


def test_a_piece_that_does_not_fit_drives_no_other_out() -> None:
    pieces = Pieces(lambda texts: [[ord(letter) for letter in text] for text in texts], ["|"], limit_bytes=2000)
    pieces.tokens_of("|a|b")
    kept = pieces.kept_bytes
    assert list(pieces.tokens_of("|" + "c" * 1000)) == [ord("|"), *[ord("c")] * 1000]
    assert pieces.kept_bytes == kept
    encoded = pieces.encoded_tokens
    pieces.tokens_of("|a|b")
    assert pieces.encoded_tokens == encoded


@given(st.lists(st.text("ab|", max_size=300), max_size=20), st.integers(0, 3000))
def test_kept_pieces_never_take_more_than_they_may(texts: list[str], limit_bytes: int) -> None:
    pieces = Pieces(lambda texts: [[ord(letter) for letter in text] for text in texts], ["|"], limit_bytes=limit_bytes)
    for text in texts:
        assert list(pieces.tokens_of(text)) == [ord(letter) for letter in text]
        assert pieces.kept_bytes <= limit_bytes
