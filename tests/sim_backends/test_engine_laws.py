"""The engine where theory knows the answer, and where a rule of thumb has to be wrong by a known amount."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from math import sqrt
from statistics import mean, stdev

import pytest

from sim_backends.engine import Engine
from sim_backends.service_times import ServiceTimes
from tests.sim_backends.builders import a_block_request, a_fleet, an_engine, first_tokens, run_out

BUDGET = 512  # tokens in a step; prompts are multiples of it, so that a prefill never shares a step


@cache
def times(card: str = "A100") -> ServiceTimes:
    fleet = a_fleet()
    return ServiceTimes(fleet.model, fleet.cards[card], speed=1.0, jitter=0.0, rng=random.Random(1))


def service_s(model: ServiceTimes, tokens: int, *, budget: int = BUDGET) -> float:
    """Sum of the chunk times of one prompt that has the engine to itself."""
    total_s, done = 0.0, 0
    while done < tokens:
        new = min(budget, tokens - done)
        pairs = float(done) if new == 1 else new * done + new * new / 2  # one token: a row of whole pairs
        read = done if new == 1 else 0  # one token over a long context reads it all, like a decode
        total_s += model.step_s(tokens=new, pairs=pairs, kv_tokens_read=read, emitting=int(done + new == tokens))
        done += new
    return total_s


def a_queue() -> Engine:
    return an_engine(outputs="ends", token_budget=BUDGET, block_tokens=BUDGET, kv_blocks=100_000)


def waits_s(arrivals: list[tuple[float, int]]) -> list[float]:
    """Time of each request between its arrival and the start of its prefill, in order of arrival.

    One token of output and prompts that share nothing: a request is one prefill, first come first served.
    """
    engine = a_queue()
    outputs = []
    for number, (at_s, tokens) in enumerate(arrivals):
        outputs += engine.advance(at_s)
        ids = [8 * number + i for i in range(tokens // BUDGET)]
        engine.submit(a_block_request(ids, tokens, output=1, request_id=str(number)), at_s)
    firsts = first_tokens(outputs + run_out(engine))
    assert engine.counters.prefix_hits == 0
    serve_s = {tokens: service_s(times(), tokens) for tokens in {tokens for _, tokens in arrivals}}
    return [firsts[str(number)] - at_s - serve_s[tokens] for number, (at_s, tokens) in enumerate(arrivals)]


def poisson(rho: float, mix: dict[int, float], *, requests: int, seed: int) -> list[tuple[float, int]]:
    """Arrivals that load one replica to `rho`; `mix` gives the share of each prompt length."""
    rng = random.Random(seed)
    mean_s = sum(share * service_s(times(), tokens) for tokens, share in mix.items())
    lengths = rng.choices(list(mix), list(mix.values()), k=requests)
    at_s, arrivals = 0.0, []
    for tokens in lengths:
        at_s += rng.expovariate(rho / mean_s)
        arrivals.append((at_s, tokens))
    return arrivals


def pollaczek_khinchine_s(rho: float, mix: dict[int, float]) -> float:
    """W = rho E[S^2] / (2 E[S] (1 - rho))."""
    first_s = sum(share * service_s(times(), tokens) for tokens, share in mix.items())
    second_s2 = sum(share * service_s(times(), tokens) ** 2 for tokens, share in mix.items())
    return rho * second_s2 / (2.0 * first_s * (1.0 - rho))


EQUAL = {512: 1.0}
TWO_POINT = {512: 0.8, 2048: 0.2}


@pytest.mark.parametrize(("rho", "mix"), [(0.5, EQUAL), (0.7, EQUAL), (0.5, TWO_POINT)])
def test_the_mean_wait_is_that_of_pollaczek_and_khinchine(rho: float, mix: dict[int, float]) -> None:
    """M/D/1 and M/G/1, within three standard errors of 30 batch means; these must be under 3 % of the wait each."""
    waits = waits_s(poisson(rho, mix, requests=60_000, seed=11))
    batches = [mean(waits[start : start + 2000]) for start in range(0, len(waits), 2000)]
    error_s = stdev(batches) / sqrt(len(batches))
    expected_s = pollaczek_khinchine_s(rho, mix)
    assert error_s < 0.03 * expected_s
    assert mean(waits) == pytest.approx(expected_s, abs=3.0 * error_s)


def test_a_replica_is_a_single_server_to_the_last_digit() -> None:
    """Lindley's recursion on the same arrivals has no chance in it: W[n+1] = max(0, W[n] + S[n] - gap)."""
    arrivals = poisson(0.8, TWO_POINT, requests=2000, seed=3)
    expected_s, wait_s = [0.0], 0.0
    for (at_s, tokens), (next_s, _) in pairwise(arrivals):
        wait_s = max(0.0, wait_s + service_s(times(), tokens) - (next_s - at_s))
        expected_s.append(wait_s)
    assert waits_s(arrivals) == pytest.approx(expected_s, abs=1e-9)


@pytest.mark.parametrize("tokens", [1, 2047, 2048, 2049, 5000, 8192])
def test_a_request_alone_gets_its_first_token_after_the_sum_of_its_chunks(tokens: int) -> None:
    engine = an_engine(token_budget=2048)
    engine.submit(a_block_request(list(range(tokens // 16)), tokens, request_id="x"), 3.0)
    expected_s = service_s(times(), tokens, budget=2048)
    assert first_tokens(run_out(engine))["x"] - 3.0 == pytest.approx(expected_s, rel=1e-9)


# The usual rule of thumb, from the model card of Qwen3-8B and the data sheets alone: 36 layers, hidden 4096,
# 32 + 2 x 8 heads of 128, MLP 12288, vocabulary 151936, BF16.
PARAMETERS_PER_LAYER = 4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 12288
PEAK_FLOPS = {"A100": 312e12, "H20": 148e12}
BYTES_PER_S = {"A100": 2039e9, "H20": 4000e9}


def thumb_prefill_s(card: str, tokens: int) -> float:
    """FLOPs of weights and causal attention over half the peak."""
    flops = 2 * 36 * PARAMETERS_PER_LAYER * tokens + 2 * 36 * 4096 * tokens * tokens
    return flops / (0.5 * PEAK_FLOPS[card])


def thumb_decode_s(card: str) -> float:
    """Bytes of the weights a token passes over 0.8 of the bandwidth."""
    return 2 * (36 * PARAMETERS_PER_LAYER + 4096 * 151936) / (0.8 * BYTES_PER_S[card])


@pytest.mark.parametrize("card", ["A100", "H20"])
def test_a_router_that_trusts_the_roofline_is_at_least_15_percent_off_for_an_8k_prompt(card: str) -> None:
    """The engine has to be something to learn, and still a card: not 30 % off either."""
    engine = an_engine(card=card, token_budget=2048)
    engine.submit(a_block_request(list(range(512)), 8192, request_id="x"), 0.0)
    first_s = first_tokens(run_out(engine))["x"]
    assert 1.15 < first_s / thumb_prefill_s(card, 8192) < 1.30


@pytest.mark.parametrize(("card", "least", "most"), [("A100", 1.10, 1.25), ("H20", 1.25, 1.40)])
def test_a_lone_decode_step_is_longer_than_reading_the_weights(card: str, least: float, most: float) -> None:
    """1.5 ms of overhead a step weigh more on the card that reads faster: 17 % over on A100, 32 % on H20."""
    engine = an_engine(card=card)
    engine.submit(a_block_request([], 15, output=101, max_tokens=101), 0.0)
    outputs = run_out(engine)
    step_s = (outputs[-1].at_s - outputs[0].at_s) / 100
    assert least < step_s / thumb_decode_s(card) < most
