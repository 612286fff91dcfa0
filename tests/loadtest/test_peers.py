from pathlib import Path

import msgspec
import pytest

from loadtest.peer_runs.tables import Measured
from loadtest.peers import parser_of, run


@pytest.mark.slow
def test_a_short_run_fills_every_row_for_ours_and_names_the_peers_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    options = ["--requests", "4", "--speed", "40", "--seconds", "0.2", "--relay-rounds", "1", "--core", "0"]
    assert run(parser_of().parse_args([*options, "--only", "tfirst", "smg", "--out", str(out)])) == 0
    printed = capsys.readouterr().out
    for peer in ("sglang-router", "vllm-router", "litellm", "production-stack", "nginx"):
        assert f"not there: {peer}" in printed
    assert "not there: smg cache_aware: no --peers-venv given" in printed
    with_fleet, by_urls, *_ = msgspec.json.decode(out.read_bytes(), type=list[Measured])
    assert [len(one.served) for one in (with_fleet, by_urls)] == [1, 1]
    assert with_fleet.served[0].errors == by_urls.served[0].errors == 0
    (relayed,) = by_urls.relayed
    assert all(value == value for value in msgspec.structs.astuple(relayed))
