from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sim_backends import fleet as fleet_file
from sim_backends.fleet import BadFleet
from tests.sim_backends.builders import a_fleet

DEMO = """
model: {name: m, layers: 2, hidden: 64, intermediate: 128, heads: 4, kv_heads: 2, head_dim: 16, vocab: 1000}
cards: {A100: {peak_tflops: 312, memory_gb_s: 2039, memory_gib: 80}}
links: {store: {gb_s: 25, start_ms: 10}, pcie: {gb_s: 25}}
store: {capacity_gib: 1, network: store, host: pcie, events: null}
replicas: [{name: a, card: A100}]
"""


def test_a_minimal_file_gets_the_documented_defaults() -> None:
    fleet = fleet_file.parse(DEMO, source="f.yaml")
    assert (fleet.speed, fleet.block_tokens, fleet.fetch, fleet.engine) == (1.0, 16, None, None)


def test_the_qwen3_8b_shape_gives_its_published_sizes() -> None:
    """Published: 6.95 B parameters without embeddings, 8.2 B with; 144 KiB of KV a token."""
    model = a_fleet().model
    assert model.linear_parameters == pytest.approx(6.95e9, rel=0.002)
    assert model.weight_bytes / 2 == pytest.approx(8.19e9, rel=0.002)
    assert model.kv_bytes_per_token == 144 * 1024


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("card: A100}]", "card: B200}]", "replicas[0].card names 'B200'"),
        ("network: store", "network: wan", "store.network names 'wan'"),
        ("layers: 2", "layers: 0", "$.model.layers"),
        ("links:", "linkz:", "unknown field `linkz`"),
        ("replicas:", "fetch: {discipline: psychic}\nreplicas:", "fetch.discipline is 'psychic'"),
        ("replicas:", "fetch: {by: router}\nreplicas:", "fetch.by is 'router'"),
        ("card: A100}]", "card: A100}, {name: a, card: A100}]", "replicas[1].name 'a' is used twice"),
        ("card: A100}]", "card: A100, url: 'localhost:1'}]", "replicas[0].url is 'localhost:1'"),
        ("memory_gib: 80", "memory_gib: 0.0001", "cards.A100.memory_gib leaves no room"),
        (
            "{A100: {peak_tflops: 312, memory_gb_s: 2039, memory_gib: 80}}",
            "{A100: {memory_gb_s: 2039}}",
            "cards.A100 has no peak_tflops, memory_gib; simulated engines know no card by its name, so add what",
        ),
        ("replicas:", "replicas: [", "is not YAML"),
        ("replicas:", "tiers: {host: {capacity_gib: 1, link: ram}}\nreplicas:", "tiers.host.link names 'ram'"),
        ("replicas:", "tiers: {disk: {capacity_gib: 1, link: pcie}}\nreplicas:", "missing required field `host`"),
        ("replicas:", "peers: {link: nic}\nreplicas:", "peers.link names 'nic'"),
        ("card: A100}]", "card: A100, model: big}]", "replicas[0].model names 'big', which is not under models"),
        ("card: A100}]", "card: A100, role: lead}]", "replicas[0].role is 'lead'; roles are both, prefill, decode"),
        ("card: A100}]", "card: A100, role: decode}]", "there is no peers.link for hand-offs"),
        (
            "card: A100}]",
            "card: A100, ranks: 4, events: 'tcp://h:5557', replay: 'tcp://h:5560'}]",
            "replicas[0].events and replicas[0].replay are closer than its 4 ranks",
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_file_and_the_key(old: str, new: str, told: str) -> None:
    assert old in DEMO
    with pytest.raises(BadFleet) as caught:
        fleet_file.parse(DEMO.replace(old, new), source="f.yaml")
    assert str(caught.value).startswith("f.yaml: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_bad_fleet(tmp_path: Path) -> None:
    with pytest.raises(BadFleet, match="No such file"):
        fleet_file.read(tmp_path / "none.yaml")


def test_cards_are_given_out_in_equal_runs() -> None:
    fleet = fleet_file.built(replicas=5, cards=["A100", "H20"], speed=2.0)
    assert [replica.card for replica in fleet.replicas] == ["A100", "A100", "A100", "H20", "H20"]
    assert fleet.speed == 2.0


def test_a_written_fleet_reads_back_the_same(tmp_path: Path) -> None:
    fleet = a_fleet("A100", "H20")
    rows = [msgspec.structs.replace(row, url=f"http://127.0.0.1:{n + 1}") for n, row in enumerate(fleet.replicas)]
    fleet = msgspec.structs.replace(fleet, replicas=rows, speed=8.0)
    fleet_file.write(fleet, tmp_path / "f.yaml")
    assert fleet_file.read(tmp_path / "f.yaml") == fleet
    assert [path.name for path in tmp_path.iterdir()] == ["f.yaml"]


def test_a_written_fleet_has_no_section_the_source_had_not(tmp_path: Path) -> None:
    fleet_file.write(fleet_file.built(replicas=1, cards=["A100"], speed=1.0), tmp_path / "f.yaml")
    assert "\nengine:" not in (tmp_path / "f.yaml").read_text()


def test_the_demos_fleet_file_can_be_played() -> None:
    fleet = fleet_file.read(Path(__file__).parents[2] / "loadtest" / "demo" / "fleet.yaml")
    assert {replica.card for replica in fleet.replicas} == {"A100", "H20"}
    assert fleet.kv_blocks("A100") * fleet.block_tokens == pytest.approx(413_000, rel=0.01)
