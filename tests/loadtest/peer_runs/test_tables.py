from typing import Any

from loadtest.demo.report import Tokens
from loadtest.peer_runs.tables import ROWS, Measured, Relayed, Served, cells, comparison, markdown
from loadtest.peers import served
from loadtest.scenarios.goodput import Sample


def a_round(**fields: Any) -> Served:
    usual: dict[str, Any] = {
        "first_token_mean_s": 0.5,
        "first_token_p50_s": 0.4,
        "first_token_p99_s": 2.0,
        "end_mean_s": 3.0,
        "end_p99_s": 9.0,
        "reused_share": 0.5,
        "own_share": 0.25,
        "errors": 0,
        "cpu_s_per_1000": 4.0,
        "resident_mib": 90.0,
        "late_s": 0.01,
    }
    return Served(**usual | fields)


def a_router(name: str, *rounds: Served, **fields: Any) -> Measured:
    return Measured(name=name, version="1.0", served=list(rounds), **fields)


def cell(measured: Measured, row: str) -> str:
    return cells(measured)[ROWS.index(row)]


def test_cells_are_medians_over_rounds_and_errors_their_sum() -> None:
    measured = a_router("a", *(a_round(first_token_mean_s=value, errors=1) for value in (0.1, 0.9, 0.3)))
    assert cell(measured, "first token, mean") == "300.0 ms"
    assert cell(measured, "errors") == "3"


def test_what_was_not_measured_is_a_dash_and_never_zero() -> None:
    measured = a_router("a", relayed=[Relayed(), Relayed(cpu_s_per_100k_chunks=2.5)])
    assert cell(measured, "errors") == "-"
    assert cell(measured, "added to a first byte") == "-"
    assert cell(measured, "CPU, 100,000 chunks") == "2.50 s"


def test_who_was_not_there_is_named_with_the_reason() -> None:
    routers = [a_router("a", a_round()), Measured(name="b", missing="could not be installed")]
    for told in (comparison(routers), markdown(routers)):
        assert "not there: b: could not be installed" in told
        assert "a 1.0" in told
    assert "no router could be started" in comparison(routers[1:])


def test_a_page_has_a_line_for_each_figure() -> None:
    lines = markdown([a_router("a", a_round()), a_router("b", a_round(first_error="503"))]).splitlines()
    assert [line.count("|") for line in lines[: 2 + len(ROWS)]] == [4] * (2 + len(ROWS))
    assert lines[-1] == "- first error of b: 503"


def test_a_round_counts_errors_and_takes_times_of_the_others() -> None:
    samples = [
        Sample(name="trace", at_s=0.0, first_token_s=0.2, end_s=1.0),
        Sample(name="trace", at_s=0.0, first_token_s=9.0, end_s=9.0, error="cut"),
    ]
    told = served(samples, tokens=Tokens(prompt=100.0, own_memory=30.0, store=20.0), cpu_s=1.0, memory_mib=80.0)
    assert (told.reused_share, told.own_share) == (0.5, 0.6)
    assert (told.errors, told.first_error, told.first_token_mean_s, told.cpu_s_per_1000) == (1, "cut", 0.2, 500.0)
