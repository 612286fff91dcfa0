"""What a fleet file becomes: rooflines, links, room for fetches and start values, without a socket."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np
import pytest

from estimators.first_token import Discipline
from estimators.hardware import CARDS
from estimators.model_config import read_config
from estimators.model_prior import KNOWN_SPREAD, UNKNOWN_SPREAD
from estimators.paths import Path
from estimators.roofline import Roofline
from estimators.routes import Routes
from estimators.shapes import QWEN3_8B, ModelShape
from router.actions import Ended, Send
from router.assemble import (
    DEFAULT_BLOCK_TOKENS,
    Core,
    assemble,
    has_routes,
    prefetch_space,
    routes_of,
)
from router.blocks.config import DirectoryConfig
from router.config import RouterConfig
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec, fleet_of_urls
from router.fleet import check_fleet as checked
from router.holdings import DirectoryHoldings
from router.receipts import Receipt
from tests.builders import a_request
from tests.router.dispatch_bench import Takes
from tests.router.signals.events import MODEL, P, batch, chain_of, named, stored

CONFIGS = FilePath(__file__).parents[1] / "vectors" / "hf_configs"
GB = 1e9
MODEL_SECTION = """
model: {name: m, layers: 36, hidden: 4096, intermediate: 12288, heads: 32, kv_heads: 8, head_dim: 128, vocab: 151936}
"""
LINKS = """
links: {net: {gb_s: 25, start_ms: 10}, pcie: {gb_s: 20}, ssd: {gb_s: 5, start_ms: 1}, nic: {gb_s: 12.5, start_ms: 2}}
"""
STORE = "store: {network: net, host: pcie}\n"
TIERS = "tiers: {host: {capacity_gib: 4, link: pcie}, disk: {capacity_gib: 40, link: ssd}}\n"
PEERS = "peers: {link: nic}\n"
REPLICAS = """
replicas:
  - {name: a, card: A100, url: 'http://h:1'}
  - {name: b, card: A100, url: 'http://h:2'}
  - {name: c, card: H20, url: 'http://h:3'}
"""


def a_fleet_file(*sections: str) -> Fleet:
    fleet = msgspec.yaml.decode("".join((MODEL_SECTION, LINKS, *sections, REPLICAS)), type=Fleet)
    checked(fleet)
    return fleet


def assembled(fleet: Fleet, *, config: RouterConfig | None = None, **changes: Any) -> Core:
    return assemble(config or RouterConfig(), fleet, on_receipt=lambda receipt: None, **changes)


def crossed(routes: Routes, stages: Any, size_bytes: float) -> tuple[float, float]:
    """F over these links with nothing else on them, and its part before the first byte."""
    return routes.table.fetch_one(list(stages), size_bytes, 0.0)


# Links


def test_the_stores_network_is_one_link_of_all_and_the_host_link_is_each_replicas_own() -> None:
    routes = routes_of(a_fleet_file(STORE))
    networks = {route[0] for route in routes.store}
    hosts = {route[1] for route in routes.store}
    assert (len(routes.store), len(networks), len(hosts)) == (3, 1, 3)
    assert not networks & hosts
    assert routes.table.rows == 4


def test_a_fetch_of_one_replica_slows_that_of_another_on_the_network_alone() -> None:
    routes = routes_of(a_fleet_file(STORE))
    alone_s, _ = crossed(routes, routes.store[1], 25 * GB)
    assert alone_s == pytest.approx(0.010 + 1.0 + 25 / 20)
    routes.table.promise(routes.store[0], 25 * GB, now_s=0.0)
    beside_s, _ = crossed(routes, routes.store[1], 25 * GB)
    assert beside_s == pytest.approx(alone_s + 1.0)  # both share the network, and then nobody the host link
    same_s, _ = crossed(routes, routes.store[0], 25 * GB)
    assert same_s > beside_s


def test_reads_from_the_disk_pass_the_host_link_that_host_and_store_use_too() -> None:
    routes = routes_of(a_fleet_file(STORE, TIERS))
    for row in range(3):
        (host,) = routes.host[row]
        assert routes.disk[row][1] == host == routes.store[row][1]
        assert routes.disk[row][0] != host
    assert len({route[0] for route in routes.disk}) == 3
    assert crossed(routes, routes.disk[0], 5 * GB)[0] == pytest.approx(0.001 + 1.0 + 0.25)


def test_a_fleet_without_a_disk_has_hosts_only() -> None:
    routes = routes_of(a_fleet_file("tiers: {host: {capacity_gib: 4, link: pcie}}\n"))
    assert (len(routes.host), routes.disk, routes.store, routes.egress) == (3, [], [], [])


def test_one_link_leaves_each_replica_and_its_readers_share_it() -> None:
    routes = routes_of(a_fleet_file(STORE, PEERS))
    assert len(set(routes.egress)) == 3
    assert not set(routes.egress) & {link for route in routes.store for link in route}
    leaves_first = [routes.egress[0]]
    alone_s, _ = crossed(routes, leaves_first, 12.5 * GB)
    assert alone_s == pytest.approx(0.002 + 1.0)
    routes.table.promise([routes.egress[1]], 12.5 * GB, now_s=0.0)
    assert crossed(routes, leaves_first, 12.5 * GB)[0] == pytest.approx(alone_s)
    routes.table.promise(leaves_first, 12.5 * GB, now_s=0.0)
    assert crossed(routes, leaves_first, 12.5 * GB)[0] == pytest.approx(alone_s + 1.0)


def test_a_fleet_with_nothing_but_hbm_has_no_links() -> None:
    fleet = a_fleet_file()
    assert routes_of(fleet).table.rows == 0
    assert not has_routes(fleet)
    assert all(has_routes(a_fleet_file(section)) for section in (STORE, TIERS, PEERS))


@pytest.mark.parametrize("speed", [0.5, 4.0])
def test_speed_scales_rates_and_divides_fixed_times(speed: float) -> None:
    """At twice the speed everything takes half as long, so a fetch does as a whole."""
    usual = routes_of(a_fleet_file(STORE, TIERS, PEERS))
    fast = routes_of(a_fleet_file(f"speed: {speed}\n", STORE, TIERS, PEERS))
    for place in ("store", "host", "disk"):
        one, other = (crossed(routes, getattr(routes, place)[2], 3 * GB) for routes in (usual, fast))
        assert other == pytest.approx([part_s / speed for part_s in one])
    one, other = (crossed(routes, [routes.egress[1]], 3 * GB) for routes in (usual, fast))
    assert other == pytest.approx([part_s / speed for part_s in one])


# Room for fetches


def test_each_replica_has_its_own_room_for_fetches() -> None:
    space = prefetch_space(a_fleet_file(STORE, "fetch: {prefetch_gib: 2}\n"))
    assert space is not None
    space.hold(0, 1.5 * 2**30, until_s=1.0)
    assert space.fits(np.full(3, 2.0**30)).tolist() == [False, True, True]
    assert space.fits(np.full(3, 2.1 * 2**30)).tolist() == [False, False, False]


def test_room_without_a_limit_is_not_kept_count_of() -> None:
    assert prefetch_space(a_fleet_file(STORE)) is None


# What each replica starts from


def test_the_same_card_twice_as_fast_halves_every_time_of_a_replica() -> None:
    usual, fast = assembled(a_fleet_file()), assembled(a_fleet_file("speed: 2\n"))
    for column in ("linear_s_per_token", "attention_s_per_pair", "head_s", "weights_s", "context_s_per_token"):
        ones, others = (getattr(core.dispatcher.view, column) for core in (usual, fast))
        assert others == pytest.approx(ones / 2)
        assert ones[0] == ones[1] != ones[2]


def test_patience_is_a_fixed_time_and_shrinks_with_speed() -> None:
    core = assembled(a_fleet_file("speed: 4\nfetch: {discipline: time_limited, limit_ms: 200}\n", STORE))
    assert core.dispatcher.view.limit_s.tolist() == [0.05] * 3


def test_a_configured_discipline_is_that_of_every_replica_and_an_unknown_one_starts_overlapped() -> None:
    configured = assembled(a_fleet_file("fetch: {discipline: blocking}\n", STORE)).dispatcher.view
    unknown = assembled(a_fleet_file(STORE)).dispatcher.view
    assert configured.discipline is Discipline.BLOCKING
    assert unknown.discipline is Discipline.OVERLAPPED


@pytest.mark.parametrize(
    ("sections", "learned"),
    [
        ((STORE,), True),
        ((TIERS,), True),
        ((STORE, "fetch: {discipline: overlapped}\n"), False),
        ((), False),
    ],
)
def test_disciplines_are_learned_where_the_file_is_silent_and_there_is_something_to_fetch(
    sections: tuple[str, ...], learned: bool
) -> None:
    learning = assembled(a_fleet_file(*sections)).dispatcher.learning
    assert (learning._fetches is not None) == learned


def test_a_replica_of_an_unknown_card_is_believed_less_than_one_of_a_known_card() -> None:
    mixed = msgspec.structs.replace(a_fleet_file(), replicas=[*a_fleet_file().replicas[:1], *urls_only().replicas])
    for fleet, spreads in ((mixed, [KNOWN_SPREAD, UNKNOWN_SPREAD]), (urls_only(), [UNKNOWN_SPREAD])):
        prefill = assembled(fleet).dispatcher.learning._prefill
        assert [calibration._spread for calibration in prefill] == spreads


def urls_only() -> Fleet:
    return fleet_of_urls(["http://h:9"])


def test_a_fleet_of_urls_alone_decides_and_says_that_it_is_uncalibrated() -> None:
    receipts: list[Receipt] = []
    core = assemble(RouterConfig(), urls_only(), on_receipt=receipts.append)
    core.dispatcher.replica_up(0, frozenset(), 0.0)
    (sent,) = core.dispatcher.arrived(a_request(), 0.0)
    assert isinstance(sent, Send)
    core.dispatcher.cancelled(sent, 0.1)
    assert receipts[0].choice is not None
    assert receipts[0].choice.calibration == "uncalibrated"


@pytest.mark.parametrize(
    ("in_file", "reported", "used"), [(64, 32, 64), (None, 32, 32), (None, None, DEFAULT_BLOCK_TOKENS)]
)
def test_block_tokens_come_from_the_file_else_from_the_engines(
    in_file: int | None, reported: int | None, used: int
) -> None:
    fleet = a_fleet_file() if in_file is None else a_fleet_file(f"block_tokens: {in_file}\n")
    assert assembled(fleet, block_tokens=reported).directory.block_tokens == used


def test_a_policy_that_does_not_exist_stops_the_start() -> None:
    config = msgspec.structs.replace(RouterConfig(), policy=msgspec.structs.replace(RouterConfig().policy, name="best"))
    with pytest.raises(ConfigError, match="best"):
        assemble(config, a_fleet_file(), on_receipt=lambda receipt: None)


# All of it together


@pytest.mark.parametrize(
    ("limits", "kept"),
    [({}, [256, 256]), ({"source_blocks": 100}, [100, 100]), ({"blocks": 100}, [0, 100])],
    ids=["usual", "of one source", "of all"],
)
def test_the_configuration_bounds_what_is_believed(limits: dict[str, int], kept: list[int]) -> None:
    core = assembled(a_fleet_file(), config=RouterConfig(directory=DirectoryConfig(**limits)))
    for row in range(2):
        core.directory.add_source(row, MODEL)
        core.directory.apply(row, batch(stored(P, 1)), float(row))
    held = core.directory.match(chain_of(P)).hbm_blocks.tolist()
    assert held[:2] == kept


def test_what_the_directory_knows_is_promised_on_the_network_and_on_that_replicas_host_link() -> None:
    fleet = a_fleet_file(STORE, PEERS, "fetch: {by: directed, minimum_tokens: 64}\nblock_tokens: 16\n")
    core = assembled(fleet)
    for row in range(3):
        core.dispatcher.replica_up(row, frozenset({MODEL}), 0.0)
        core.directory.add_source(row, MODEL)
    core.directory.apply(1, batch(stored(P, 1)), 0.0)
    core.directory.apply_store(batch(named(list(range(1, 101)))), 0.0)
    core.dispatcher._placer._policy = Takes(2, Path.REMOTE)
    (sent,) = core.dispatcher.arrived(a_request(len(P) + 100, model=MODEL, chain=chain_of(P)), 0.0)
    assert isinstance(sent, Send)
    outstanding = core.dispatcher._placer._estimator.routes.table.outstanding_bytes(0.0)
    busy = np.flatnonzero(outstanding > 0).tolist()
    assert busy == sorted(routes_of(fleet).store[2])
    assert fleet.model is not None
    assert outstanding[busy] == pytest.approx(100 * 16 * fleet.model.kv_bytes_per_token)


# What is learned agrees with what is estimated, whatever the model


def decoded_alone(core: Core, shape: ModelShape, *, answers: int, output: int) -> None:
    """Requests one after the other on a replica that decodes exactly at the roofline."""
    roofline = Roofline.of(shape, CARDS["A100"])
    for number in range(answers):
        now_s = number * 100.0
        request = a_request(2000, request_id=f"r{number}", model="m")
        (sent,) = core.dispatcher.arrived(request, now_s)
        assert isinstance(sent, Send)
        core.dispatcher.first_token(sent, now_s + 0.1)
        took_s = (output - 1) * roofline.decode_step_s([2000.0 + output / 2])
        core.dispatcher.finished(sent, Ended(200, output_tokens=output, prompt_tokens=2000), now_s + 0.1 + took_s)


@pytest.mark.parametrize("config", ["qwen3_30b_a3b", "gpt_oss_20b", "gemma_3_27b", "qwen3_8b"])
def test_an_engine_at_the_roofline_is_learned_to_be_at_the_roofline(config: str) -> None:
    """Experts that a step leaves out and windows it does not read beyond are no speed of the engine."""
    shape = read_config((CONFIGS / f"{config}.json").read_bytes(), name="m")
    fleet = Fleet(model=shape, replicas=[ReplicaSpec(name="a", card="A100", url="http://h:1")])
    core = assembled(fleet)
    core.dispatcher.replica_up(0, frozenset({"m"}), 0.0)
    decoded_alone(core, shape, answers=60, output=400)
    assert core.dispatcher.view.pace_scale[0] == pytest.approx(1.0, rel=0.03)


def test_what_others_have_yet_to_produce_is_learned_from_answers_of_their_model() -> None:
    fleet = a_fleet_file()
    core = assembled(fleet)
    core.dispatcher.replica_up(0, frozenset({"m"}), 0.0)
    decoded_alone(core, fleet.model or QWEN3_8B, answers=300, output=20)
    around = core.dispatcher.learning.surroundings(a_request(2000, model="m"), 1, 40_000.0)
    assert around.output_tokens == pytest.approx(20, rel=0.15)
    assert around.others_output_tokens < 60  # from a prior of 256, whose long tail is forgotten last


def test_a_usage_that_cannot_be_teaches_no_length() -> None:
    core = assembled(a_fleet_file())
    core.dispatcher.replica_up(0, frozenset({"m"}), 0.0)
    for number, tokens in enumerate((20, 10**9, 20, 10**12)):
        (sent,) = core.dispatcher.arrived(a_request(2000, request_id=f"r{number}", model="m"), float(number))
        assert isinstance(sent, Send)
        core.dispatcher.first_token(sent, number + 0.1)
        core.dispatcher.finished(sent, Ended(200, output_tokens=tokens), number + 0.5)
    assert core.dispatcher.learning.surroundings(a_request(2000, model="m"), 1, 9.0).output_tokens < 300


def test_nobody_reads_from_a_peer_that_is_down() -> None:
    core = assembled(a_fleet_file("fetch: {by: directed, minimum_tokens: 1}\n", PEERS))
    for row in (0, 1, 2):
        core.dispatcher.replica_up(row, frozenset({MODEL}), 0.0)
        core.directory.add_source(row, MODEL)
    for row, blocks in ((0, 200), (1, 100)):
        core.directory.apply(row, batch(stored(P[: 16 * blocks], 1)), 0.0)
    request = a_request(16 * 256, model=MODEL, chain=chain_of(P), block_tokens=16)
    estimator, view = core.dispatcher._placer._estimator, core.dispatcher.view
    where = DirectoryHoldings(core.directory).held(request.chain, 1.0)
    view.ready[:] = True
    around = core.dispatcher.learning.surroundings(request, 3, 1.0)
    before = estimator.estimate(request, where, view, around, 1.0)
    core.dispatcher.replica_down(0)
    after = estimator.estimate(request, where, view, around, 1.0)
    assert before.peers is not None
    assert after.peers is not None
    assert (int(before.peers[2]), int(after.peers[2])) == (0, 1)


def test_unknown_cards_doubt_their_first_tokens_more() -> None:
    known, unknown = assembled(a_fleet_file()), assembled(fleet_of_urls(["http://h:1", "http://h:2", "http://h:3"]))
    scales = [float(core.dispatcher._placer._estimator.doubt.spread.scale(0.0)[0]) for core in (known, unknown)]  # type: ignore[union-attr]
    assert scales[0] < scales[1]
