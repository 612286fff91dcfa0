"""Tiers, peers, directives, prefetch space and hand-offs in engines, against cases worked out by hand. No jitter.

An A100 with 753 blocks holds one long prompt (500 blocks) and half of another. 147,456 bytes a token,
16 tokens a block.
"""

from __future__ import annotations

import random
from functools import cache
from math import inf
from typing import Any

import pytest

from sim_backends.cache_events import OffDevice, Removed, Stored
from sim_backends.directives import Directive, Path
from sim_backends.requests import Output
from sim_backends.service_times import ServiceTimes
from sim_backends.world import World
from tests.sim_backends.builders import a_fleet, a_request, a_world, first_tokens, prompt, run_out

BLOCK_BYTES = 16 * 147_456
LONG = 8000
SMALL = {"memory_share": 0.2114}
LINKS = {
    "store": {"gb_s": 25, "start_ms": 10},
    "pcie": {"gb_s": 25, "start_ms": 0},
    "ssd": {"gb_s": 5, "start_ms": 1},
    "nic": {"gb_s": 12.5, "start_ms": 2},
}
PEERS = {"link": "nic"}
DIRECTED = {"by": "directed", "minimum_tokens": 512}


def gib(blocks: int) -> float:
    """A capacity of so many blocks and a little."""
    return (blocks + 0.5) * BLOCK_BYTES / 2**30


@cache
def compute_s(cached: int, tokens: int = LONG) -> float:
    """Time to the first token of the long prompt on an idle replica with `cached` tokens in HBM."""
    world = a_world("A100", use_store=False)
    if cached:
        world.submit(0, a_request(prompt(cached), output=1), 0.0)
        run_out(world)
    world.submit(0, a_request(prompt(tokens), request_id="x"), 100.0)
    return first_tokens(run_out(world))["x"] - 100.0


def alone(world: World, row: int, tokens: list[int], at_s: float, **more: Any) -> tuple[float, int]:
    """Play one request to its end: its T_first and its cached tokens."""
    world.submit(row, a_request(tokens, output=1, request_id="x", **more), at_s)
    outputs = run_out(world)
    return outputs[0].at_s - at_s, outputs[0].cached_tokens


def tiered(**tiers: Any) -> World:
    """One replica whose HBM has given the tail of the long prompt up for another one: blocks 253 to 499."""
    world = a_world("A100", use_store=False, engine=SMALL, links=LINKS, tiers=tiers)
    for at_s, start in ((0.0, 1000), (10.0, 50_000)):
        alone(world, 0, prompt(LONG, start=start), at_s)
    return world


def test_without_tiers_what_hbm_gave_up_is_computed_again() -> None:
    world = a_world("A100", use_store=False, engine=SMALL)
    for at_s, start in ((0.0, 1000), (10.0, 50_000)):
        alone(world, 0, prompt(LONG, start=start), at_s)
    assert alone(world, 0, prompt(LONG), 100.0) == pytest.approx((compute_s(253 * 16), 253 * 16))


def test_what_hbm_gave_up_comes_back_from_the_host_over_pcie() -> None:
    """Blocks 253 to 498, the last one is never reused: 246 blocks at 25 GB/s."""
    world = tiered(host={"capacity_gib": 10, "link": "pcie"})
    expected_s = 246 * BLOCK_BYTES / 25e9 + compute_s(499 * 16)
    assert alone(world, 0, prompt(LONG), 100.0) == pytest.approx((expected_s, 499 * 16))


def test_what_the_host_gave_up_comes_back_from_the_disk_through_the_host_link() -> None:
    """The tail went down first: the host has the 100 blocks from 253 on, the disk the 146 behind them. The host's are
    over PCIe long before the disk's have left it."""
    world = tiered(host={"capacity_gib": gib(100), "link": "pcie"}, disk={"capacity_gib": 10, "link": "ssd"})
    from_disk_s = 0.001 + 146 * BLOCK_BYTES / 5e9
    assert from_disk_s > 100 * BLOCK_BYTES / 25e9
    expected_s = from_disk_s + 146 * BLOCK_BYTES / 25e9 + compute_s(499 * 16)
    assert alone(world, 0, prompt(LONG), 100.0) == pytest.approx((expected_s, 499 * 16))


def test_what_fell_off_the_disk_is_computed() -> None:
    """The disk keeps the last 50 blocks it got: 353 to 402."""
    world = tiered(host={"capacity_gib": gib(100), "link": "pcie"}, disk={"capacity_gib": gib(50), "link": "ssd"})
    assert alone(world, 0, prompt(LONG), 100.0)[1] == 403 * 16


def test_what_is_told_of_tiers_is_where_blocks_are_and_a_copy_is_told_before_what_it_takes_over_from_is_gone() -> None:
    tiers = {"host": {"capacity_gib": gib(100), "link": "pcie"}, "disk": {"capacity_gib": 10, "link": "ssd"}}
    world = a_world("A100", use_store=False, engine=SMALL, links=LINKS, tiers=tiers, record_events=True)
    held: dict[str, set[bytes]] = {"hbm": set(), "host": set(), "disk": set()}
    for at_s, start in ((0.0, 1000), (10.0, 50_000), (20.0, 1000)):
        alone(world, 0, prompt(LONG, start=start), at_s)
        for batch in world.engines[0].take_event_batches():
            for event in batch.events:
                if isinstance(event, Stored):
                    held["hbm"].update(event.digests)
                elif isinstance(event, Removed):
                    held["hbm"].discard(event.digest)
                    assert event.digest in held["host"]
                elif isinstance(event, OffDevice) and event.stored:
                    held[event.tier].add(event.digest)
                elif isinstance(event, OffDevice):
                    held[event.tier].discard(event.digest)
                    assert event.tier == "disk" or event.digest in held["disk"]
    fetcher = world.engines[0].fetcher
    assert fetcher is not None
    assert {name: set(tier._blocks) for name, tier in fetcher.tiers.tiers.items()} == {
        "host": held["host"],
        "disk": held["disk"],
    }
    assert len(held["hbm"]) + len(held["host"]) > 800


def test_resetting_the_prefix_cache_empties_the_tiers_too() -> None:
    world = tiered(host={"capacity_gib": 10, "link": "pcie"})
    assert world.engines[0].reset_prefix_cache()
    assert alone(world, 0, prompt(LONG), 100.0)[1] == 0


def test_tiers_are_read_even_when_nothing_directs_the_engine() -> None:
    world = a_world(
        "A100", engine=SMALL, links=LINKS, fetch=DIRECTED, tiers={"host": {"capacity_gib": 10, "link": "pcie"}}
    )
    for at_s, start in ((0.0, 1000), (10.0, 50_000)):
        alone(world, 0, prompt(LONG, start=start), at_s)
    assert alone(world, 0, prompt(LONG), 100.0)[1] == 499 * 16


def test_links_of_one_name_are_one_link_of_the_replica() -> None:
    """The store's network, and one PCIe link for each replica that host and store reads share."""
    tiers = {"host": {"capacity_gib": 10, "link": "pcie"}}
    assert len(a_world("A100", "A100", links=LINKS, tiers=tiers).links) == 1 + 2


def directed(*cards: str) -> World:
    """Replicas that read peers and the store only when told; the last one has computed the long prompt."""
    world = a_world(*(cards or ("A100", "A100", "A100")), links=LINKS, fetch=DIRECTED, peers=PEERS)
    alone(world, len(world.engines) - 1, prompt(LONG), 0.0)
    return world


def from_peer(name: str) -> Directive:
    return Directive(Path.PEER, source=name)


def test_a_peers_copy_comes_over_the_link_that_leaves_it() -> None:
    expected_s = 0.002 + 499 * BLOCK_BYTES / 12.5e9 + compute_s(499 * 16)
    got = alone(directed(), 0, prompt(LONG), 100.0, directive=from_peer("a100-2"))
    assert got == pytest.approx((expected_s, 499 * 16))


def test_two_readers_of_one_peer_share_the_link_that_leaves_it() -> None:
    world = directed()
    for row in (0, 1):
        request = a_request(prompt(LONG), output=1, request_id=f"x{row}", directive=from_peer("a100-2"))
        world.submit(row, request, 100.0)
    expected_s = 0.002 + 2 * 499 * BLOCK_BYTES / 12.5e9 + compute_s(499 * 16)
    assert [at_s - 100.0 for at_s in first_tokens(run_out(world)).values()] == pytest.approx([expected_s] * 2)


def test_a_directed_engine_does_just_what_it_is_told() -> None:
    from_store_s = 0.010 + 2 * 499 * BLOCK_BYTES / 25e9 + compute_s(499 * 16)
    assert alone(directed(), 0, prompt(LONG), 100.0) == pytest.approx((compute_s(0), 0))
    told = alone(directed(), 0, prompt(LONG), 100.0, directive=Directive(Path.LOCAL))
    assert told == pytest.approx((compute_s(0), 0))
    told = alone(directed(), 0, prompt(LONG), 100.0, directive=Directive(Path.REMOTE))
    assert told == pytest.approx((from_store_s, 499 * 16))


def test_an_engine_that_decides_by_itself_reads_the_store_whatever_it_is_told() -> None:
    world = a_world("A100", "A100", links=LINKS, peers=PEERS)
    alone(world, 1, prompt(LONG), 0.0)
    from_store_s = 0.010 + 2 * 499 * BLOCK_BYTES / 25e9 + compute_s(499 * 16)
    assert alone(world, 0, prompt(LONG), 100.0, directive=Directive(Path.LOCAL))[0] == pytest.approx(from_store_s)


@pytest.mark.parametrize(("discipline", "found"), [("overlapped", 499), ("layerwise", 499), ("best_effort", 3)])
def test_what_was_evicted_while_a_request_waited_is_fetched_at_its_turn(discipline: str, found: int) -> None:
    """All of its prompt is in HBM when it comes, behind another one that takes the tail's place at its own turn."""
    world = a_world("A100", engine=SMALL, fetch={"discipline": discipline})
    alone(world, 0, prompt(LONG), 0.0)
    world.submit(0, a_request(prompt(4000, start=20_000), output=1, request_id="running"), 10.0)
    world.submit(0, a_request(prompt(LONG, start=50_000), output=1, request_id="before"), 10.0005)
    world.submit(0, a_request(prompt(LONG), output=1, request_id="x"), 10.001)
    outputs = {output.request_id: output for output in run_out(world)}
    assert outputs["before"].cached_tokens == 0
    assert outputs["x"].cached_tokens == found * 16
    assert outputs["x"].at_s > outputs["before"].at_s


def test_what_others_computed_while_a_request_waited_is_fetched_at_its_turn() -> None:
    """Nobody has its prompt when it comes; the other replica has computed it by its turn."""
    world = a_world("A100", "A100")
    world.submit(1, a_request(prompt(LONG), output=1, request_id="there"), 0.0)
    for number in range(3):
        world.submit(0, a_request(prompt(LONG, start=20_000 * (1 + number)), output=1, request_id=f"{number}"), 0.0)
    world.submit(0, a_request(prompt(LONG), output=1, request_id="x"), 0.001)
    outputs = {output.request_id: output for output in run_out(world)}
    assert outputs["there"].at_s < outputs["2"].at_s
    assert outputs["x"].cached_tokens == 499 * 16


def test_a_request_that_gets_no_prefetch_space_computes() -> None:
    """Room for one long fetch: the second request computes while the first one's state comes."""
    fetch = {"by": "engine", "discipline": "overlapped", "minimum_tokens": 512, "prefetch_gib": gib(499)}
    world = a_world("A100", "A100", links=LINKS, fetch=fetch)
    for start in (1000, 50_000):
        alone(world, 1, prompt(LONG, start=start), float(start))
    world.submit(0, a_request(prompt(LONG), output=1, request_id="x"), 100_000.0)
    world.submit(0, a_request(prompt(LONG, start=50_000), output=1, request_id="y"), 100_000.0)
    cached = {output.request_id: output.cached_tokens for output in run_out(world)}
    assert cached == {"x": 499 * 16, "y": 0}


def roles(**more: Any) -> World:
    """A prefill replica `p` and a decode replica `d`."""
    fleet = [{"name": "p", "card": "A100", "role": "prefill"}, {"name": "d", "card": "A100", "role": "decode"}]
    return a_world("A100", use_store=False, links=LINKS, peers=PEERS, replicas=fleet, **more)


def prefilled(world: World) -> float:
    """The long prompt through the prefill replica; when its first token came."""
    world.submit(0, a_request(prompt(LONG), output=50, request_id="p1"), 0.0)
    outputs = run_to_idle_engines(world)
    assert [(output.index, output.finish_reason) for output in outputs] == [(0, "length")]
    return outputs[0].at_s


def run_to_idle_engines(world: World) -> list[Output]:
    """All outputs until no engine is at work; holds may still run out later."""
    outputs: list[Output] = []
    while min(engine.due_s for engine in world.engines) < inf:
        outputs += world.advance(world.next_due_s() or 0.0)
    return outputs


HAND_OFF = Directive(Path.HAND_OFF, source="p", request_id="p1")


def test_a_hand_off_moves_all_state_and_computes_one_token() -> None:
    """8,000 tokens over the link that leaves `p`, then a step of one token that sees 7,999."""
    world = roles()
    at_s = prefilled(world)
    assert len(world.engines[0].kept) == 1
    world.submit(1, a_request(prompt(LONG), output=50, max_tokens=50, request_id="d1", directive=HAND_OFF), at_s)
    outputs = run_out(world)
    fleet = a_fleet()
    times = ServiceTimes(fleet.model, fleet.cards["A100"], speed=1.0, jitter=0.0, rng=random.Random(0))
    step_s = times.step_s(tokens=1, pairs=7999.5, kv_tokens_read=0, emitting=1)
    assert outputs[0].at_s - at_s == pytest.approx(0.002 + LONG * 147_456 / 12.5e9 + step_s)
    assert (outputs[0].cached_tokens, len(outputs)) == (LONG - 1, 50)
    assert len(world.engines[0].kept) == 0
    assert [engine.cache.free_blocks for engine in world.engines] == [engine.cache.size for engine in world.engines]


def test_a_prompt_shorter_than_a_block_is_handed_off_too() -> None:
    world = roles()
    world.submit(0, a_request(prompt(10), request_id="p1"), 0.0)
    run_to_idle_engines(world)
    world.submit(1, a_request(prompt(10), request_id="d1", directive=HAND_OFF), 10.0)
    assert run_out(world)[0].cached_tokens == 9


def test_kept_state_that_nobody_takes_is_let_go_after_its_time() -> None:
    world = roles()
    at_s = prefilled(world)
    engine = world.engines[0]
    assert engine.cache.free_blocks == engine.cache.size - 500
    world.advance(at_s + 479.0)
    assert engine.cache.free_blocks == engine.cache.size - 500
    world.advance(at_s + 480.0)
    assert (engine.cache.free_blocks, engine.kept.expired) == (engine.cache.size, 1)


def test_a_hand_off_whose_source_has_died_is_computed() -> None:
    world = roles()
    at_s = prefilled(world)
    world.submit(1, a_request(prompt(LONG), output=1, request_id="d1", directive=HAND_OFF), at_s)
    world.advance(at_s + 0.01)
    world.crash(0, at_s + 0.01)
    outputs = run_out(world)
    assert outputs[0].at_s - at_s == pytest.approx(0.01 + compute_s(0))
    assert outputs[0].cached_tokens == 0


def test_a_hand_off_waits_for_room_and_is_then_made() -> None:
    """The decode replica's memory is taken by another request when the hand-off comes."""
    world = roles(engine=SMALL)
    at_s = prefilled(world)
    world.submit(1, a_request(prompt(6000, start=50_000), output=40, max_tokens=40, request_id="q"), at_s)
    world.advance(at_s + 0.01)
    world.submit(1, a_request(prompt(LONG), output=1, request_id="d1", directive=HAND_OFF), at_s + 0.01)
    ends = {output.request_id: output for output in run_out(world) if output.finish_reason}
    assert ends["d1"].cached_tokens == LONG - 1
    assert ends["d1"].at_s > ends["q"].at_s


def test_any_replica_keeps_a_requests_state_when_told_and_under_the_id_it_is_told() -> None:
    world = a_world("A100", "A100", use_store=False, links=LINKS, peers=PEERS)
    world.submit(0, a_request(prompt(LONG), output=1, directive=Directive(keep=True, request_id="mine")), 0.0)
    run_to_idle_engines(world)
    taken = Directive(Path.HAND_OFF, source="a100-0", request_id="mine")
    assert alone(world, 1, prompt(LONG), 10.0, directive=taken)[1] == LONG - 1


def test_a_decode_replica_computes_what_comes_without_a_hand_off() -> None:
    assert alone(roles(), 1, prompt(LONG), 0.0) == pytest.approx((compute_s(0), 0))
