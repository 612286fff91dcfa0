from __future__ import annotations

from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.tiers import Tier
from router.signals.lmcache import Holding
from router.signals.looked_up import Answers

STRIDE = 4
CHAIN = list(range(100, 132))  # 8 strides of 4 blocks of 16 tokens
CHUNK = STRIDE * 16


def an_answers(**changes: float) -> Answers:
    settings: dict[str, float] = {"ttl_s": 10.0, "most": 1000, **changes}
    return Answers(
        2,
        {"a": 0, "b": 1},
        block_tokens=16,
        chunk_tokens=CHUNK,
        ttl_s=settings["ttl_s"],
        most=int(settings["most"]),
    )


def host(instance: str, chunks: int) -> Holding:
    return Holding(instance, Tier.HOST, chunks * CHUNK)


def test_each_holder_and_tier_is_counted_alone() -> None:
    answers = an_answers()
    held = [host("a", 2), Holding("b", Tier.DISK, 5 * CHUNK), Holding(None, Tier.REMOTE, 8 * CHUNK)]
    answers.answered(CHAIN, held, 0.0)
    found = answers.held(CHAIN, 1.0)
    assert found.host_blocks.tolist() == [8, 0]
    assert found.disk_blocks.tolist() == [0, 20]
    assert (found.store_blocks, found.age_s) == (32, 1.0)


def test_a_longer_prompt_profits_from_an_answer_about_its_beginning() -> None:
    answers = an_answers()
    answers.answered(CHAIN[:16], [host("a", 4)], 0.0)
    assert answers.held(CHAIN, 0.0).host_blocks.tolist() == [16, 0]


def test_a_shorter_prompt_with_the_same_beginning_is_cut_to_its_length() -> None:
    answers = an_answers()
    answers.answered(CHAIN, [host("a", 8)], 0.0)
    assert answers.held(CHAIN[:9], 0.0).host_blocks.tolist() == [8, 0]


def test_nothing_is_known_of_a_prompt_that_was_never_asked_about() -> None:
    found = an_answers().held(CHAIN, 0.0)
    assert (found.host_blocks.tolist(), found.store_blocks) == ([0, 0], 0)
    assert isnan(found.age_s)


def test_an_answer_is_believed_for_its_time_and_not_longer() -> None:
    answers = an_answers(ttl_s=5.0)
    answers.answered(CHAIN, [host("a", 8)], 0.0)
    assert answers.held(CHAIN, 5.0).host_blocks[0] == 32
    assert answers.held(CHAIN, 5.001).host_blocks[0] == 0


def test_the_newest_answer_alone_counts() -> None:
    answers = an_answers()
    answers.answered(CHAIN, [host("a", 8), host("b", 3)], 0.0)
    answers.answered(CHAIN, [host("a", 1)], 1.0)
    assert answers.held(CHAIN, 1.0).host_blocks.tolist() == [4, 0]
    answers.answered(CHAIN, [], 2.0)
    assert answers.held(CHAIN, 2.0).host_blocks.tolist() == [0, 0]
    assert len(answers) == 0


def test_part_of_a_chunk_is_not_counted_and_a_stranger_is() -> None:
    answers = an_answers()
    answers.answered(CHAIN, [Holding("a", Tier.HOST, CHUNK + 17), Holding("x", Tier.HOST, CHUNK)], 0.0)
    assert answers.held(CHAIN, 0.0).host_blocks.tolist() == [4, 0]
    assert answers.strangers == 1


def test_memory_is_bounded_and_the_start_of_a_prompt_goes_last() -> None:
    answers = an_answers(most=3)
    answers.answered(CHAIN, [host("a", 8)], 0.0)
    assert len(answers) == 3
    assert answers.held(CHAIN, 0.0).host_blocks.tolist() == [12, 0]


@given(
    st.lists(
        st.tuples(st.sampled_from(["xxxx", "xxyy", "xxyz", "y"]), st.integers(0, 4), st.integers(0, 4)), max_size=12
    ),
    st.sampled_from(["xxxx", "xxyy", "xxyz", "xx", "yy"]),
)
def test_no_more_is_believed_than_the_last_answer_about_each_block_said(
    history: list[tuple[str, int, int]], asked: str
) -> None:
    """Reference: for each prefix the last answer that covered it, kept as plain sets."""
    answers, model = an_answers(), dict[str, set[str]]()
    for at_s, (prompt, a, b) in enumerate(history):
        reach = {"a": min(a, len(prompt)), "b": min(b, len(prompt))}
        answers.answered(chain_of(prompt), [host(name, far) for name, far in reach.items() if far], float(at_s) / 10)
        for depth in range(1, len(prompt) + 1):
            model[prompt[:depth]] = {name for name, far in reach.items() if far >= depth}
    expected = {"a": 0, "b": 0}
    for depth in range(1, len(asked) + 1):
        for name in expected:
            if expected[name] == depth - 1 and name in model.get(asked[:depth], set()):
                expected[name] = depth
    found = answers.held(chain_of(asked), 2.0).host_blocks
    assert found.tolist() == [expected["a"] * STRIDE, expected["b"] * STRIDE]


def chain_of(prompt: str) -> list[int]:
    """One stride of blocks for each letter, named by everything up to it."""
    return [hash((prompt[: place // STRIDE + 1], place)) for place in range(len(prompt) * STRIDE)]


@pytest.mark.parametrize(
    "wrong",
    [{"block_tokens": 0}, {"chunk_tokens": 24}, {"chunk_tokens": 8}, {"ttl_s": 0.0}, {"most": 0}, {"rows": 0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    settings = {"block_tokens": 16, "chunk_tokens": 64, "ttl_s": 1.0, "most": 1, "rows": 1, **wrong}
    with pytest.raises(ValueError, match="out of range"):
        Answers(
            int(settings["rows"]),
            {},
            block_tokens=int(settings["block_tokens"]),
            chunk_tokens=int(settings["chunk_tokens"]),
            ttl_s=settings["ttl_s"],
            most=int(settings["most"]),
        )
