"""Router and simulator read the fleet file each with a reader of its own; they must read the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from estimators.first_token import Discipline
from estimators.roofline import rates_of
from router.errors import ConfigError
from router.fleet import Fleet, check_fleet, load_fleet
from sim_backends import fleet as simulated
from sim_backends.disciplines import DISCIPLINES

DEMO = Path(__file__).parents[2] / "loadtest" / "demo" / "fleet.yaml"


def test_both_readers_take_the_demo_fleet_alike() -> None:
    ours = msgspec.yaml.decode(DEMO.read_bytes(), type=Fleet)
    theirs = simulated.read(DEMO)
    assert ours.model is not None
    assert ours.store is not None
    assert theirs.store is not None
    assert ours.speed == theirs.speed
    assert ours.block_tokens == theirs.block_tokens
    assert ours.model.kv_bytes_per_token == theirs.model.kv_bytes_per_token
    assert ours.model.weights_bytes == theirs.model.weight_bytes
    assert ours.fetch.minimum_tokens == (theirs.fetch or simulated.Fetch()).minimum_tokens
    assert (ours.store.network, ours.store.host) == (theirs.store.network, theirs.store.host)
    for mine, other in zip(ours.replicas, theirs.replicas, strict=True):
        assert (mine.name, mine.card) == (other.name, other.card)
        assert mine.card is not None
        assert ours.cards[mine.card].peak_tflops == theirs.cards[other.card].peak_tflops


def test_a_decode_step_reads_the_same_bytes_in_both() -> None:
    """The weights of one step, from two independent counts of the same shape."""
    ours = msgspec.yaml.decode(DEMO.read_bytes(), type=Fleet)
    theirs = simulated.read(DEMO)
    assert ours.model is not None
    counted = theirs.model.value_bytes * (theirs.model.linear_parameters + theirs.model.head_parameters)
    assert ours.model.step_weights_bytes == counted
    card = ours.card("A100")
    assert rates_of(ours.model, card).weights_s == pytest.approx(counted / card.bytes_per_s)


EVERYTHING = """
model: {name: m, layers: 2, hidden: 64, intermediate: 128, heads: 4, kv_heads: 2, head_dim: 16, vocab: 1000}
models:
  small: {name: s, layers: 1, hidden: 32, intermediate: 64, heads: 2, kv_heads: 1, head_dim: 16, vocab: 1000}
cards: {A100: {peak_tflops: 312, memory_gb_s: 2039, memory_gib: 80, fp8_tflops: 624, usd_per_hour: 1.5}}
links: {store: {gb_s: 25, start_ms: 10}, pcie: {gb_s: 25}, ssd: {gb_s: 6}, nic: {gb_s: 12.5}}
store: {capacity_gib: 1, network: store, host: pcie}
tiers: {host: {capacity_gib: 4, link: pcie}, disk: {capacity_gib: 40, link: ssd}}
fetch: {by: directed, discipline: DISCIPLINE, minimum_tokens: 64, limit_ms: 20, prefetch_gib: 2}
peers: {link: nic}
replicas:
  - {name: a, card: A100, url: 'http://h:1', model: small, role: prefill, ranks: 2, start_s: 30}
  - {name: b, card: A100, url: 'http://h:2', told: {store: never, own: pin}}
told: {peer: body, store: prefetch, read_at: 'h:7777', instance: i}
lmcache: {controller: 'http://c:9000', coordinator: 'http://c:9300', model: m, world_size: 2, location: L, timeout_s: 2}
"""


@pytest.mark.parametrize("discipline", list(DISCIPLINES))
def test_both_readers_take_every_section_and_every_discipline(discipline: str) -> None:
    text = EVERYTHING.replace("DISCIPLINE", discipline)
    ours = msgspec.yaml.decode(text, type=Fleet)
    check_fleet(ours)
    theirs = simulated.parse(text, source="f.yaml")
    assert theirs.fetch is not None
    assert ours.fetch.discipline is not None
    assert (ours.fetch.by, ours.fetch.discipline.value) == (theirs.fetch.by, theirs.fetch.discipline)
    assert (ours.fetch.limit_ms, ours.fetch.prefetch_gib) == (theirs.fetch.limit_ms, theirs.fetch.prefetch_gib)
    for mine, other in zip(ours.replicas, theirs.replicas, strict=True):
        assert (mine.model, mine.role, mine.ranks, mine.start_s) == (
            other.model,
            other.role,
            other.ranks,
            other.start_s,
        )
    assert ours.models["small"].kv_bytes_per_token == theirs.model_of(theirs.replicas[0]).kv_bytes_per_token


def test_both_read_the_same_tiers_peers_and_links() -> None:
    text = EVERYTHING.replace("DISCIPLINE", "serial")
    ours, theirs = msgspec.yaml.decode(text, type=Fleet), simulated.parse(text, source="f.yaml")
    assert msgspec.to_builtins(ours.tiers) == msgspec.to_builtins(theirs.tiers)
    assert msgspec.to_builtins(ours.peers) == msgspec.to_builtins(theirs.peers)
    assert msgspec.to_builtins(ours.links) == msgspec.to_builtins(theirs.links)


def test_both_read_alike_how_replicas_are_told() -> None:
    text = EVERYTHING.replace("DISCIPLINE", "serial")
    ours, theirs = msgspec.yaml.decode(text, type=Fleet), simulated.parse(text, source="f.yaml")
    assert ours.told is not None
    assert ours.lmcache is not None
    assert theirs.told is not None
    assert theirs.lmcache is not None
    assert msgspec.structs.asdict(ours.told) == msgspec.structs.asdict(theirs.told)
    assert msgspec.structs.asdict(ours.lmcache) == msgspec.structs.asdict(theirs.lmcache)
    for mine, other in zip(ours.replicas, theirs.replicas, strict=True):
        told = theirs.told_of(other)
        assert told is not None
        assert msgspec.structs.asdict(ours.told_of(mine)) == msgspec.structs.asdict(told)


@pytest.mark.parametrize(
    ("good", "bad", "named"),
    [
        ("network: store", "network: nowhere", r"store\.network"),
        ("host: pcie}", "host: nowhere}", r"store\.host"),
        ("link: pcie}", "link: nowhere}", r"tiers\.host\.link"),
        ("link: ssd}", "link: nowhere}", r"tiers\.disk\.link"),
        ("link: nic}", "link: nowhere}", r"peers\.link"),
    ],
)
def test_both_refuse_a_link_that_is_not_there_and_name_its_key(good: str, bad: str, named: str) -> None:
    text = EVERYTHING.replace("DISCIPLINE", "serial").replace(good, bad)
    with pytest.raises(ConfigError, match=named):
        check_fleet(msgspec.yaml.decode(text, type=Fleet))
    with pytest.raises(simulated.BadFleet, match=named):
        simulated.parse(text, source="f.yaml")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("disk: {capacity_gib: 40, link: ssd}", "disk: {link: ssd}"),
        ("peers: {link: nic}", "peers: {}"),
        ("peers: {link: nic}", "peers: {link: nic, rate: 3}"),
        ("host: {capacity_gib: 4, link: pcie}", "host: {capacity_gib: 0, link: pcie}"),
        ("by: directed", "by: chance"),
        ("prefetch_gib: 2", "prefetch_gib: 0"),
        ("discipline: DISCIPLINE", "discipline: sometimes"),
        ("peer: body", "peer: shout"),
        ("store: prefetch", "store: sometimes"),
        ("own: pin", "own: glue"),
        ("read_at: 'h:7777'", "reed_at: 'h:7777'"),
        ("timeout_s: 2", "timeout_s: 0"),
    ],
)
def test_both_refuse_a_section_that_is_not_whole_or_out_of_range(good: str, bad: str) -> None:
    assert good in EVERYTHING
    text = EVERYTHING.replace(good, bad).replace("DISCIPLINE", "serial")
    with pytest.raises(msgspec.ValidationError):
        msgspec.yaml.decode(text, type=Fleet)
    with pytest.raises(simulated.BadFleet):
        simulated.parse(text, source="f.yaml")


def test_both_know_the_same_disciplines() -> None:
    assert {discipline.value for discipline in Discipline} == set(DISCIPLINES)


def test_a_written_fleet_with_every_section_is_read_by_the_router(tmp_path: Path) -> None:
    simulated.write(simulated.parse(EVERYTHING.replace("DISCIPLINE", "two_ends"), source="f"), tmp_path / "f.yaml")
    fleet = load_fleet(tmp_path / "f.yaml")
    assert (fleet.replicas[0].ranks, fleet.fetch.discipline) == (2, Discipline.TWO_ENDS)


def test_a_minimal_file_has_the_same_defaults_for_both(tmp_path: Path) -> None:
    text = """
model: {name: m, layers: 2, hidden: 64, intermediate: 128, heads: 4, kv_heads: 2, head_dim: 16, vocab: 1000}
cards: {X: {peak_tflops: 100, memory_gb_s: 1000, memory_gib: 40, compute_share: 0.4, memory_share: 0.7}}
fetch: {}
replicas: [{name: a, card: X}]
"""
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    ours, theirs = msgspec.yaml.decode(text, type=Fleet), simulated.read(path)
    assert ours.speed == theirs.speed
    assert theirs.fetch is not None
    assert ours.fetch.minimum_tokens == theirs.fetch.minimum_tokens
    assert ours.fetch.discipline is None, "the router learns it where the file is silent"
    assert ours.step_tokens == (theirs.engine or simulated.Engine()).token_budget
    assert ours.model is not None
    assert ours.model.value_bytes == theirs.model.value_bytes
