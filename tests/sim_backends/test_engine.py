from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import Removed, Stored
from sim_backends.engine import Engine
from sim_backends.requests import EngineRequest, Output, RequestRefused
from tests.sim_backends.builders import a_request, an_engine, first_tokens, prompt, run_out


def tokens_of(outputs: list[Output], request_id: str) -> list[Output]:
    return [output for output in outputs if output.request_id == request_id]


def test_a_request_emits_its_tokens_in_order_and_ends_once() -> None:
    engine = an_engine()
    engine.submit(a_request(40, output=5, request_id="a"), 1.0)
    outputs = run_out(engine)
    assert [output.index for output in outputs] == [0, 1, 2, 3, 4]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["stop"]
    assert engine.cache.free_blocks == engine.cache.size


def test_running_into_max_tokens_ends_with_length() -> None:
    engine = an_engine()
    engine.submit(a_request(output=50, max_tokens=3), 0.0)
    assert [output.finish_reason for output in run_out(engine)] == [None, None, "length"]


def test_ignore_eos_runs_to_max_tokens() -> None:
    engine = an_engine()
    engine.submit(a_request(output=2, max_tokens=6, ignore_eos=True), 0.0)
    assert len(run_out(engine)) == 6


def test_without_a_given_length_one_is_drawn_around_the_median() -> None:
    engine = an_engine(median_output_tokens=20.0)
    for number in range(200):
        engine.submit(EngineRequest(f"d{number}", prompt(16), 500), 0.0)
    lengths = sorted(Counter(output.request_id for output in run_out(engine)).values())
    assert 15 < lengths[100] < 26  # standard error of the median about 1.5
    assert lengths[0] < 10 < 40 < lengths[-1]


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_exactly_once_and_all_blocks_return(seed: int) -> None:
    """Random arrivals, lengths, shared prefixes and aborts on a memory small enough to preempt."""
    rng = random.Random(seed)
    engine = an_engine(kv_blocks=60, token_budget=64, max_running=8, jitter=0.03, record_events=True)
    wanted: dict[str, int] = {}
    aborted: set[str] = set()
    outputs: list[Output] = []
    now_s = 0.0
    for number in range(80):
        now_s += rng.expovariate(20.0)
        outputs += engine.advance(now_s)
        request = a_request(
            prompt(rng.randrange(1, 300), start=1000 * rng.randrange(1, 4)),
            output=rng.randrange(1, 120),
            max_tokens=200,
            request_id=str(number),
        )
        engine.submit(request, now_s)
        wanted[request.request_id] = request.output_tokens or 0
        if rng.random() < 0.15:
            victim = rng.choice(list(wanted))
            if engine.abort(victim, now_s):
                aborted.add(victim)
    outputs += run_out(engine)
    made = Counter(output.request_id for output in outputs)
    finished = Counter(output.request_id for output in outputs if output.finish_reason)
    assert set(finished) | aborted == set(wanted)
    assert not set(finished) & aborted
    assert all(times == 1 and made[name] == wanted[name] for name, times in finished.items())
    assert engine.counters.preemptions > 0
    assert (engine.cache.free_blocks, engine.running, engine.waiting) == (engine.cache.size, 0, 0)
    assert sum(engine.counters.finished.values()) == len(wanted)
    assert engine.counters.generation == len(outputs)
    assert [output.at_s for output in outputs] == sorted(output.at_s for output in outputs)


def test_waiting_requests_start_in_order_of_arrival() -> None:
    engine = an_engine(max_running=1)
    for name in "abcd":
        engine.submit(a_request(prompt(50, start=1000 * ord(name)), request_id=name), 0.0)
    assert list(first_tokens(run_out(engine))) == list("abcd")


def test_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    engine = an_engine(token_budget=256)
    engine.submit(a_request(16, output=40, request_id="short"), 0.0)
    engine.advance(0.5 * (engine.next_due_s() or 0.0))
    engine.submit(a_request(prompt(2000, start=9000), request_id="long"), 0.0)
    outputs = run_out(engine)
    first_s = first_tokens(outputs)["long"]
    during = [output for output in tokens_of(outputs, "short") if output.at_s <= first_s]
    assert len(during) == 9  # the first alone; then 2000 tokens at 255 a step beside a decode: 8 steps


def test_several_prefills_share_a_step_when_the_budget_allows() -> None:
    engine = an_engine(token_budget=2048)
    for name in "abc":
        engine.submit(a_request(prompt(500, start=1000 * ord(name)), request_id=name), 0.0)
    assert len(set(first_tokens(run_out(engine)).values())) == 1


def test_steps_follow_one_another_without_drift_however_late_the_driver_is() -> None:
    def times_of(late_s: float) -> list[float]:
        engine = an_engine(jitter=0.03)
        engine.submit(a_request(100, output=30), 0.0)
        outputs: list[Output] = []
        while (due_s := engine.next_due_s()) is not None:
            outputs += engine.advance(due_s + late_s)
        return [output.at_s for output in outputs]

    assert times_of(0.0) == times_of(0.37)


def test_a_repeated_prompt_computes_only_what_is_not_cached() -> None:
    engine = an_engine()
    engine.submit(a_request(prompt(100), request_id="a"), 0.0)
    run_out(engine)
    computed = engine.counters.computed
    engine.submit(a_request(prompt(100), request_id="b"), 10.0)
    outputs = run_out(engine)
    assert outputs[0].cached_tokens == 96
    assert engine.counters.computed - computed == 4


def test_a_prefix_hit_never_covers_the_whole_prompt() -> None:
    """64 tokens are four full blocks, of which three may be reused: one token has to be computed."""
    engine = an_engine()
    for name, at_s in (("a", 0.0), ("b", 5.0)):
        engine.submit(a_request(prompt(64), request_id=name), at_s)
        outputs = run_out(engine)
    assert outputs[0].cached_tokens == 48


def test_generated_tokens_are_found_by_a_prompt_that_continues_them() -> None:
    engine = an_engine()
    engine.submit(a_request(prompt(20), output=45, max_tokens=45), 0.0)
    answer = [output.token_id for output in run_out(engine)]
    engine.submit(a_request([*prompt(20), *answer, 5]), 9.0)
    assert run_out(engine)[0].cached_tokens == 64  # the last of 65 tokens has no KV yet


def test_a_salt_keeps_equal_prompts_apart() -> None:
    engine = an_engine()
    for at_s, salt in ((0.0, None), (5.0, "tenant"), (9.0, "tenant")):
        engine.submit(a_request(prompt(100), cache_salt=salt), at_s)
        cached = run_out(engine)[0].cached_tokens
        assert cached == (96 if at_s == 9.0 else 0)


def test_a_request_that_can_never_fit_is_refused_at_submission() -> None:
    engine = an_engine(kv_blocks=10)
    with pytest.raises(RequestRefused, match="maximum context length is 160 tokens"):
        engine.submit(a_request(150, max_tokens=11), 0.0)
    engine.submit(a_request(150, output=10, max_tokens=10), 0.0)
    assert run_out(engine)[-1].finish_reason == "length"


@pytest.mark.parametrize("tokens", [[], [151936], [-1]])
def test_prompts_that_are_no_prompts_are_refused(tokens: list[int]) -> None:
    with pytest.raises(RequestRefused):
        an_engine().submit(a_request(tokens), 0.0)


def test_decoding_into_a_full_memory_preempts_the_youngest() -> None:
    engine = an_engine(kv_blocks=8)
    engine.submit(a_request(prompt(60, start=1000), output=60, max_tokens=60, request_id="old"), 0.0)
    engine.submit(a_request(prompt(60, start=5000), output=60, max_tokens=60, request_id="young"), 0.0)
    outputs = run_out(engine)
    assert engine.counters.preemptions >= 1
    old, young = tokens_of(outputs, "old"), tokens_of(outputs, "young")
    assert (len(old), len(young)) == (60, 60)
    assert old[-1].at_s < young[-1].at_s
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(old)]
    assert max(gaps) < 2 * min(gaps)  # the old one never stopped


def test_a_preempted_request_is_ahead_of_those_that_waited() -> None:
    engine = an_engine(kv_blocks=8)
    for name, start in (("old", 1000), ("young", 5000), ("later", 9000)):
        engine.submit(a_request(prompt(60, start=start), output=60, max_tokens=60, request_id=name), 0.0)
    ends = [output.request_id for output in run_out(engine) if output.finish_reason]
    assert ends == ["old", "young", "later"]


def test_an_aborted_request_says_nothing_more_and_frees_its_place() -> None:
    engine = an_engine(max_running=1)
    engine.submit(a_request(prompt(50), output=1000, max_tokens=1000, request_id="a"), 0.0)
    engine.submit(a_request(prompt(50, start=5000), request_id="b"), 0.0)
    before = engine.advance(0.1)
    assert engine.abort("a", 0.1)
    assert not engine.abort("a", 0.1)
    after = run_out(engine)
    assert {output.request_id for output in before} == {"a"}
    assert {output.request_id for output in after} == {"b"}
    assert engine.counters.finished == {"stop": 1, "length": 0, "abort": 1}


def timeline(seed: int) -> list[tuple[str, float, int]]:
    engine = an_engine(seed=seed, jitter=0.05)
    for number in range(20):
        engine.submit(EngineRequest(f"r{number}", prompt(200 + number), 300), 0.0)
    return [(output.request_id, output.at_s, output.token_id) for output in run_out(engine)]


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    assert timeline(1) == timeline(1)
    assert timeline(1) != timeline(2)


def events_of(engine: Engine) -> list[Stored | Removed]:
    return [
        event for batch in engine.take_event_batches() for event in batch.events if isinstance(event, Stored | Removed)
    ]


def test_blocks_are_announced_chunk_by_chunk_and_as_output_fills_them() -> None:
    engine = an_engine(token_budget=40, record_events=True)
    engine.submit(a_request(prompt(70), output=30, max_tokens=30), 0.0)
    run_out(engine)
    stored = [event for event in events_of(engine) if isinstance(event, Stored)]
    assert [len(event.digests) for event in stored] == [2, 2, 1, 1]  # 40 tokens, 70, then output fills 80 and 96
    chain = [digest for event in stored for digest in event.digests]
    tokens = [token for event in stored for token in event.tokens]
    assert chain == BlockHasher(block_tokens=16, vocab=151936).chain(tokens)
    assert [event.parent for event in stored] == [None, chain[1], chain[3], chain[4]]


def test_a_cache_hit_is_not_announced_again() -> None:
    engine = an_engine(record_events=True)
    for at_s in (0.0, 5.0):
        engine.submit(a_request(prompt(64), output=1), at_s)
        run_out(engine)
    stored = [event for event in events_of(engine) if isinstance(event, Stored)]
    assert [len(event.digests) for event in stored] == [4, 1]  # the last block was computed twice, as two copies


def test_an_evicted_block_is_announced_before_what_replaces_it() -> None:
    engine = an_engine(kv_blocks=6, record_events=True)
    for at_s, start in ((0.0, 1000), (5.0, 5000)):
        engine.submit(a_request(prompt(64, start=start), output=1), at_s)
        run_out(engine)
    events = events_of(engine)
    kinds = ["S" if isinstance(event, Stored) else "R" for event in events]
    assert kinds == ["S", "R", "R", "S"]
    assert isinstance(events[0], Stored)
    assert [event.digest for event in events if isinstance(event, Removed)] == list(reversed(events[0].digests))[:2]


def test_first_tokens_are_counted_with_their_wait() -> None:
    engine = an_engine()
    engine.submit(a_request(1000), 2.0)
    first_s = first_tokens(run_out(engine)).popitem()[1]
    assert engine.counters.first_token_sum_s == pytest.approx(first_s - 2.0)
    assert sum(engine.counters.first_token_buckets) == 1
