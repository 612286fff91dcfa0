"""The command line as a person meets it: real processes, one clear sentence for each mistake."""

from __future__ import annotations

import io
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import router
from router.admission import AdmissionConfig
from router.cli.main import main
from router.cli.serve import queue_in_words
from router.keys import key_line, parse_keys
from router.telemetry import provider


def tfirst(*arguments: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed in the end, so that one that does not stop fails its test."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


URL = "http://127.0.0.1:9"


def test_version_is_printed() -> None:
    assert tfirst("--version").stdout.strip() == f"tfirst {router.__version__}"


def test_help_names_every_command_and_a_first_thing_to_do() -> None:
    text = tfirst("--help").stdout
    for command in ("serve", "sim", "demo", "policies"):
        assert re.search(rf"^\s+{command}\s", text, flags=re.MULTILINE), text
    assert "tfirst serve --worker-urls" in text


def test_a_new_key_is_shown_once_and_its_line_lets_it_in(tmp_path: Path) -> None:
    made = tfirst("key", "new", "alice")
    key, line = made.stderr.strip(), made.stdout
    assert (made.returncode, line.split()[0], key in line) == (0, "alice", False)
    assert parse_keys(line, "here").name_of(key.encode()) == "alice"
    (tmp_path / "keys").write_text(line)
    (tmp_path / "tfirst.yaml").write_text(f"worker_urls: ['{URL}']\nclient_keys: keys")
    done = tfirst("serve", "--config", str(tmp_path / "tfirst.yaml"), "--check")
    assert "with a key: 1 known" in done.stdout
    assert key not in done.stdout + done.stderr


def test_a_key_that_exists_is_read_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("k" * 40 + "\n"))
    assert main(["key", "line", "bob"]) == 0
    assert parse_keys(capsys.readouterr().out, "here").name_of(b"k" * 40) == "bob"


def test_a_key_or_a_name_that_cannot_be_used_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("short\n"))
    assert main(["key", "line", "bob"]) == 2
    assert main(["key", "new", "two words"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, "short" in shown.err) == ("", False)


def test_policies_lists_each_rule_with_what_it_reads_and_its_source() -> None:
    text = " ".join(tfirst("policies").stdout.split())
    for name in ("round_robin", "least_request", "prefix_hash", "ttft", "e2e"):
        assert name in text
    assert "Mirrokni" in text
    assert "own_pace=0.25" in text


def test_check_prints_what_would_be_done_and_ends_well() -> None:
    done = tfirst("serve", "--worker-urls", URL, "--policy", "ttft", "--check")
    assert done.returncode == 0, done.stderr
    for part in ("ttft", "0.0.0.0:30000", "0.0.0.0:29000", "127.0.0.1:9", "none: admission names no limit", "valid"):
        assert part in done.stdout


def test_check_shows_addresses_and_paths_with_brackets_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An IPv6 address that begins with a letter, and whatever else in brackets looks like markup."""
    monkeypatch.setenv("COLUMNS", "300")  # nothing is folded
    receipts = tmp_path / "[red]"
    assert main(["serve", "--worker-urls", "http://[fd00::1]:8000", "--receipts", str(receipts), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "http://[fd00::1]:8000" in shown
    assert "[red]" in shown


def test_check_shows_where_each_rank_of_a_url_is_listened_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        f"replicas:\n  - {{name: a, url: '{URL}', events: 'tcp://h:5557'}}\n  - {{name: b, url: '{URL}'}}\n"
    )
    assert main(["serve", "--fleet", str(fleet), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "tcp://h:5558" in shown
    assert "refused: no admin_key_env" in shown


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("admin_key_env: NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE, which holds no usable key"),
        ("other_tiers: {written_store: {}}", "the fleet file has no `store`"),
        ("other_tiers: {look_up: {service: controller, url: nowhere, model: m}}", "not a replica URL"),
        ("prompts: {source: local}", "name the model's directory in prompts.tokenizer"),
        ("tracing: {endpoint: 'http://collector:4318/v1/traces'}", "tracing.endpoint needs the extra otlp"),
    ],
)
def test_check_finds_a_section_that_would_stop_the_start(
    section: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(provider, "import_module", missing)
    config = tmp_path / "router.yaml"
    config.write_text(f"worker_urls: ['{URL}']\n{section}\n")
    assert main(["serve", "--config", str(config), "--check"]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == "", "no part of a plan that cannot be carried out"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--worker-urls", URL, "--policy", "fastest"], "there is no policy 'fastest'; there are: "),
        (["--worker-urls", "localhost"], "not a replica URL"),
        (["--worker-urls", URL, "--fleet", "f.yaml"], "give one"),
        ([], "say where the replicas are"),
        (["--fleet", "absent.yaml"], "absent.yaml: No such file"),
        (["--worker-urls", URL, "--seed", "-1"], "--seed must be 0 or more"),
        (["--worker-urls", URL, "--receipts", "/tmp"], "receipts cannot be written"),
        (["--worker-urls", URL, "--port", "70000"], "--port must be from 0 to 65535"),
        (["--worker-urls", URL, "--receipts", "/absent/dir/r.jsonl"], "receipts cannot be written"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_status_2(arguments: list[str], sentence: str) -> None:
    done = tfirst("serve", *arguments, "--check")
    assert done.returncode == 2
    assert sentence in one_sentence(done)


def test_a_wrong_configuration_key_is_one_sentence_with_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "tfirst.yaml"
    path.write_text("worker_urls: ['http://127.0.0.1:9']\npolcy: {name: e2e}\n")
    done = tfirst("serve", "--config", str(path))
    assert done.returncode == 2
    assert str(path) in one_sentence(done)
    assert "polcy" in done.stderr


@pytest.mark.parametrize("arguments", [["--fleet", "absent.yaml"], ["--traffic", "absent.gz"]])
def test_a_demo_without_its_files_is_one_sentence(arguments: list[str]) -> None:
    done = tfirst("demo", *arguments)
    assert done.returncode == 2
    assert "absent" in one_sentence(done)


def test_a_setting_of_the_wrong_kind_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "tfirst.yaml"
    path.write_text("worker_urls: ['http://127.0.0.1:9']\npolicy: {name: e2e, settings: {own_pace: fast}}\n")
    done = tfirst("serve", "--config", str(path))
    assert done.returncode == 2
    assert "own_pace must be a number" in one_sentence(done)


def test_broken_yaml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("replicas:\n  - {name: a\n  - b\n")
    done = tfirst("serve", "--fleet", str(path))
    assert done.returncode == 2
    assert str(path) in one_sentence(done)


def test_a_fleet_that_waits_to_be_directed_must_say_how(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("fetch: {by: directed}\nreplicas: [{name: a, url: 'http://127.0.0.1:9'}]\n")
    done = tfirst("serve", "--fleet", str(path), "--check")
    assert done.returncode == 2
    assert "`told`" in one_sentence(done)
    parts = "links: {nic: {gb_s: 10}}\npeers: {link: nic}\ntold: {peer: header}\n"
    path.write_text(parts + path.read_text())
    done = tfirst("serve", "--fleet", str(path), "--check")
    assert done.returncode == 0
    assert "told      a: peers by header, store looked up by itself" in done.stdout


def test_settings_a_policy_does_not_have_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tfirst.yaml"
    path.write_text("worker_urls: ['http://127.0.0.1:9']\npolicy: {name: e2e, settings: {own_pase: 1}}\n")
    done = tfirst("serve", "--config", str(path))
    assert done.returncode == 2
    assert "own_pase" in one_sentence(done)


def test_a_policy_is_named_with_settings_as_in_replay() -> None:
    command = ("serve", "--worker-urls", "http://127.0.0.1:9", "--check", "--policy")
    done = tfirst(*command, "e2e:own_pace=0.5,queue_behind=2")
    assert done.returncode == 0
    assert "policy    e2e:own_pace=0.5,queue_behind=2" in done.stdout
    refused = tfirst(*command, "e2e:own_pase=1")
    assert refused.returncode == 2
    assert "e2e has no setting 'own_pase'" in one_sentence(refused)


@pytest.mark.parametrize("which", ["--port", "--admin-port"])
def test_a_port_in_use_is_one_sentence_and_status_1(which: str) -> None:
    other = "--admin-port" if which == "--port" else "--port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        done = tfirst(
            "serve",
            *("--worker-urls", URL, "--host", "127.0.0.1", "--admin-host", "127.0.0.1", "--log-level", "error"),
            *(which, str(number), other, "0"),
        )
    assert done.returncode == 1
    sentence = one_sentence(done)
    assert str(number) in sentence
    assert "in use" in sentence


def test_sighup_reads_the_keys_again_and_the_router_goes_on(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(key_line("alice", "k" * 40))
    (tmp_path / "tfirst.yaml").write_text(
        f"{{worker_urls: ['{URL}'], host: 127.0.0.1, port: 0, admin_host: 127.0.0.1, admin_port: 0, client_keys: keys}}"
    )
    command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(tmp_path / "tfirst.yaml")]
    with running(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("admin"):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGHUP)
        while "1 client keys are in force" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


def test_sighup_takes_over_other_arms_and_keeps_the_old_ones_when_it_cannot(tmp_path: Path) -> None:
    file = tmp_path / "tfirst.yaml"
    ports = f"worker_urls: ['{URL}'], host: 127.0.0.1, port: 0, admin_host: 127.0.0.1, admin_port: 0"
    file.write_text(f"{{{ports}, experiment: {{arms: {{a: {{}}}}}}}}")
    command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(file)]
    with running(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("admin"):
            assert process.poll() is None, process.stderr.read()
        for arms, says in (
            ("{a: {}, b: {policy: {name: ttft}}}", "its arms are a, b"),
            ("{a: {policy: {name: nonsense}}}", "the experiment stays as it was: there is no policy 'nonsense'"),
        ):
            file.write_text(f"{{{ports}, experiment: {{arms: {arms}}}}}")
            process.send_signal(signal.SIGHUP)
            while says not in process.stderr.readline():
                assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_router_cleanly_even_with_no_replica_up(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "router.cli.main", "serve", "--worker-urls", URL, "--host", "127.0.0.1"]
    command += ["--admin-host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--log-level", "error"]
    with running(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("admin"):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (AdmissionConfig(), "none: admission names no limit"),
        (
            AdmissionConfig(max_in_flight=64, max_prefills=2, order="wspt"),
            "by wspt, at most 1000 requests, beside 64 in flight and 2 before their first token on each replica",
        ),
    ],
)
def test_check_says_what_waits_where(config: AdmissionConfig, words: str) -> None:
    assert queue_in_words(config) == words
