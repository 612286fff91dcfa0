"""The command as a person meets it: its exit status, and one sentence for each mistake."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.cli.doctor import COMMAND, servers_of
from router.cli.main import main
from router.doctor.examine import Server
from router.doctor.tokenizing import local_tokenizer
from router.errors import ConfigError
from router.signals.subscriber import Source

DOWN = "http://127.0.0.1:9"


def test_a_server_that_is_down_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", DOWN]) == 1
    assert "problem" in capsys.readouterr().out


def test_the_router_logs_as_before_once_the_doctor_is_done() -> None:
    before = logging.getLogger("router").level
    main(["doctor", DOWN, "--json"])
    assert logging.getLogger("router").level == before
    assert logging.getLogger("router.sources").isEnabledFor(logging.WARNING)


def test_json_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", DOWN, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["servers"][0]["url"] == DOWN


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name the servers"),
        ([DOWN, "--fleet", "f.yaml"], "name the servers"),
        (["localhost"], "is not a replica URL"),
        ([DOWN, "--replay", "tcp://h:1"], "--replay goes with --events"),
        ([DOWN, "http://127.0.0.1:10", "--events", "tcp://h:1"], "give one URL"),
        ([DOWN, "--events", "h:1"], "is not a ZMQ address"),
        (["--fleet", "absent.yaml"], "absent.yaml: No such file"),
        (["--fleet", "f.yaml", "--events", "tcp://h:1"], "do not go with --fleet"),
        ([DOWN, "--api-key-env", "NO_SUCH_VARIABLE"], "holds no usable key"),
        ([DOWN, "--tokenizer", "absent"], "there is no absent/tokenizer.json"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_status_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon", "inf"])
def test_a_wait_must_be_a_number_of_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([DOWN, f"--wait={seconds}"])
    assert ended.value.code == 2
    assert "seconds above 0" in capsys.readouterr().err


def test_a_url_given_twice_is_examined_once_as_the_router_serves_it_once() -> None:
    assert servers_of([DOWN, f"{DOWN}/"]) == [Server(url=DOWN)]


def test_a_fleet_file_gives_each_rank_its_address(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "replicas:\n"
        "  - {name: a, url: 'http://h:1', events: 'tcp://h:5557', replay: 'tcp://h:5657'}\n"
        "  - {name: b, url: 'http://h:1'}\n"
        "  - {name: c, url: 'http://h:2'}\n"
    )
    first, second = servers_of([], fleet=path)
    assert first.sources == (
        Source("tcp://h:5557", "tcp://h:5657", rank=0),
        Source("tcp://h:5558", "tcp://h:5658", rank=1),
    )
    assert (first.listed, second.sources, second.listed) == (2, (), 1)


@pytest.mark.parametrize(("line", "taken"), [("block_tokens: 64\n", 64), ("", None)])
def test_the_block_size_of_a_fleet_file_is_the_routers(line: str, taken: int | None, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(line + "replicas:\n  - {name: a, url: 'http://h:1'}\n  - {name: b, url: 'http://h:2'}\n")
    assert [server.block_tokens for server in servers_of([], fleet=path)] == [taken, taken]


def test_a_tokenizer_that_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    def from_file(path: str) -> None:
        raise Exception(f"no model\nin {Path(path).name}")  # as the library does

    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file)))
    with pytest.raises(ConfigError, match=r"cannot be read: no model in tokenizer\.json"):
        local_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install"):
        local_tokenizer(tmp_path)


def test_a_local_tokenizer_gives_its_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    loaded = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(text)]))
    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=lambda path: loaded))
    monkeypatch.setitem(sys.modules, "tokenizers", library)
    assert local_tokenizer(tmp_path)("four") == [4]
