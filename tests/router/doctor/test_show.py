"""The same findings as a table, as plain lines and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from router.cli.screen import Screen
from router.doctor.facts import Facts
from router.doctor.judge import findings_of
from router.doctor.show import Report, as_json, print_reports
from tests.router.doctor.test_judge import GOOD

BAD = Facts(url="http://10.0.0.6:8000", trouble="it wants [a] key", wants_key=True)


def reports(*facts: Facts) -> list[Report]:
    return [Report(each, findings_of(each)) for each in facts]


def printed(*facts: Facts, is_terminal: bool) -> str:
    out = StringIO()
    print_reports(reports(*facts), Console(file=out, force_terminal=is_terminal, width=100, color_system=None))
    return out.getvalue()


def test_plain_lines_hold_each_finding_whole_however_long() -> None:
    text = printed(replace(GOOD, sources=()), is_terminal=False)
    (fix,) = [line.strip() for line in text.splitlines() if "-> --kv" in line]
    assert fix.endswith('"replay_endpoint":"tcp://*:5657"}\''), "copied into a shell as it is"
    assert text.splitlines()[-1] == "Cache-aware routing would not work for http://10.0.0.5:8000."


def test_a_table_holds_the_same_words() -> None:
    text = " ".join(printed(GOOD, BAD, is_terminal=True).split())
    for words in (
        "http://10.0.0.5:8000",
        "vLLM 0.33.0",
        "It wants [a] key.",
        "would not work for http://10.0.0.6:8000.",
    ):
        assert words in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_servers_words_can_neither_command_a_terminal_nor_look_like_a_finding(is_terminal: bool) -> None:
    bad = replace(BAD, trouble="\x1b[2Jsaid\r\nCache-aware routing would work.\n")
    out = StringIO()
    print_reports(reports(bad), Screen(file=out, force_terminal=is_terminal, width=100, color_system=None))
    assert "\x1b[2J" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert "Cache-aware routing would work." not in out.getvalue().splitlines()


def test_all_well_says_so() -> None:
    assert printed(GOOD, is_terminal=False).endswith("Cache-aware routing would work.\n")


def test_json_holds_facts_and_findings_with_unknown_as_null() -> None:
    answer = json.loads(as_json(reports(GOOD, BAD)))
    assert answer["works"] is False
    good, bad = answer["servers"]
    assert (good["works"], bad["works"]) == (True, False)
    assert good["facts"]["sources"][0]["state"] == "live"
    assert good["facts"]["sources"][0]["replay_answers"] is True
    assert good["facts"]["load"]["total"]["kv_usage"] is None
    assert bad["findings"] == [
        {
            "level": "problem",
            "about": "server",
            "sentence": "It wants [a] key.",
            "fix": "--api-key-env NAME, the environment variable that holds the key",
        }
    ]
