from __future__ import annotations

import random
from array import array

import pytest

from router.identity import Identity, chain

BASE = Identity("m")
TOKENS = list(range(1000, 1064))


def test_a_chain_has_one_hash_for_each_full_block() -> None:
    assert [len(chain(7, TOKENS[:n], 16)) for n in (0, 15, 16, 31, 32, 64)] == [0, 0, 1, 1, 2, 4]


def test_equal_prefixes_share_hashes_up_to_the_first_difference_and_never_after() -> None:
    other = TOKENS.copy()
    other[20] += 1
    same, different = chain(7, TOKENS, 16), chain(7, other, 16)
    assert same[0] == different[0]
    assert not set(same[1:]) & set(different[1:])


def test_a_chain_can_be_continued_from_any_of_its_blocks() -> None:
    whole = chain(BASE.root(), TOKENS, 16)
    assert chain(whole[1], TOKENS[32:], 16) == whole[2:]


@pytest.mark.parametrize(
    "other",
    [
        Identity("n"),
        Identity("m", adapter="a"),
        Identity("m", salt="s"),
        Identity("m", block_tokens=32),
        Identity("m", weights="2026-11"),
        Identity("m", tokenizer="t"),
        Identity("m", positions="yarn 4"),
        Identity("m", state_format="fp8"),
    ],
)
def test_whatever_belongs_to_the_identity_separates_the_chains(other: Identity) -> None:
    assert not set(chain(BASE.root(), TOKENS, 16)) & set(chain(other.root(), TOKENS, 16))


def test_fields_of_the_identity_do_not_run_into_each_other() -> None:
    assert Identity("ab", "c").root() != Identity("a", "bc").root()
    alike = [
        Identity("m", salt="x"),
        Identity("m", weights="x"),
        Identity("m", tokenizer="x"),
        Identity("m", positions="x"),
        Identity("m", state_format="x"),
    ]
    assert len({identity.root() for identity in alike}) == len(alike)


def test_the_root_is_the_same_in_every_process() -> None:
    """A fixed value: a change here would split routers that share a directory, and must be deliberate."""
    assert Identity("Qwen/Qwen3-8B").root() == 4127969980024571181
    assert chain(Identity("Qwen/Qwen3-8B").root(), TOKENS[:16], 16) == [4004800944344592138]


def test_an_array_of_tokens_gives_the_chain_of_a_list() -> None:
    for tokens in (TOKENS, TOKENS[:50], TOKENS[:15], []):
        assert chain(7, array("I", tokens), 16) == chain(7, tokens, 16) == chain(7, array("Q", tokens), 16)


def test_many_random_blocks_do_not_collide() -> None:
    chance = random.Random(5)
    hashes = {chain(BASE.root(), [chance.randrange(2**32) for _ in range(16)], 16)[0] for _ in range(20_000)}
    assert len(hashes) == 20_000


@pytest.mark.parametrize("bad", [[-1] * 16, [2**32] * 16, ["a"] * 16, [1.5] * 16])
def test_what_is_not_a_token_id_is_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        chain(7, bad, 16)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        chain(7, TOKENS, 0)
