"""Samples of prefill work against an engine that is written down here, step by step, and knows what each step held."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.prefill_features import Beside
from router.bookings import Booking
from router.samples import Computed, PrefillSamples
from tests.builders import a_fleet, a_request

STEP_TOKENS = 512
LINEAR, ATTENTION, STEPS = 1.5, 2.0, 1.1  # true coefficients; constant and memory are zero
VIEW = a_fleet("A100")
LINEAR_S, PAIR_S = float(VIEW.linear_s_per_token[0]), float(VIEW.attention_s_per_pair[0])
HEAD_S, WEIGHTS_S = float(VIEW.head_s[0]), float(VIEW.weights_s[0])
TRUE = np.array([LINEAR, ATTENTION, STEPS, 0.0, 0.0])


@dataclass(eq=False)
class Asked:
    """One request of a run. ready_at_s : when its fetch is over; believed_tokens : to be computed, as booked."""

    at_s: float
    new_tokens: int
    cached_tokens: int = 0
    ready_at_s: float = 0.0
    streams: bool = True
    believed_tokens: int | None = None
    done_tokens: int = 0
    booking: Booking = field(init=False)

    def __post_init__(self) -> None:
        believed = self.new_tokens if self.believed_tokens is None else self.believed_tokens
        prompt = self.new_tokens + self.cached_tokens
        self.booking = a_booking(self.at_s, self.ready_at_s, believed, prompt - believed, streams=self.streams)


@dataclass(eq=False)
class FakeBooking:
    """What samples read of a booking."""

    request: object
    row: int
    placed_at_s: float
    ready_at_s: float
    new_tokens: float
    reused_tokens: float
    held_s: float = 0.0


def a_booking(at_s: float, ready_at_s: float, new: float, reused: float, *, streams: bool) -> Booking:
    return cast(Booking, FakeBooking(a_request(streams=streams), 0, at_s, max(at_s, ready_at_s), new, reused))


@dataclass(frozen=True)
class Sample:
    features: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    took_s: float
    blur_s: float

    @property
    def error(self) -> float:
        """Of the true coefficients on this sample, relative; zero when its work is exactly what was done."""
        return float(self.features @ TRUE) / self.took_s - 1.0


@dataclass
class Heard:
    """Samples of one replica, beside so many decodes."""

    decodes: float = 0.0
    context_tokens: float = 0.0
    disturbed: bool = False
    samples: list[Sample] = field(default_factory=list)

    def listener(self) -> PrefillSamples:
        return PrefillSamples(
            VIEW,
            work_s=lambda _row, new, cached: (new * LINEAR_S, (new * cached + new * new / 2) * PAIR_S),
            beside=lambda _row: Beside(
                decodes=self.decodes,
                linear_s=self.decodes * (LINEAR_S + HEAD_S),
                attention_s=self.context_tokens * PAIR_S,
                memory_s=WEIGHTS_S,
                weights_s=WEIGHTS_S,
            ),
            step_tokens=STEP_TOKENS,
            on_sample=lambda _row, features, took_s, blur_s: self.samples.append(Sample(features, took_s, blur_s)),
            disturbed=lambda _row: self.disturbed,
        )


def engine(asked: list[Asked], heard: Heard) -> list[tuple[float, Asked]]:
    """First tokens, in order of time, of an engine that computes prompts in full steps, the first ready one first."""
    room = STEP_TOKENS - int(heard.decodes)
    left = sorted(asked, key=lambda one: max(one.at_s, one.ready_at_s))
    now_s, firsts = 0.0, []
    while left:
        now_s = max(now_s, max(left[0].at_s, left[0].ready_at_s))
        spare, tokens, pairs, over = room, 0, 0.0, []
        for one in left:
            taken = min(spare, one.new_tokens - one.done_tokens)
            if taken <= 0 or max(one.at_s, one.ready_at_s) > now_s:
                break
            pairs += taken * (one.cached_tokens + one.done_tokens) + taken * taken / 2
            one.done_tokens += taken
            spare, tokens = spare - taken, tokens + taken
            if one.done_tokens == one.new_tokens:
                over.append(one)
        matrix_s = (tokens + heard.decodes) * LINEAR_S + (len(over) + heard.decodes) * HEAD_S
        now_s += LINEAR * matrix_s + ATTENTION * (pairs + heard.context_tokens) * PAIR_S + STEPS * WEIGHTS_S
        firsts += [(now_s, one) for one in over]
        left = [one for one in left if one not in over]
    return firsts


def play(asked: list[Asked], heard: Heard, *, decode_s: float = 0.5, reported: bool = True) -> list[Sample]:
    """Everything told in order of time: choices, first tokens of streams, ends."""
    listener = heard.listener()
    told = [(one.at_s, "placed", one) for one in asked]
    for at_s, one in engine(asked, heard):
        told += [(at_s, "first_token", one)] * one.streams + [(at_s + decode_s, "ended", one)]
    for at_s, what, one in sorted(told, key=lambda item: item[0]):
        if what == "placed":
            listener.placed(one.booking, at_s)
        elif what == "first_token":
            listener.first_token(one.booking, at_s)
        else:
            listener.ended(one.booking, Computed(one.new_tokens, one.cached_tokens) if reported else None, at_s)
    return heard.samples


def spaced(count: int, *, new_tokens: int, apart_s: float) -> list[Asked]:
    return [Asked(i * apart_s, new_tokens) for i in range(count)]


@st.composite
def traffic(draw: st.DrawFn) -> list[Asked]:
    at_s, asked = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        at_s += draw(st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.2, 2.0])) + draw(st.floats(0.0, 0.01))
        asked.append(Asked(at_s, draw(st.integers(1, 3000)), draw(st.integers(0, 4)) * 1000))
    return asked


@given(asked=traffic())
def test_the_work_of_every_sharp_sample_is_exactly_what_the_engine_did_in_its_time(asked: list[Asked]) -> None:
    """Whatever the traffic: steps that end one prompt and begin the next are shared out to the last token."""
    for sample in play(asked, Heard()):
        assert sample.blur_s > 0.0 or sample.error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("decodes", [0, 20])
@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_samples_are_many_right_in_the_mean_and_as_blurred_as_they_say(load: float, decodes: int) -> None:
    """Poisson arrivals. This engine has no decode step under way when a prompt comes; samples allow for half of one."""
    rng = np.random.default_rng(7)
    mean_s = 1500 * LINEAR_S * LINEAR + 3 * STEPS * WEIGHTS_S
    arrivals_s = np.cumsum(rng.exponential(mean_s / load, 1500))
    asked = [Asked(at_s, int(rng.integers(10, 3000))) for at_s in arrivals_s.tolist()]
    samples = play(asked, Heard(decodes=decodes, context_tokens=1000.0 * decodes))
    off_s = np.array([sample.error * sample.took_s for sample in samples])
    took_s, blurs_s = (np.array([getattr(sample, name) for sample in samples]) for name in ("took_s", "blur_s"))
    blurred = blurs_s > 0.0
    assert len(samples) > 0.4 * len(asked)
    assert abs(off_s.sum()) < 0.03 * took_s.sum()
    assert (np.abs(off_s[~blurred]) <= 1e-9).mean() > 0.97
    assert float(np.sqrt(np.mean((off_s[blurred] / blurs_s[blurred]) ** 2))) < 2.5


def test_requests_one_at_a_time_are_a_sample_each() -> None:
    samples = play(spaced(10, new_tokens=1300, apart_s=5.0), Heard())
    assert len(samples) == 10
    assert {sample.blur_s for sample in samples} == {0.0}


def test_a_queue_gives_a_sample_for_nearly_every_step_that_ended_a_prompt() -> None:
    rng = np.random.default_rng(3)
    asked = [Asked(i * 1e-4, int(rng.integers(600, 3000))) for i in range(40)]
    samples = play(asked, Heard())
    assert len(samples) >= 36
    assert max(abs(sample.error) for sample in samples) < 1e-9


def test_first_tokens_of_one_step_are_one_sample() -> None:
    asked = [Asked(0.0, 1500), *(Asked(0.001, 100) for _ in range(4))]
    samples = play(asked, Heard())
    assert len(samples) == 2
    assert max(abs(sample.error) for sample in samples) < 1e-9


def test_the_engines_own_count_of_reused_tokens_corrects_the_work() -> None:
    asked = [Asked(i * 5.0, 1300, 0, believed_tokens=300) for i in range(3)]
    samples = play(asked, Heard())
    assert len(samples) == 3
    assert max(abs(sample.error) for sample in samples) < 1e-9


def test_without_knowing_what_was_computed_there_is_no_sample() -> None:
    assert play(spaced(3, new_tokens=1300, apart_s=5.0), Heard(), reported=False) == []


def test_a_start_that_a_fetch_decided_is_no_sample_and_the_one_behind_it_is() -> None:
    asked = [Asked(0.0, 1300, 4000, ready_at_s=0.4), Asked(0.1, 2000, ready_at_s=0.3), Asked(0.35, 700)]
    asked[0].booking.ready_at_s = 0.45  # as believed; nobody knows exactly
    samples = play(asked, Heard())
    assert all(sample.error == pytest.approx(0.0, abs=1e-9) for sample in samples)
    assert len(samples) == 1


def test_an_answer_that_is_not_streamed_is_part_of_the_sample_of_the_stream_behind_it() -> None:
    asked = [Asked(0.0, 1300, streams=False), Asked(0.001, 900), Asked(0.002, 700, streams=False), Asked(0.003, 800)]
    samples = play(asked, Heard(), decode_s=9.0)
    assert len(samples) == 2
    assert max(abs(sample.error) for sample in samples) < 1e-9
    work = sum(float(sample.features[0]) for sample in samples)
    assert work == pytest.approx(sum(one.new_tokens for one in asked) * LINEAR_S + 4 * HEAD_S)


def test_a_pause_behind_an_answer_that_is_not_streamed_is_not_taken_for_work() -> None:
    samples = play([Asked(0.0, 1300, streams=False), Asked(5.0, 900), Asked(9.0, 700)], Heard(), decode_s=20.0)
    assert len(samples) == 1
    assert samples[0].error == pytest.approx(0.0, abs=1e-9)


def test_answers_that_are_never_streamed_give_no_sample() -> None:
    asked = [Asked(i * 0.1, 1300, streams=False) for i in range(5)]
    assert play(asked, Heard()) == []


def test_nothing_is_learned_while_something_else_holds_the_replica_up() -> None:
    assert play(spaced(3, new_tokens=1300, apart_s=5.0), Heard(disturbed=True)) == []


def test_after_a_request_that_left_while_waiting_the_next_sample_is_skipped_and_then_all_is_well() -> None:
    heard = Heard()
    listener = heard.listener()
    left, second, third = (a_booking(at_s, 0.0, 1300, 0, streams=True) for at_s in (0.0, 0.1, 5.0))
    listener.placed(left, 0.0)
    listener.placed(second, 0.1)
    listener.ended(left, None, 0.2)
    listener.first_token(second, 0.6)
    listener.ended(second, Computed(1300, 0), 1.0)
    assert heard.samples == []
    listener.placed(third, 5.0)
    listener.first_token(third, 5.5)
    listener.ended(third, Computed(1300, 0), 6.0)
    assert [sample.took_s for sample in heard.samples] == [pytest.approx(0.5)]


def test_a_request_that_was_overtaken_spoils_the_sample() -> None:
    heard = Heard()
    listener = heard.listener()
    first, second = (a_booking(at_s, 0.0, 1300, 0, streams=True) for at_s in (0.0, 0.1))
    listener.placed(first, 0.0)
    listener.placed(second, 0.1)
    for booking, at_s in ((second, 0.6), (first, 0.9)):
        listener.first_token(booking, at_s)
    for booking in (first, second):
        listener.ended(booking, Computed(1300, 0), 2.0)
    assert all(sample.took_s == pytest.approx(0.3) for sample in heard.samples)


def test_an_end_that_is_told_twice_counts_once() -> None:
    heard = Heard()
    listener = heard.listener()
    booking = a_booking(0.0, 0.0, 1300, 0, streams=True)
    listener.placed(booking, 0.0)
    listener.first_token(booking, 0.5)
    listener.ended(booking, Computed(1300, 0), 1.0)
    listener.ended(booking, None, 1.0)
    assert len(heard.samples) == 1


def test_a_first_token_of_a_booking_nobody_placed_is_passed_over() -> None:
    heard = Heard()
    listener = heard.listener()
    booking = a_booking(0.0, 0.0, 1300, 0, streams=True)
    listener.first_token(booking, 0.5)
    listener.ended(booking, Computed(1300, 0), 1.0)
    assert heard.samples == []


def test_a_request_that_generates_nothing_is_no_prefill() -> None:
    heard = Heard()
    listener = heard.listener()
    booking = cast(Booking, FakeBooking(a_request(generates=False), 0, 0.0, 0.0, nan, nan))
    listener.placed(booking, 0.0)
    listener.ended(booking, None, 1.0)
    other = a_booking(2.0, 0.0, 1300, 0, streams=True)
    listener.placed(other, 2.0)
    listener.first_token(other, 2.5)
    listener.ended(other, Computed(1300, 0), 3.0)
    assert len(heard.samples) == 1


def test_a_fetch_that_held_the_gpu_is_no_sample_of_the_prefill() -> None:
    heard = Heard()
    listener = heard.listener()
    for number, held_s in enumerate((0.0, 0.4)):
        now_s = 10.0 * number
        booking = cast(Booking, FakeBooking(a_request(), 0, now_s, now_s, 1300, 2000, held_s))
        listener.placed(booking, now_s)
        listener.first_token(booking, now_s + 0.2 + held_s)
        listener.ended(booking, Computed(1300, 2000), now_s + 5.0)
    assert len(heard.samples) == 1
