from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest.replay.bounds import Floats, ideal_cached_tokens, pooled_work_s, prompt_tokens_of
from loadtest.replay.bounds import shortest_remaining_first_s as pooled_s
from loadtest.replay.fleets import Fleets, of_cards, of_file, of_text, with_blocks, with_store
from loadtest.replay.formats import Trace
from loadtest.replay.workload import Demand, arrivals
from loadtest.traffic import TrafficRow
from router.errors import ConfigError
from sim_backends.world import build

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
FLEET = of_file(DEMO / "fleet.yaml")


def a_trace(*, talks: int = 8, turns: int = 3, step_s: float = 10.0, block_tokens: int = 512) -> Trace:
    """Conversations whose turns share a prefix; all talks of one turn arrive in pairs at one coarse timestamp."""
    rows = [
        TrafficRow(
            at_s=step_s * (turn * talks // 2 + talk // 2),
            input_length=block_tokens * (2 + turn) - 5,
            output_length=4,
            hash_ids=[0, *range(100 * (talk + 1), 100 * (talk + 1) + 1 + turn)],
        )
        for turn in range(turns)
        for talk in range(talks)
    ]
    return Trace(rows, "mooncake", block_tokens, has_prefixes=True)


def a_trace_without_prefixes() -> Trace:
    rows = [TrafficRow(at_s=1.5 * i, input_length=600 + i, output_length=4, hash_ids=[]) for i in range(10)]
    return Trace(rows, "azure", 512, has_prefixes=False)


def work_of_the_pool_s(rows: list[TrafficRow], block_tokens: int) -> Floats:
    """What each request asks of the engines, pooled into one server with a perfect cache."""
    engines = with_blocks(FLEET, router_tokens=1, engine_tokens=block_tokens).engines
    cached = ideal_cached_tokens(rows, block_tokens=block_tokens, tokens_per_id=block_tokens)
    return pooled_work_s(engines, prompt_tokens=prompt_tokens_of(rows), cached_tokens=cached)


@pytest.mark.parametrize("load", [0.3, 0.9])
@pytest.mark.parametrize("block_tokens", [16, 512])
def test_a_perfect_cache_would_leave_the_stated_load(load: float, block_tokens: int) -> None:
    rows = arrivals(a_trace(block_tokens=block_tokens), FLEET, Demand(load=load))
    assert work_of_the_pool_s(rows, block_tokens).sum() / rows[-1].at_s == pytest.approx(load)


@pytest.mark.parametrize("load", [0.8, 1.25])
def test_the_pooled_server_keeps_up_below_load_1_and_falls_behind_above(load: float) -> None:
    """A long trace without a rhythm: what is left over at its end, in parts of all the work."""
    rows = [
        TrafficRow(at_s=3.0 * number + number % 7 / 7, input_length=6000, output_length=1, hash_ids=[])
        for number in range(400)
    ]
    rows = arrivals(Trace(rows, "azure", 512, has_prefixes=False), FLEET, Demand(load=load))
    work_s = work_of_the_pool_s(rows, 512)
    arrived_s = np.array([row.at_s for row in rows])
    late_s = float((arrived_s + pooled_s(arrived_s, work_s)).max()) - rows[-1].at_s
    assert late_s / work_s.sum() == pytest.approx(max(0.0, 1.0 - 1.0 / load), abs=0.01)


def test_a_slow_replica_gives_the_fleet_that_much_less_load() -> None:
    """Two cards, one of them at half speed, take three quarters of the requests that two healthy ones take."""
    text = (DEMO / "fleet.yaml").read_text().split("replicas:")[0]
    spans_s = [
        arrivals(
            a_trace(),
            of_text(f"{text}replicas: [{{name: a, card: A100}}, {{name: b, card: A100, slow: {slow}}}]", "test"),
            Demand(load=0.5),
        )[-1].at_s
        for slow in (1, 2)
    ]
    assert spans_s[1] / spans_s[0] == pytest.approx(2 / 1.5)


def test_twice_the_speed_halves_every_time() -> None:
    slow, fast = (arrivals(a_trace(), FLEET, Demand(speedup=speedup)) for speedup in (1.0, 2.0))
    assert [row.at_s for row in fast] == pytest.approx([row.at_s / 2 for row in slow])


def test_coarse_timestamps_are_spread_and_fine_ones_are_kept() -> None:
    coarse = arrivals(a_trace(), FLEET, Demand())
    assert len({row.at_s for row in coarse}) > 20
    assert [row.at_s for row in coarse] == sorted(row.at_s for row in coarse)
    fine = arrivals(a_trace_without_prefixes(), FLEET, Demand())
    assert [row.at_s for row in fine] == [1.5 * i for i in range(10)]


def test_a_small_part_of_a_coarse_trace_is_spread_as_the_whole_is() -> None:
    rows = [
        TrafficRow(at_s=3.0 * stamp, input_length=600, output_length=4, hash_ids=[0, 1 + 10 * stamp + i])
        for stamp in range(200)
        for i in range(10)
    ]
    part = arrivals(Trace(rows, "mooncake", 512, has_prefixes=True), FLEET, Demand(requests=40))
    on_the_grid = sum((row.at_s / 3.0).is_integer() for row in part)
    assert on_the_grid <= 2


def test_the_first_request_arrives_at_zero() -> None:
    assert arrivals(a_trace(), FLEET, Demand(requests=6, load=0.5))[0].at_s == 0.0


def test_a_part_is_made_of_whole_conversations_and_depends_on_the_seed() -> None:
    trace = a_trace()
    some, same, other = (arrivals(trace, FLEET, Demand(requests=9, seed=seed)) for seed in (1, 1, 2))
    assert some == same
    assert [row.hash_ids for row in some] != [row.hash_ids for row in other]
    talks = [row.hash_ids[1] for row in some]
    assert all(talks.count(talk) == 3 for talk in talks)


def test_a_trace_without_prefixes_shares_nothing() -> None:
    rows = arrivals(a_trace_without_prefixes(), FLEET, Demand())
    ids = [block for row in rows for block in row.hash_ids]
    assert len(ids) == len(set(ids))
    assert [len(row.hash_ids) for row in rows] == [2] * 10


def test_the_control_shares_no_block_and_keeps_everything_else() -> None:
    trace = a_trace()
    shared, control = (arrivals(trace, FLEET, Demand(shared_prefixes=shares)) for shares in (True, False))
    ids = [hash_id for row in control for hash_id in row.hash_ids]
    assert len(ids) == len(set(ids)) == sum(len(row.hash_ids) for row in shared)
    assert [(r.at_s, r.input_length, r.output_length) for r in control] == [
        (r.at_s, r.input_length, r.output_length) for r in shared
    ]


def test_missing_ids_at_the_end_of_a_prompt_are_blocks_nobody_shares() -> None:
    trace = Trace([TrafficRow(0.0, 1500, 1, [7]), TrafficRow(1.0, 1500, 1, [7])], "mooncake", 512, has_prefixes=True)
    first, second = arrivals(trace, FLEET, Demand())
    assert first.hash_ids[0] == second.hash_ids[0] == 7
    assert not set(first.hash_ids[1:]) & set(second.hash_ids[1:])
    assert len(first.hash_ids) == len(second.hash_ids) == 3


def test_a_load_cannot_be_set_when_everything_arrives_at_once() -> None:
    trace = Trace([TrafficRow(0.0, 100, 1, [1])] * 3, "mooncake", 512, has_prefixes=True)
    with pytest.raises(ConfigError, match="at once"):
        arrivals(trace, FLEET, Demand(load=0.5))


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"load": 0.0}, {"speedup": -1.0}, {"load": float("nan")}])
def test_a_demand_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Demand(**wrong)  # type: ignore[arg-type]


def test_both_readings_of_a_made_fleet_name_the_same_replicas() -> None:
    fleets = of_cards(6, ["A100", "H20"])
    assert [replica.name for replica in fleets.router.replicas] == fleets.replicas
    assert fleets.cards == ["A100"] * 3 + ["H20"] * 3
    assert fleets.router.store is not None
    assert fleets.router.speed == fleets.engines.speed == 1.0


@pytest.mark.parametrize(("replicas", "cards", "words"), [(4, ["B999"], "B999"), (1, ["A100", "H20"], "fewer")])
def test_a_fleet_that_cannot_be_made_is_refused(replicas: int, cards: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of_cards(replicas, cards)


def test_a_broken_fleet_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    with pytest.raises(ConfigError, match=r"fleet\.yaml: No such file"):
        of_file(path)
    path.write_text("replicas: []\nmodel: 3\n")
    with pytest.raises(ConfigError, match=r"fleet\.yaml"):
        of_file(path)


@pytest.mark.parametrize(
    ("more", "words"),
    [("model: small", "a model of its own"), ("role: prefill", "role prefill")],
)
def test_a_fleet_the_router_has_no_choice_for_is_refused(tmp_path: Path, more: str, words: str) -> None:
    text = (
        (DEMO / "fleet.yaml").read_text().replace("{name: a100-0, card: A100}", f"{{name: a100-0, card: A100, {more}}}")
    )
    path = tmp_path / "fleet.yaml"
    small = "{name: s, layers: 4, hidden: 1024, intermediate: 4096, heads: 8, kv_heads: 2, head_dim: 128, vocab: 32000}"
    path.write_text(f"{text}\npeers: {{link: store}}\nmodels: {{small: {small}}}\n")
    with pytest.raises(ConfigError, match=f"replica 'a100-0' has {words}, which cannot be replayed"):
        of_file(path)


def test_every_rank_of_a_server_is_a_replica_behind_its_url() -> None:
    text = (DEMO / "fleet.yaml").read_text().split("replicas:")[0]
    fleets = of_text(f"{text}replicas: [{{name: a, card: A100, ranks: 3}}, {{name: b, card: H20, slow: 2}}]", "test")
    assert fleets.replicas == ["a/0", "a/1", "a/2", "b"] == [replica.name for replica in fleets.router.replicas]
    assert fleets.cards == ["A100", "A100", "A100", "H20"]
    assert [replica.slow for replica in fleets.engines.replicas] == [1, 1, 1, 2]
    assert len({replica.url for replica in fleets.router.replicas}) == 2
    assert [engine.settings.name for engine in build(fleets.engines).engines] == fleets.replicas


def test_a_name_that_a_rank_of_another_server_would_get_is_refused() -> None:
    text = (DEMO / "fleet.yaml").read_text().split("replicas:")[0]
    with pytest.raises(ConfigError, match="a/1"):
        of_text(f"{text}replicas: [{{name: a, card: A100, ranks: 2}}, {{name: a/1, card: A100}}]", "test")


def test_a_store_of_another_size_changes_nothing_else() -> None:
    fleets = of_cards(4, ["A100"])
    larger = with_store(fleets, 16_384.0)
    assert larger.engines.store is not None
    assert larger.engines.store.capacity_gib == 16_384.0
    assert larger.router == fleets.router
    assert with_store(larger, 2048.0) == fleets


def test_a_fleet_without_a_store_has_none_to_size() -> None:
    fleets = of_cards(1, ["A100"])
    bare = Fleets(fleets.router, msgspec.structs.replace(fleets.engines, store=None))
    with pytest.raises(ConfigError, match="no shared store"):
        with_store(bare, 1.0)
