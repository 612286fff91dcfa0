from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.known import PLANNED_CARDS
from estimators.planning.recovery import page_segments, page_use, patience_s, resume
from estimators.roofline import Roofline
from estimators.shapes import QWEN3_8B

A100 = Roofline.of(QWEN3_8B, PLANNED_CARDS["A100"])
TOKENS = st.integers(1, 20_000)


@given(prompt=TOKENS, stored=st.integers(0, 30_000), page=st.integers(1, 512))
def test_pages_of_use_leave_at_least_one_token_to_compute(prompt: int, stored: int, page: int) -> None:
    use = page_use(prompt_tokens=prompt, stored_tokens=stored, page_tokens=page, token_bytes=1.0)
    assert use.used_tokens < prompt
    assert use.read_pages - 1 <= use.used_pages <= use.read_pages
    assert use.read_bytes <= min(stored, prompt)


def test_only_a_prompt_that_ends_with_a_page_reads_one_in_vain() -> None:
    def wasted(prompt: int) -> int:
        use = page_use(prompt_tokens=prompt, stored_tokens=prompt, page_tokens=16, token_bytes=1.0)
        return use.read_pages - use.used_pages

    assert [wasted(prompt) for prompt in (1023, 1024, 1025)] == [0, 1, 0]


def test_a_page_has_the_same_bytes_in_one_piece_or_in_layers() -> None:
    whole, apart = (
        page_segments(layers=36, page_bytes=9e6, gathered=True),
        page_segments(layers=36, page_bytes=9e6, gathered=False),
    )
    assert whole == (1, 9e6)
    assert apart[0] == 72
    assert apart[0] * apart[1] == pytest.approx(9e6)


@given(prompt=TOKENS, answered=st.integers(1, 5000), saved=st.integers(0, 30_000), logged=st.booleans())
def test_saved_replayed_and_redrawn_tokens_make_up_the_state(
    prompt: int, answered: int, saved: int, logged: bool
) -> None:
    done = resume(
        A100, prompt_tokens=prompt, answered_tokens=answered, saved_tokens=saved, logged=logged, read_bytes_per_s=25e9
    )
    assert min(saved, done.state_tokens) + done.replayed_tokens + done.redrawn_tokens == prompt + answered - 1
    assert done.read_bytes == pytest.approx(min(saved, done.state_tokens) * QWEN3_8B.kv_bytes_per_token)
    assert not (logged and done.redrawn_tokens)


def test_a_log_turns_a_thousand_steps_into_one_prefill() -> None:
    def ready_s(*, logged: bool) -> float:
        return resume(
            A100,
            prompt_tokens=8192,
            answered_tokens=1025,
            saved_tokens=8192,
            logged=logged,
            read_bytes_per_s=25e9,
        ).ready_s

    prefill_s = A100.prefill_s(new_tokens=1024, cached_tokens=8192)
    read_s = 8192 * QWEN3_8B.kv_bytes_per_token / 25e9
    assert ready_s(logged=True) == pytest.approx(read_s + prefill_s)
    assert ready_s(logged=False) > read_s + 1000 * A100.decode_step_s([8192])


def test_state_of_all_tokens_leaves_nothing_to_replay() -> None:
    done = resume(
        A100, prompt_tokens=8192, answered_tokens=1025, saved_tokens=9216, logged=False, read_bytes_per_s=25e9
    )
    assert (done.replayed_tokens, done.redrawn_tokens, done.replay_s, done.redraw_s) == (0, 0, 0.0, 0.0)


@given(read_s=st.floats(0, 10), compute_s=st.floats(0.01, 10), comes_s=st.floats(0, 100))
def test_patience_never_takes_more_than_twice_the_better_way(read_s: float, compute_s: float, comes_s: float) -> None:
    """Whenever the state appears, of all moments it might: the competitive ratio of a rented and a bought ski."""
    patience = patience_s(read_s=read_s, compute_s=compute_s)
    comes_in_time = patience > 0 and comes_s <= patience
    taken_s = comes_s + read_s if comes_in_time else patience + compute_s
    best_s = min(comes_s + read_s, compute_s)
    assert taken_s <= 2 * best_s + 1e-9


def test_an_answer_without_a_token_has_no_state_to_resume() -> None:
    with pytest.raises(ValueError, match="answered_tokens"):
        resume(A100, prompt_tokens=10, answered_tokens=0, saved_tokens=0, logged=True, read_bytes_per_s=1e9)
