from __future__ import annotations

from math import nan

import msgspec
import pytest
from rich.console import Console

from loadtest.chaos.__main__ import main
from loadtest.chaos.load import Outcome
from loadtest.chaos.report import as_values, line_of, passed, table_of, verdict
from loadtest.chaos.run import Result


def a_result(*, wrong: list[str] | None = None, slow: str | None = None, during_s: float = nan) -> Result:
    counts = dict.fromkeys((outcome.value for outcome in Outcome), 0) | {"ok": 90, "cut": 2}
    return Result(
        name="killed",
        what="a replica is killed",
        counts=counts,
        before_s=0.2,
        during_s=during_s,
        after_s=0.21,
        shown_s=None,
        recovered_s=1.5,
        slow=slow,
        wrong=wrong or [],
    )


def test_a_run_passes_only_without_any_problem() -> None:
    assert passed([a_result()])
    assert not passed([a_result(), a_result(wrong=["r0 (ok) has 2 receipts"])])
    assert not passed([a_result(slow="first tokens were slow")])


def test_the_verdict_names_each_problem_under_its_phase() -> None:
    said = verdict([a_result(wrong=["one", "two"], slow="three")], took_s=9.0)
    assert said.splitlines()[:3] == ["killed: one", "killed: two", "killed: three"]
    assert said.splitlines()[3].startswith("FAILED: 3 problems in 92 requests")
    assert verdict([a_result()], took_s=9.0).startswith("PASSED: each of 92 requests")


def test_the_table_fits_eighty_columns_and_shows_the_unknown_as_a_dash() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table_of([a_result()]))
    row = next(line for line in captured.get().splitlines() if "killed" in line)
    assert row.split() == ["killed", "92", "90", "0", "0", "2", "0.200", "-", "0.210", "-", "1.5"]


def test_json_has_null_for_what_is_unknown() -> None:
    text = msgspec.json.encode(as_values([a_result()], seed=4, took_s=1.0))
    read = msgspec.json.decode(text)
    assert (read["seed"], read["passed"]) == (4, True)
    assert read["phases"][0]["during_s"] is None
    assert read["phases"][0]["counts"]["cut"] == 2


def test_the_line_of_a_phase_says_how_requests_ended_and_what_is_wrong() -> None:
    assert line_of(a_result()).endswith("90 ok, 2 cut; first token 0.200 / - / 0.210 s: as it should be")
    assert line_of(a_result(wrong=["it hangs"])).endswith("it hangs")


def test_a_phase_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--phase", "flooded"])
    assert ended.value.code == 2
    assert "killed" in capsys.readouterr().err
