from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from sim_backends import fleet as fleet_file
from sim_backends.cli import COMMAND
from tests.sim_backends.builders import a_fleet

TIMEOUT_S = 20.0
RUN = (
    "import argparse, sys; from sim_backends.cli import COMMAND; parser = argparse.ArgumentParser(prog='tfirst sim'); "
    "COMMAND.configure(parser); sys.exit(COMMAND.run(parser.parse_args()))"
)


def run(*options: str) -> int:
    parser = argparse.ArgumentParser(prog="tfirst sim")
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_args(options))


def test_a_port_in_use_is_one_sentence_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run("--replicas", "1", "--port", str(port)) == 1
    told = capsys.readouterr()
    assert told.err == f"tfirst sim: cannot listen on 127.0.0.1:{port}: the port is in use\n"
    assert told.out == ""


def test_a_bad_fleet_file_is_one_sentence_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(fleet_file.DEFAULT_FLEET.read_text().replace("discipline: overlapped", "discipline: magic"))
    assert run("--fleet", str(path)) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"tfirst sim: {path}: fetch.discipline is 'magic'")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--fleet", "f.yaml", "--replicas", "2"], "do not go with --fleet"),
        (["--cards", "A100,H20", "--replicas", "1"], "names 2 cards for 1 replicas"),
        (["--cards", "B200"], "--cards: there is no card 'B200'; there are A100, H20"),
        (["--fleet", "none.yaml"], "none.yaml: cannot be read"),
        (["--fault", "explode=1"], "there is no fault 'explode'"),
        (["--fault", "h20-9:error_share=1"], "names no replica; there are a100-0, a100-1, h20-0, h20-1"),
        (["--fault", "error_share=2"], "fault error_share is '2'"),
        (["--fault", "restart_after_s=-1"], "fault restart_after_s is '-1'"),
        (["--fault", "restart_after_s=inf"], "restart_after_s must be a finite number"),
        (["--events", "vllm-0.9", "--raw-hashes"], "--raw-hashes does not go with --events vllm-0.9"),
        (["--events", "sglang-0.5.23", "--raw-hashes"], "which has numbers only"),
    ],
)
def test_options_that_make_no_fleet_are_status_2(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


def test_a_fleet_that_cannot_be_written_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--replicas", "1", "--port", "0", "--write-fleet", "/no/such/folder/f.yaml") == 1
    assert (
        capsys.readouterr().err == "tfirst sim: /no/such/folder/f.yaml cannot be written: No such file or directory\n"
    )


def test_a_host_that_is_not_ours_is_one_sentence_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--replicas", "1", "--port", "0", "--no-events", "--host", "192.0.2.1") == 1
    assert capsys.readouterr().err.startswith("tfirst sim: cannot listen on 192.0.2.1:0: ")


@pytest.mark.parametrize(
    "options", [["--replicas", "0"], ["--speed", "x"], ["--speed", "inf"], ["--port", "70000"], ["--events", "vllm-9"]]
)
def test_bad_values_are_argparse_errors(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*options)
    assert caught.value.code == 2
    assert repr(options[1]) in capsys.readouterr().err


def test_help_names_every_option_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for option in (
        "--replicas",
        "--cards",
        "--speed",
        "--fleet",
        "--host",
        "--port",
        "--write-fleet",
        "--seed",
        "--events",
        "--fault",
    ):
        assert option in text
    assert "examples:" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_says_what_listens_writes_the_fleet_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    written = tmp_path / "fleet.yaml"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "--replicas", "2", "--port", "0", "--write-fleet", str(written)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(fleet_file.__file__).parent.parent,
    )
    assert process.stdout is not None
    lines = [await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) for _ in range(2)]
    fleet = fleet_file.read(written)
    for line, replica in zip(lines, fleet.replicas, strict=True):
        assert {replica.name, replica.card, replica.url, replica.events} <= set(line.decode().split())
    assert fleet.store is not None
    assert fleet.store.events is not None
    process.send_signal(number)
    _out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert (process.returncode, err) == (0, b"")


def test_several_ranks_behind_one_url_are_refused_for_sglang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "f.yaml"
    row = {"name": "r", "card": "A100", "ranks": 2}
    fleet_file.write(a_fleet(replicas=[row]), fleet)
    assert run("--fleet", str(fleet), "--events", "sglang-0.5.23") == 2
    assert "plays one rank behind each URL" in capsys.readouterr().err
