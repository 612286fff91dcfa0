from __future__ import annotations

import random
import statistics

import msgspec
import pytest

from sim_backends.fleet import Fleet
from sim_backends.requests import EngineRequest
from sim_backends.service_times import Jitter, ServiceTimes
from sim_backends.world import build
from tests.sim_backends.builders import a_fleet


def times(card: str = "A100", *, speed: float = 1.0, jitter: float = 0.0) -> ServiceTimes:
    fleet = a_fleet()
    return ServiceTimes(fleet.model, fleet.cards[card], speed=speed, jitter=jitter, rng=random.Random(1))


def prefill_s(model: ServiceTimes, tokens: int, *, chunk: int = 2048) -> float:
    total_s, done = 0.0, 0
    while done < tokens:
        new = min(chunk, tokens - done)
        last = int(done + new == tokens)
        total_s += model.step_s(tokens=new, pairs=new * done + new * new / 2, kv_tokens_read=0, emitting=last)
        done += new
    return total_s


def decode_s(model: ServiceTimes, batch: int, context: int) -> float:
    return model.step_s(tokens=batch, pairs=batch * context, kv_tokens_read=batch * context, emitting=batch)


# FLOPs of an 8192-token prompt of Qwen3-8B over half the card's peak, worked out by hand:
# 2 x 6.9457e9 x 8192 + 4 x 36 x 4096 x 8192^2 / 2 = 1.1380e14 + 0.1979e14.
@pytest.mark.parametrize(("card", "half_peak"), [("A100", 156e12), ("H20", 74e12)])
def test_an_8k_prompt_takes_15_to_25_percent_over_half_peak(card: str, half_peak: float) -> None:
    assert 1.15 < prefill_s(times(card), 8192) / (1.3359e14 / half_peak) < 1.25


def test_small_chunks_cost_more_a_token_than_large_ones() -> None:
    model = times()
    assert prefill_s(model, 2048, chunk=128) > 1.3 * prefill_s(model, 2048, chunk=2048)


def test_prefill_is_faster_on_a100_and_decode_on_h20() -> None:
    assert prefill_s(times("A100"), 4096) < prefill_s(times("H20"), 4096) / 1.8
    assert decode_s(times("H20"), 8, 4000) < decode_s(times("A100"), 8, 4000) / 1.7


def test_a_decode_step_is_bound_by_reading_weights_and_kv() -> None:
    """15.1 GB of weights and 8 x 4000 tokens of 147456 bytes at 80 % of 2039 GB/s, by hand: 12.2 ms."""
    assert decode_s(times(), 8, 4000) == pytest.approx(12.17e-3 + 1.5e-3, rel=0.01)


def test_speed_divides_every_part_of_a_step() -> None:
    assert prefill_s(times(speed=8.0), 3000) == pytest.approx(prefill_s(times(), 3000) / 8, rel=1e-12)
    assert decode_s(times(speed=8.0), 4, 100) == pytest.approx(decode_s(times(), 4, 100) / 8, rel=1e-12)


def test_jitter_keeps_the_mean_and_has_its_sigma() -> None:
    noisy = times(jitter=0.03)
    exact_s = decode_s(times(), 4, 100)
    factors = [decode_s(noisy, 4, 100) / exact_s for _ in range(20_000)]
    assert statistics.mean(factors) == pytest.approx(1.0, abs=0.002)  # standard error 0.0002
    assert statistics.stdev(factors) == pytest.approx(0.03, rel=0.05)


@pytest.mark.parametrize("jitter", [0.0, 0.03])
def test_many_decode_steps_at_once_end_when_they_do_one_by_one(jitter: float) -> None:
    """To the last digit, or a replay would drift from the steps it stands for."""
    one_by_one, at_once = times(jitter=jitter), times(jitter=jitter)
    at_s, ends_s = 5.0, []
    for step in range(300):
        read = 90_000 + 7 * step
        at_s += one_by_one.step_s(tokens=7, pairs=float(read), kv_tokens_read=read, emitting=7)
        ends_s.append(at_s)
    assert at_once.decode_ends_s(5.0, 300, decoding=7, kv_tokens_read=90_000) == ends_s


def test_steps_that_did_not_take_place_leave_their_chance_to_those_that_do() -> None:
    plain, cut = times(jitter=0.03), times(jitter=0.03)
    expected = [decode_s(plain, 4, 100) for _ in range(1501)][1500]
    cut.decode_ends_s(0.0, 2500, decoding=1, kv_tokens_read=10)
    cut.give_back(1000)
    assert decode_s(cut, 4, 100) == expected


def test_no_more_chance_goes_back_than_was_taken() -> None:
    jitter = Jitter(0.1, random.Random(1))
    jitter.take(3)
    with pytest.raises(AssertionError):
        jitter.give_back(4)


def test_stragglers_are_the_stated_share_of_steps_and_that_much_longer() -> None:
    jitter = Jitter(0.0, random.Random(2), straggler_share=0.02, straggler_factor=6.0)
    factors = jitter.take(50_000)
    slow = [factor for factor in factors if factor > 1.0]
    assert set(slow) == {6.0}
    assert len(slow) / len(factors) == pytest.approx(0.02, rel=0.1)


def test_stragglers_that_were_not_used_come_again() -> None:
    jitter = Jitter(0.03, random.Random(2), straggler_share=0.1, straggler_factor=6.0)
    first = jitter.take(40)
    jitter.give_back(25)
    assert jitter.take(25) == first[15:]


def test_a_slow_replica_takes_longer_for_everything() -> None:
    healthy = a_fleet()
    slow = msgspec.structs.replace(
        healthy, replicas=[msgspec.structs.replace(replica, slow=2.5) for replica in healthy.replicas]
    )

    def first_token_s(fleet: Fleet) -> float:
        world = build(fleet, seed=1)
        world.submit(0, EngineRequest(request_id="r", prompt=list(range(4000)), max_tokens=1), 0.0)
        (output,) = world.advance(1e3)
        return output.at_s

    assert first_token_s(slow) == pytest.approx(2.5 * first_token_s(healthy))


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_a_slow_engine_takes_as_many_times_longer_for_steps_one_by_one_and_in_a_row(jitter: float) -> None:
    healthy, slow = times(jitter=jitter), times(jitter=jitter)
    slow.slow_factor = 4.0
    assert decode_s(slow, 8, 4000) == pytest.approx(4.0 * decode_s(healthy, 8, 4000), rel=1e-12)
    row = [model.decode_ends_s(0.0, 5, decoding=8, kv_tokens_read=32000) for model in (healthy, slow)]
    assert row[1] == pytest.approx([4.0 * end_s for end_s in row[0]], rel=1e-12)
