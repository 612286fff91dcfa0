from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tokenizing.chunks import BYTES_PER_TOKEN, MOST_CHUNKS, chunk_chain

MANY = 10**9


@given(st.binary(max_size=400), st.binary(max_size=400), st.integers(1, 8))
def test_equal_beginnings_share_all_their_full_chunks_and_nothing_after_the_first_difference(
    common: bytes, rest: bytes, block_tokens: int
) -> None:
    one = chunk_chain(1, [common + b"\0" + rest], block_tokens=block_tokens, prompt_tokens=MANY)
    other = chunk_chain(1, [common + b"\1" + rest], block_tokens=block_tokens, prompt_tokens=MANY)
    shared = len(common) // (BYTES_PER_TOKEN * block_tokens)
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


@given(st.lists(st.binary(max_size=90), max_size=6), st.integers(0, 60))
def test_how_a_text_is_divided_into_parts_does_not_matter(parts: list[bytes], prompt_tokens: int) -> None:
    whole = chunk_chain(7, [b"".join(parts)], block_tokens=2, prompt_tokens=prompt_tokens)
    assert chunk_chain(7, map(memoryview, parts), block_tokens=2, prompt_tokens=prompt_tokens) == whole


@pytest.mark.parametrize(("prompt_tokens", "chunks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (MANY, 15)])
def test_chunks_stand_for_less_than_the_whole_prompt(prompt_tokens: int, chunks: int) -> None:
    assert len(chunk_chain(1, [b"x" * 1000], block_tokens=16, prompt_tokens=prompt_tokens)) == chunks


def test_very_long_texts_are_known_by_their_beginning() -> None:
    text = b"x" * (BYTES_PER_TOKEN * (MOST_CHUNKS + 100))
    assert len(chunk_chain(1, [text], block_tokens=1, prompt_tokens=MANY)) == MOST_CHUNKS


def test_identities_share_no_chunk() -> None:
    ask = {"block_tokens": 1, "prompt_tokens": MANY}
    assert not set(chunk_chain(1, [b"x" * 400], **ask)) & set(chunk_chain(2, [b"x" * 400], **ask))
