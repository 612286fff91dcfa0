from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.config import RouterConfig, fleet_of, load_config, parse_config
from router.errors import ConfigError
from router.fleet import check_url, fleet_of_urls, load_fleet

FLEET = """
replicas:
  - {name: a, card: A100, url: "http://127.0.0.1:8001"}
  - {name: b, card: H20, url: "http://127.0.0.1:8002"}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_empty_configuration_is_the_defaults() -> None:
    assert parse_config("") == RouterConfig()
    assert (RouterConfig().policy.name, RouterConfig().port, RouterConfig().admin_port) == ("e2e", 30000, 29000)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("prot: 30000", "prot"),
        ("load: {perod_s: 1}", "perod_s"),
        ("port: 70000", "port"),
        ("load: {period_s: 0}", "period_s"),
        ("policy: e2e", "policy"),
        ("max_attempts: 0", "max_attempts"),
        ("limits: {max_bodi_bytes: 1}", "max_bodi_bytes"),
        ("load: {from_answers: perhaps}", "from_answers"),
        ("other_tiers: {lookup: {}}", "lookup"),
        ("other_tiers: {look_up: {service: other, url: 'http://h:1', model: m}}", "service"),
        ("other_tiers: {look_up: {service: controller, model: m}}", "url"),
        ("other_tiers: {written_store: {keep_s: 0}}", "keep_s"),
        ("port: [", "configuration"),
        ("load: {api_key_env: K}", "api_key_env"),
        ("forward_credentials: perhaps", "forward_credentials"),
        ("model_aliases: {a: 1}", "model_aliases"),
        ("tls: {key: k.pem}", "certificate"),
        ("upstream_tls: {verfy: false}", "verfy"),
        ("stop_delay_s: .inf", "stop_delay_s is inf; it must be a finite number"),
        ("time_outs: {total_s: .inf}", "time_outs.total_s is inf"),
        ("admission: {shares: {a: .inf}}", "admission.shares.a is inf"),
        ("tracing: 7", "tracing"),
        ("tracing: {endpoint: 'collector:4318'}", "tracing.endpoint"),
        ("tracing: {endpoint: 'ftp://c/v1/traces'}", "tracing.endpoint"),
        ("tracing: {endpoint: 'http://user:pw@c/v1/traces'}", "tracing.endpoint"),
        ("tracing: {endpoint: 'http://c/v1/traces?key=1'}", "tracing.endpoint"),
        ("tracing: {endpoint: 'http://c:99999/v1/traces'}", "names no host and port"),
        ("tracing: {endpoint: 'http://c:x/v1/traces'}", "names no host and port"),
        ("tracing: {endpoint: 'http://[::1/v1/traces'}", "names no host and port"),
        ("tracing: {share: 1.5}", "tracing.share"),
        ("tracing: {timeout_s: .inf}", "tracing.timeout_s"),
        ("tracing: {service_name: ''}", "tracing.service_name"),
    ],
)
def test_an_unknown_key_or_a_bad_value_is_named(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_config(text)


def test_what_a_rule_or_a_template_is_given_is_theirs_to_judge() -> None:
    config = parse_config(
        "policy: {settings: {slo_ttft_ms: .inf}}\nprompts: {template_arguments: {a: [.inf, {b: .nan}]}}"
    )
    assert config.policy.settings == {"slo_ttft_ms": float("inf")}


def test_a_relative_fleet_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    write(tmp_path / "fleet.yaml", FLEET)
    config = load_config(write(tmp_path / "tfirst.yaml", "fleet: fleet.yaml"))
    assert [replica.name for replica in fleet_of(config).replicas] == ["a", "b"]


def test_relative_files_of_keys_and_certificates_are_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    text = "client_keys: keys.txt\ntls: {certificate: c.pem, key: /k.pem}\nupstream_tls: {ca: ca.pem}"
    config = load_config(write(tmp_path / "tfirst.yaml", text))
    assert config.client_keys == str(tmp_path / "keys.txt")
    assert config.tls is not None
    assert config.upstream_tls is not None
    assert (config.tls.certificate, config.tls.key) == (str(tmp_path / "c.pem"), "/k.pem")
    assert (config.upstream_tls.ca, config.upstream_tls.key) == (str(tmp_path / "ca.pem"), None)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("worker_urls: ['http://127.0.0.1:30000']", "this router itself"),
        ("worker_urls: ['http://127.0.0.1:29000']", "this router itself"),
        ("worker_urls: ['http://169.254.169.254']", "allow_link_local"),
        ("worker_urls: ['http://h:1']\nmodel_aliases: {a: b, b: c}", "is an alias too"),
        ("worker_urls: ['http://h:1']\nmodel_aliases: {a: a}", "is an alias too"),
        ("worker_urls: ['http://h:1']\nmodel_aliases: {a: ''}", "a name is empty"),
    ],
)
def test_what_would_send_requests_the_wrong_way_stops_the_start(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fleet_of(parse_config(setting))


def test_link_local_replicas_are_possible_on_purpose() -> None:
    config = parse_config("worker_urls: ['http://169.254.10.1:8000']\nallow_link_local: true")
    assert len(fleet_of(config).replicas) == 1


def test_the_defaults_suit_long_contexts_and_slow_prefills() -> None:
    """Frameworks' own defaults, 1 MiB bodies and 300 s in all, cut such requests off."""
    config = RouterConfig()
    assert config.limits.max_body_bytes == 64 * 1024 * 1024
    assert config.time_outs.first_byte_s >= 600
    assert config.limits.max_connections_per_client == 0


def test_ranks_of_one_server_have_one_key(tmp_path: Path) -> None:
    text = FLEET.replace('8002"', '8001", api_key_env: K')
    with pytest.raises(ConfigError, match="a server has one key"):
        load_fleet(write(tmp_path / "f.yaml", text))


def test_a_relative_tokenizer_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    one = "prompts: {source: local, tokenizer: models/m}"
    assert load_config(write(tmp_path / "one.yaml", one)).prompts.tokenizer == str(tmp_path / "models/m")
    each = "prompts: {source: local, tokenizer: {a: x, b: /y}}"
    assert load_config(write(tmp_path / "each.yaml", each)).prompts.tokenizer == {"a": str(tmp_path / "x"), "b": "/y"}


@pytest.mark.parametrize(
    ("prompts", "names"),
    [
        ("{source: local}", "prompts.tokenizer"),
        ("{source: render, url: 'render:8000'}", "not a replica URL"),
        ("{source: magic}", "source"),
        ("{timeout_s: 0}", "timeout_s"),
    ],
)
def test_a_prompts_section_that_cannot_work_is_named(prompts: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        fleet_of(parse_config(f"worker_urls: ['http://127.0.0.1:8001']\nprompts: {prompts}"))


def test_a_file_of_comments_is_the_defaults() -> None:
    assert parse_config("# nothing yet\n") == RouterConfig()


def test_a_configuration_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["", "fleet: f.yaml\nworker_urls: ['http://a:1']", "worker_urls: []"])
def test_exactly_one_source_of_replicas_must_be_named(text: str) -> None:
    with pytest.raises(ConfigError, match="either `fleet` or `worker_urls`"):
        fleet_of(parse_config(text))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("card: A100", "card: B900"), "B900"),
        (("name: b", "name: a"), "two replicas are called 'a'"),
        (("http://127.0.0.1:8001", "ftp://127.0.0.1"), "ftp"),
        (("card: H20", "crad: H20"), "crad"),
        (("replicas:", "speed: 0\nreplicas:"), "speed"),
        (("replicas:", "speed: .inf\nreplicas:"), "`speed` is inf; it must be from 1e-06 to 1e\\+12"),
        (("replicas:", "cards: {H20: {memory_gib: 1.0e+300}}\nreplicas:"), r"`cards\.H20\.memory_gib` is 1e\+300"),
        (("replicas:", "cards: {H20: {memory_share: 1.0e-300}}\nreplicas:"), r"`cards\.H20\.memory_share` is 1e-300"),
        (("replicas:", "links: {net: {gb_s: .inf}}\nreplicas:"), r"`links\.net\.gb_s` is inf"),
        (('"http://127.0.0.1:8001"', '"http://127.0.0.1:8001", events: "127.0.0.1:5557"'), "ZMQ address"),
        (("name: b", "name: store"), "cannot be called 'store'"),
        (("name: b", 'name: "b\\n c"'), "printable characters only"),
        (("replicas:", "store: {network: net, host: pcie}\nreplicas:"), "net"),
    ],
)
def test_a_fleet_file_that_makes_no_sense_names_file_and_key(
    tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    path = write(tmp_path / "fleet.yaml", FLEET.replace(*change))
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_fleet(path)
    assert str(path) in str(caught.value)


def test_a_replica_without_url_cannot_be_routed_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a' has no `url`"):
        load_fleet(write(tmp_path / "f.yaml", "replicas: [{name: a}]"))


def test_speed_makes_cards_faster_and_their_memory_no_larger(tmp_path: Path) -> None:
    slow = load_fleet(write(tmp_path / "slow.yaml", FLEET)).card("A100")
    fast = load_fleet(write(tmp_path / "fast.yaml", "speed: 8\n" + FLEET)).card("A100")
    assert fast.flops_per_s == pytest.approx(8 * slow.flops_per_s)
    assert fast.bytes_per_s == pytest.approx(8 * slow.bytes_per_s)
    assert fast.memory_gib == slow.memory_gib


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://", "http://h:99999", "http://h:8000/v1", "http://u@h:1", "x"]
)
def test_what_is_not_a_replica_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        check_url(url)


def test_worker_urls_make_a_fleet_of_unknown_cards() -> None:
    fleet = fleet_of_urls(["http://127.0.0.1:8001/", "http://127.0.0.1:8002"])
    assert [replica.url for replica in fleet.replicas] == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    assert {replica.card for replica in fleet.replicas} == {None}


def test_the_same_worker_url_twice_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="two replicas"):
        fleet_of_urls(["http://127.0.0.1:8001", "http://127.0.0.1:8001/"])


def test_the_configuration_reference_shows_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    shown = page.partition("```yaml\n")[2].partition("```")[0]
    defaults = RouterConfig(worker_urls=["http://10.0.0.5:8000", "http://10.0.0.6:8000"])
    assert parse_config(shown) == defaults

    def keys_of(value: Any) -> set[str]:
        """Names of settings, of sections too."""
        if not isinstance(value, dict):
            return set()
        return {*value, *(f"{key}.{inner}" for key, section in value.items() for inner in keys_of(section))}

    missing = keys_of(msgspec.to_builtins(defaults)) - keys_of(msgspec.yaml.decode(shown))
    assert missing <= {"fleet"}  # shown as a comment: one of two
