"""Output length: a known distribution must come out, whoever asks, however it was cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.output_length import ANY, PRIOR_TOKENS, Kind, OutputLength, kind_of

Lengths = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], Lengths]


def whole(tokens: npt.NDArray[np.float64]) -> Lengths:
    return np.ceil(tokens).astype(np.int64)


def exponential(rng: np.random.Generator, count: int) -> Lengths:
    """Mean 600 tokens."""
    return rng.geometric(1 / 600, count)


def pareto(rng: np.random.Generator, count: int) -> Lengths:
    """Mean 400 tokens, tail falling with the power 2.5."""
    return whole(600 * rng.pareto(2.5, count))


def mostly_short(rng: np.random.Generator, count: int) -> Lengths:
    """Mean 420 tokens: four in five 100 on average, the others 1,700."""
    return rng.geometric(1 / np.where(rng.random(count) < 0.8, 100, 1700))


def constant(rng: np.random.Generator, count: int) -> Lengths:
    """Always 500 tokens."""
    return np.full(count, 500)


def learned(lengths: Iterable[int], kind: Kind = ANY) -> OutputLength:
    output = OutputLength()
    for tokens in lengths:
        output.observe(int(tokens), kind)
    return output


def time_mean(draw: Draw, ask: Callable[[OutputLength], float], answers: int = 6000, seed: int = 1) -> float:
    """What is said on average while answers go on: a memory of 200 answers leaves noise that has to be averaged out."""
    output, said = OutputLength(), []
    for index, tokens in enumerate(draw(np.random.default_rng(seed), answers)):
        output.observe(int(tokens))
        if index > 1000 and index % 20 == 0:
            said.append(ask(output))
    return float(np.mean(said))


def test_it_starts_at_a_prior_that_has_no_memory() -> None:
    output = OutputLength()
    assert output.expected(None) == output.mean_tokens == PRIOR_TOKENS
    for produced in (1, 50, 400, 1500):
        assert output.expected(None, produced=produced) == pytest.approx(PRIOR_TOKENS, rel=0.03)


def test_it_goes_to_what_is_seen() -> None:
    assert learned([40] * 500).expected(None) == pytest.approx(40, rel=0.01)


def test_every_answer_moves_it_a_little_from_the_first_on() -> None:
    output, said = OutputLength(), [PRIOR_TOKENS]
    for _ in range(20):
        output.observe(1000)
        said.append(output.expected(None))
    assert np.all(np.diff(said) > 0)
    assert said[1] < 500 < said[20]


@pytest.mark.parametrize("produced", [0, 100, 500, 1000])
def test_an_exponential_is_memoryless(produced: int) -> None:
    assert time_mean(exponential, lambda o: o.expected(None, produced=produced)) == pytest.approx(600, rel=0.06)


@pytest.mark.parametrize("produced", [0, 200, 600])
def test_what_is_left_of_a_pareto_grows_with_what_was_produced(produced: int) -> None:
    """Lomax with shape 2.5 and scale 600: (600 + k) / 1.5. The prior's part pulls a little below."""
    said = time_mean(pareto, lambda o: o.expected(None, produced=produced), answers=12000)
    assert said == pytest.approx((600 + produced) / 1.5, rel=0.1)


def test_what_is_left_of_a_constant_shrinks_to_nothing() -> None:
    output = learned(constant(np.random.default_rng(0), 2000))
    left = [output.expected(None, produced=produced) for produced in (0, 100, 250, 400, 480)]
    assert left == pytest.approx([500, 400, 250, 100, 20], abs=8)


def test_beyond_everything_seen_only_the_prior_has_an_opinion() -> None:
    output = learned([10] * 5000)
    assert output.expected(None, produced=5000) == pytest.approx(PRIOR_TOKENS, rel=0.2)
    assert output.expected(None, produced=10**6) == PRIOR_TOKENS
    assert output.expected(10**6 + 7, produced=10**6) == 7


def test_beyond_all_doubles_a_quantile_is_the_prior_s() -> None:
    assert OutputLength().quantile(0.9, None, produced=10**6) == pytest.approx(-PRIOR_TOKENS * np.log(0.1))


def test_empty_answers_count() -> None:
    output = learned([0, 0, 0, 100] * 300)
    assert output.expected(None) == pytest.approx(25, rel=0.1)
    assert output.expected(None, produced=1) == pytest.approx(99, rel=0.1)
    assert output.quantile(0.5, None) == 0.0


def test_a_limit_caps_each_answer_and_not_the_mean() -> None:
    output = learned([10, 990] * 1000)
    assert output.expected(None) == pytest.approx(500, rel=0.03)
    assert output.expected(100) == pytest.approx(55, rel=0.03)


@pytest.mark.parametrize("limit", [1, 50, 300, 1500])
@pytest.mark.parametrize("draw", [exponential, pareto, constant])
def test_a_limited_answer_is_the_mean_of_the_limited_lengths(draw: Draw, limit: int) -> None:
    true = float(np.minimum(draw(np.random.default_rng(99), 200_000), limit).mean())
    assert time_mean(draw, lambda o: o.expected(limit)) == pytest.approx(true, rel=0.06)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 3000), max_size=30),
    st.integers(0, 4000),
    st.integers(1, 5000),
    st.integers(0, 500),
)
def test_a_higher_limit_never_shortens_an_answer_nor_exceeds_what_it_leaves(
    lengths: list[int], produced: int, limit: int, more: int
) -> None:
    output = learned(lengths)
    low, high = (output.expected(m, produced=produced) for m in (limit, limit + more))
    unlimited = output.expected(None, produced=produced)
    assert 0.0 <= low <= high + 1e-9 <= unlimited * (1 + 1e-9) + 1e-9
    assert low <= max(0, limit - produced)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 3000), max_size=30), st.integers(0, 3000), st.integers(1, 50))
def test_expecting_an_answer_token_by_token_adds_up(lengths: list[int], produced: int, step: int) -> None:
    """E[rest] = E[min(rest, step)] + P(rest > step) E[rest after step]; the probability from the quantile's side."""
    output = learned(lengths)
    now = output.expected(None, produced=produced)
    soon = output.expected(produced + step, produced=produced)
    later = output.expected(None, produced=produced + step)
    survives = (now - soon) / later
    assert -1e-9 <= survives <= 1 + 1e-9
    if 0.01 < survives < 0.99:
        assert output.quantile(1 - survives * 0.99, None, produced=produced) >= step - 1e-6
        assert output.quantile(1 - min(1.0, survives * 1.01), None, produced=produced) <= step + 1e-6


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("produced", [0, 300])
def test_quantiles_are_those_of_the_distribution(q: float, produced: int) -> None:
    said = time_mean(exponential, lambda o: o.quantile(q, None, produced=produced), answers=12000)
    assert said == pytest.approx(-600 * np.log(1 - q), rel=0.12)


def test_quantiles_rise_with_q_and_stop_at_the_limit() -> None:
    output = learned(exponential(np.random.default_rng(3), 500))
    said = [output.quantile(q, 800, produced=100) for q in (0.0, 0.2, 0.5, 0.8, 0.95, 0.999)]
    assert said == sorted(said)
    assert (said[0], said[-1]) == (0.0, 700.0)
    assert output.quantile(0.9, 50, produced=100) == 0.0


def test_cancelled_answers_do_not_shorten_what_is_expected() -> None:
    """Clients leave at random, half of them before the end. Counted as ended, the mean would come out at 300."""
    rng = np.random.default_rng(5)
    output, said = OutputLength(), []
    for index, (length, patience) in enumerate(zip(exponential(rng, 12000), exponential(rng, 12000), strict=True)):
        output.observe(int(min(length, patience)), ended=bool(length <= patience))
        if index > 3000 and index % 20 == 0:
            said.append(output.expected(None))
    assert np.mean(said) == pytest.approx(600, rel=0.08)


def test_cut_off_answers_settle_at_the_kaplan_meier_estimate() -> None:
    """Independent reference: the product-limit estimate of E[min(L, 800)] on all that was seen."""
    rng = np.random.default_rng(6)
    lengths = whole(rng.lognormal(5.5, 0.8, 8000))
    patience = whole(rng.uniform(0, 1500, 8000))
    tokens, ended = np.minimum(lengths, patience), lengths <= patience
    survival, expected = 1.0, 0.0
    for k in range(800):
        expected += survival
        survival *= 1.0 - np.sum(ended & (tokens == k + 1)) / max(1, np.sum(tokens > k))
    output, said = OutputLength(), []
    for index, (count, whole_answer) in enumerate(zip(tokens.tolist(), ended.tolist(), strict=True)):
        output.observe(count, ended=whole_answer)
        if index > 1000:
            said.append(output.expected(800))
    assert np.mean(said) == pytest.approx(expected, rel=0.04)


def test_an_answer_that_met_its_limit_does_not_say_that_answers_end_there() -> None:
    output = OutputLength()
    for length in exponential(np.random.default_rng(7), 3000):
        output.observe(int(min(length, 200)), ended=bool(length <= 200))
    assert output.expected(200) == pytest.approx(600 * (1 - np.exp(-1 / 3)), rel=0.06)
    assert output.expected(None, produced=200) > 200


def test_a_request_cancelled_before_its_first_token_teaches_nothing() -> None:
    output, same = learned([30] * 20), learned([30] * 20)
    output.observe(0, ended=False)
    assert output.expected(None) == same.expected(None)


def test_reading_changes_nothing() -> None:
    read, unread = OutputLength(), OutputLength()
    kind, other = kind_of(model="m", session="s"), kind_of(model="never seen", session="nor this")
    for tokens in (5, 500, 50):
        for output in (read, unread):
            output.observe(tokens, kind)
        for asked in (kind, other):
            first = read.expected(80, asked), read.quantile(0.9, None, asked), read.remaining(None, asked, produced=9)
            assert first == (
                read.expected(80, asked),
                read.quantile(0.9, None, asked),
                read.remaining(None, asked, produced=9),
            )
        assert read.expected(None, kind) == unread.expected(None, kind)


def test_what_is_not_known_of_a_kind_is_taken_from_the_next_more_general_one() -> None:
    chat = {"model": "m", "route": "/chat", "prompt_tokens": 3000}
    output = learned([800] * 300, kind_of(**chat, session="long"))  # type: ignore[arg-type]
    new_session = output.expected(None, kind_of(**chat, session="new"))  # type: ignore[arg-type]
    new_route = output.expected(None, kind_of(model="m", route="/completions", prompt_tokens=3000))
    new_length = output.expected(None, kind_of(model="m", route="/chat", prompt_tokens=60_000))
    new_model = output.expected(None, kind_of(model="other", route="/chat", prompt_tokens=3000))
    assert new_session == pytest.approx(800, rel=0.01)
    assert new_route == new_length == pytest.approx(800, rel=0.02)
    assert new_model == PRIOR_TOKENS


def test_a_group_departs_from_its_model_and_a_session_from_its_group() -> None:
    output = OutputLength()
    short, long = (kind_of(model="m", route=route) for route in ("/short", "/long"))
    for _ in range(200):
        output.observe(50, short)
        output.observe(1000, long)
    assert output.expected(None, short) < 150 < 900 < output.expected(None, long)

    own = kind_of(model="m", route="/short", session="writes novels")
    said = [output.expected(None, own)]
    for _ in range(4):
        output.observe(2000, own)
        said.append(output.expected(None, own))
    assert np.all(np.diff(said) > 0)
    assert said[0] < 150
    assert said[4] > 1500
    assert output.expected(None, short) < 300


def test_a_session_is_one_model_s() -> None:
    output = learned([9] * 8, kind_of(model="a", session="s"))
    assert output.expected(None, kind_of(model="b", session="s")) == PRIOR_TOKENS


def test_no_name_and_an_empty_name_are_no_session() -> None:
    assert kind_of(model="m", session="") == kind_of(model="m") == kind_of(model="m", session=None)


def test_nearby_prompt_lengths_are_one_group_and_distant_ones_are_not() -> None:
    assert kind_of(prompt_tokens=3000) == kind_of(prompt_tokens=3500)
    assert kind_of(prompt_tokens=300) != kind_of(prompt_tokens=3000)


def test_a_new_habit_is_followed() -> None:
    output = learned([100] * 2000)
    for _ in range(1000):
        output.observe(900)
    assert output.expected(None) == pytest.approx(900, rel=0.03)


def test_the_sessions_answered_longest_ago_are_forgotten_first() -> None:
    output = OutputLength(sessions=10)

    def answers(session: int, tokens: int, count: int) -> None:
        for _ in range(count):
            output.observe(tokens, kind_of(session=str(session)))

    answers(0, 2000, 8)
    answers(1, 2000, 8)
    for session in range(2, 10):
        answers(session, 20, 8)
    answers(0, 2000, 1)
    for session in range(10, 15):
        answers(session, 20, 8)
    assert output.expected(None, kind_of(session="0")) > 1500
    assert output.expected(None, kind_of(session="1")) == output.expected(None) < 500


def test_a_flood_of_names_leaves_the_memory_bounded() -> None:
    output = OutputLength(groups=8, sessions=8, models=8)
    for name in range(200):
        output.observe(70, kind_of(model=f"m{name}", route=f"r{name}", session=f"s{name}"))
    known = [output.expected(None, kind_of(model=f"m{name}")) != PRIOR_TOKENS for name in range(200)]
    assert sum(known) == 8
    assert all(known[-8:])


@pytest.mark.parametrize("draw", [exponential, mostly_short, constant])
def test_the_sum_over_running_answers_follows_their_real_rest(draw: Draw) -> None:
    """Kept as documented, token by token, against what the answers really had left, both summed over a long run."""
    output = OutputLength()
    held = real = refreshes = tokens = 0.0
    for index, length in enumerate(draw(np.random.default_rng(11), 6000).tolist()):
        produced = 0
        while index > 1000 and produced < length:
            rest = output.remaining(None, produced=produced)
            until = min(rest.refresh_at, length)
            held += rest.tokens * (until - produced)
            real += sum(length - k for k in range(produced, until))
            refreshes += 1
            tokens += until - produced
            produced = until
        output.observe(length)
    assert held == pytest.approx(real, rel=0.03)
    assert refreshes < tokens / 16 + 5000


def test_a_rest_is_asked_again_before_its_limit_and_then_is_nothing() -> None:
    output = learned(exponential(np.random.default_rng(2), 300))
    late = output.remaining(1000, produced=990)
    assert late.refresh_at == 1000
    assert late.tokens <= 5
    over = output.remaining(1000, produced=1000)
    assert over.tokens == 0
    assert over.refresh_at > 1000


def test_running_answers_of_others_have_half_a_constant_left() -> None:
    assert learned([500] * 2000).running_tokens() == pytest.approx(250, rel=0.02)
    assert OutputLength().running_tokens() == pytest.approx(PRIOR_TOKENS, rel=0.01)


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("tokens", lambda o: o.observe(-1)),
        ("produced", lambda o: o.expected(None, produced=-1)),
        ("produced", lambda o: o.remaining(None, produced=-1)),
        ("produced", lambda o: o.quantile(0.5, None, produced=-1)),
        ("q", lambda o: o.quantile(1.0, None)),
        ("q", lambda o: o.quantile(float("nan"), None)),
        ("prompt_tokens", lambda o: kind_of(prompt_tokens=-1)),
        ("size", lambda o: OutputLength(sessions=0)),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(name: str, ask: Callable[[OutputLength], object]) -> None:
    with pytest.raises(ValueError, match=name):
        ask(OutputLength())
