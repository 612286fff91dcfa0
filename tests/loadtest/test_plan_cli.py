"""`tfirst plan` as a person starts it, on the files of the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.cli.main import main

FILES = Path(__file__).parents[2] / "docs" / "planning"
FLEET, WORKLOAD = str(FILES / "fleet.yaml"), str(FILES / "workload.yaml")
TRACE = Path(__file__).parents[2] / "loadtest" / "demo" / "traffic.jsonl.gz"


def planned(capsys: pytest.CaptureFixture[str], workload: str, *flags: str, fleet: str = FLEET) -> dict[str, Any]:
    status = main(["plan", "--fleet", fleet, "--workload", workload, "--json", *flags])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if found["holds"] else 1)
    return found


def refused(capsys: pytest.CaptureFixture[str], fleet: str, workload: str, *flags: str) -> str:
    assert main(["plan", "--fleet", fleet, "--workload", workload, *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def changed(tmp_path: Path, text: str, name: str = "workload.yaml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def named(found: dict[str, Any], organisation: str) -> dict[str, Any]:
    """The assessment of all eight cards in one organisation."""
    return next(one for one in found["deployments"] if one["organisation"] == organisation and one["cards"] == 8)


def test_the_example_is_answered_in_words_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--fleet", FLEET, "--workload", WORKLOAD]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "First choice: P-D direct, P 4 A100, D 4 H20: holds, 4.55 requests/s, decode pool" in shown
    assert "is gone 43.2 s after it began" in shown
    assert "What would change the answer" in shown


def test_the_example_comes_out_as_in_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, WORKLOAD)
    first = found["deployments"][0]
    assert (first["prefill"], first["decode"]) == ({"A100": 4, "H20": 0}, {"A100": 0, "H20": 4})
    assert first["limited_by"] == "decode pool"
    assert found["needed_rps"] == pytest.approx(4.2)
    rates = {name: named(found, name)["carries_rps"] for name in ("replicas", "P-D direct", "P-D by store")}
    assert rates == pytest.approx({"replicas": 3.02, "P-D direct": 4.55, "P-D by store": 4.55}, abs=0.006)
    links = {name: named(found, name)["rates_rps"]["link"] for name in ("P-D direct", "P-D by store")}
    assert links == pytest.approx({"P-D direct": 20.7, "P-D by store": 10.35}, abs=0.006)


def test_long_answers_are_held_by_no_choice_and_four_copies_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(WORKLOAD).read_text(encoding="utf-8").replace("output_tokens: 1025", "output_tokens: 4097")
    found = planned(capsys, changed(tmp_path, text))
    assert not found["holds"]
    assert named(found, "P-D direct")["carries_rps"] == pytest.approx(1.26, abs=0.011)
    assert (found["copies"]["steady"], found["copies"]["in_time"], found["copies"]["cards"]) == (3, 4, 32)
    assert main(["plan", "--fleet", FLEET, "--workload", changed(tmp_path, text)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 times these 8 cards keep up with 3.5 requests/s (24 cards), 4 times meet all targets (32 cards)." in shown


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "first_token_s: 1",
            "54% of first tokens in time, not 90%. 2 times these 8 cards meet all targets (16 cards).",
        ),
        ("first_token_s: 0.2", "No number of copies of this choice meets all targets: 0% of first tokens in time"),
        ("pace_s: 0.016", "17 ms a token, not 16 ms. 2 times these 8 cards meet all targets (16 cards)."),
        ("pace_s: 0.006", "No number of copies of this choice meets all targets: 8 ms a token, not 6 ms."),
    ],
)
def test_where_only_the_first_token_or_the_pace_is_missed_no_cards_are_offered_that_were_just_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, says: str
) -> None:
    text = (
        "rate_rps: 3.5\nrequests: [{input_tokens: 8192, output_tokens: 1025}]\nbatch: 32\ntargets: {" + target + "}\n"
    )
    assert main(["plan", "--fleet", FLEET, "--workload", changed(tmp_path, text)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert says in shown
    assert "1 times" not in shown


def test_a_fleet_that_is_only_looked_at_as_a_whole_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = changed(tmp_path, Path(FLEET).read_text(encoding="utf-8").replace("ranks: 4", "ranks: 64"), "fleet.yaml")
    says = "only all of them together were"
    for each, said in ((fleet, True), (FLEET, False)):
        main(["plan", "--fleet", each, "--workload", WORKLOAD])
        assert (says in " ".join(capsys.readouterr().out.split())) is said


def test_a_trace_brings_its_rate_and_its_prefix_hits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, changed(tmp_path, f"trace: {TRACE}\nbatch: 32\n"))
    assert found["arrival_rps"] > 0
    doubled = planned(capsys, changed(tmp_path, f"trace: {TRACE}\nrate_rps: {2 * found['arrival_rps']}\nbatch: 32\n"))
    assert doubled["arrival_rps"] == pytest.approx(2 * found["arrival_rps"])
    assert doubled["deployments"][0]["cards"] >= found["deployments"][0]["cards"]


def test_the_first_choice_is_played_beside_its_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = changed(tmp_path, "rate_rps: 2\nrequests: [{input_tokens: 1024, output_tokens: 33}]\nbatch: 8\n")
    found = planned(capsys, small, "--simulate", "1", "--seconds", "10")
    (played,) = found["simulated"]
    assert set(played["formula"]) == set(played["played"])
    assert played["parts"]
    assert main(["plan", "--fleet", FLEET, "--workload", small, "--simulate", "1", "--seconds", "10"]) == 0
    assert "requests played" in capsys.readouterr().out


def test_a_first_choice_that_cannot_be_played_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = changed(
        tmp_path,
        "rate_rps: 7\nbatch: 32\nrequests:\n"
        "  - {input_tokens: 8192, output_tokens: 129}\n"
        "  - {input_tokens: 8192, output_tokens: 129, stored_tokens: 8192}\n",
    )
    assert main(["plan", "--fleet", FLEET, "--workload", pairs, "--simulate", "1", "--seconds", "5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "First choice: P-D by store" in shown
    assert "Not played: P-D by store" in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate_rps: 1\n", "either `requests` or a `trace`"),
        ("requests: [{input_tokens: 1, output_tokens: 1}]\n", "`rate_rps` is missing"),
        ("rate_rps: 0\nrequests: [{input_tokens: 1, output_tokens: 1}]\n", "rate_rps"),
        ("rate_rps: 1\nrequests: [{input_tokens: 4, output_tokens: 1, cached_tokens: 4}]\n", "cached_tokens"),
        ("rate_rps: 1\nrequests: [{input_tokens: 4, output_tokens: 1}]\nbatches: 3\n", "batches"),
        ("rate_rps: 1\nrequests: [{input_tokens: 900000, output_tokens: 1}]\n", "no request fits"),
        ("rate_rps: 1\nrequests: [{input_tokens: 4, output_tokens: 1}]\nstart_s: 9\ntargets: {drained_by_s: 9}", "9"),
        ("trace: nowhere.jsonl\n", "nowhere.jsonl"),
        ("][", "workload file"),
    ],
)
def test_a_workload_that_cannot_be_is_one_sentence(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, FLEET, changed(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{name: h20, card: H20, ranks: 4}", "{name: h20, ranks: 4}", "names no `card`"),
        ("network: network", "network: wire", "wire"),
        ("card: H20", "card: H21", "H21"),
        ("replicas:", "replica:", "replica"),
    ],
)
def test_a_fleet_that_cannot_be_is_one_sentence(
    old: str, new: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(FLEET).read_text(encoding="utf-8").replace(old, new)
    assert words in refused(capsys, changed(tmp_path, text, "fleet.yaml"), WORKLOAD)


def test_files_that_are_not_there_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "nowhere.yaml")
    assert "fleet file" in refused(capsys, nowhere, WORKLOAD)
    assert "workload file" in refused(capsys, FLEET, nowhere)


def test_a_fleet_without_a_model_or_prices_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(FLEET).read_text(encoding="utf-8")
    bare = text[: text.index("model:")] + text[text.index("# Half of both") :]
    assert "no `model`" in refused(capsys, changed(tmp_path, bare, "fleet.yaml"), WORKLOAD)
    unpriced = changed(tmp_path, text.replace(", usd_per_hour: 1", ""), "fleet.yaml")
    assert planned(capsys, WORKLOAD, fleet=unpriced)["deployments"][0]["usd_per_thousand_good"] is None


def test_the_speed_of_a_fleet_scales_cards_and_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "speed: 2\n" + Path(FLEET).read_text(encoding="utf-8")
    twice = planned(capsys, WORKLOAD, fleet=changed(tmp_path, text, "fleet.yaml"))
    once = planned(capsys, WORKLOAD)
    for name in ("replicas", "P-D direct"):
        assert named(twice, name)["carries_rps"] == pytest.approx(2 * named(once, name)["carries_rps"])
    assert named(twice, "P-D direct")["rates_rps"]["link"] == pytest.approx(2 * 20.7, abs=0.02)
