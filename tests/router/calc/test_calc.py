"""`tfirst calc` as a person meets it: a list, help with units, tables, JSON, figures, one sentence for a mistake."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from estimators.shapes import QWEN3_8B
from router.cli.calc import show
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.calculators import CALCULATORS
from router.cli.calc.inputs import card, cards, choice, count, counts, model, number, numbers
from router.cli.calc.show import as_json, number_text
from router.cli.main import main

PNG = b"\x89PNG\r\n"
RESERVED = {"json", "plot", "figure", "calculator", "run"}  # what the command itself keeps beside the inputs

with_plots = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib (extra `plots`) is not installed")
FIGURES = [pytest.param(one, plot, id=f"{one.name}-{plot.name}") for one in CALCULATORS.values() for plot in one.plots]


def parsed(calculator: Calculator) -> dict[str, Any]:
    return {one.keyword: one.parse(one.default) for one in calculator.inputs}


def sentence(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused call says, which is one line."""
    assert main(["calc", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_without_a_name_all_calculators_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc"]) == 0
    out = capsys.readouterr().out
    assert all(one.name in out for one in CALCULATORS.values())


@pytest.mark.parametrize("name", CALCULATORS)
def test_help_shows_every_input_with_unit_range_and_default(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no line ends within a word
    with pytest.raises(SystemExit, match="0"):
        main(["calc", name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for one in CALCULATORS[name].inputs:
        assert f"--{one.name} X" in shown
        parts = [part for part in (one.about, one.unit, one.within) if part]
        assert f"{', '.join(parts)} (default {one.default})" in shown


@pytest.mark.parametrize("calculator", CALCULATORS.values(), ids=CALCULATORS)
def test_every_calculator_answers_with_its_defaults_in_both_forms(
    calculator: Calculator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calc", calculator.name, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = [row["id"] for row in printed]
    assert len(set(names)) == len(names) > 0
    assert main(["calc", calculator.name]) == 0
    assert capsys.readouterr().out.strip()
    assert not RESERVED & {one.keyword for one in calculator.inputs}


@with_plots
@pytest.mark.parametrize(("calculator", "plot"), FIGURES)
def test_every_figure_is_drawn(
    calculator: Calculator, plot: Plot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(show, "DOTS_PER_INCH", 50)
    path = tmp_path / "figure.png"
    show.save_plot(plot, path, parsed(calculator))
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 3_000  # more than an empty canvas


@with_plots
def test_a_figure_that_cannot_be_written_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawn = next(one for one in CALCULATORS.values() if one.plots)
    assert "--plot" in sentence([drawn.name, "--plot", str(tmp_path / "no" / "where.png")], capsys)
    assert "--plot" in sentence([drawn.name, "--plot", str(tmp_path / "figure.unknown")], capsys)


def test_without_matplotlib_a_figure_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(show, "import_module", missing)
    drawn = next(one for one in CALCULATORS.values() if one.plots)
    said = sentence([drawn.name, "--plot", str(tmp_path / "figure.png")], capsys)
    assert said == "tfirst: --plot needs matplotlib: pip install 'tfirst[plots]'"


@pytest.mark.parametrize("calculator", CALCULATORS.values(), ids=CALCULATORS)
def test_rubbish_in_any_input_is_refused_with_what_would_be_right(calculator: Calculator) -> None:
    for one in calculator.inputs:
        for rubbish in ("rubbish", "", "nan", "-1", ",", "1e999"):
            with pytest.raises(ValueError, match=r"a (whole )?number|one of|config\.json|as 4xA100"):
                one.parse(rubbish)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pools", "--batch=0"], "tfirst: --batch is a whole number from 1 to 8192, not '0'"),
        (["experts", "--gpu-share=2"], "tfirst: --gpu-share is a number above 0 to 1, not '2'"),
        (["padding", "--rows=1,x"], "tfirst: --rows is with commas between: a whole number from 0, not '1,x'"),
        (
            ["pools", "--cards=4"],
            "tfirst: --cards is with commas between: as 4xA100, with 1 to 65536 cards of a kind, not '4'",
        ),
    ],
)
def test_a_refused_input_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence(arguments, capsys) == said


def test_an_error_of_the_arithmetic_is_a_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "outside 1 to the 256 experts" in sentence(["expert-skew", "--cards", "512"], capsys)


def test_absurd_counts_and_splits_without_a_side_are_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for name, flag, text, says in (
        ("pools", "batch", "10000000", "a whole number from 1 to 8192"),
        ("migration", "batch", "8193", "a whole number from 1 to 8192"),
        ("expert-skew", "sources", "10000000", "a whole number from 1 to 65536"),
        ("expert-skew", "cards", "8,10000000", "a whole number from 1 to 65536"),
        ("pools", "cards", f"{10**30}xA100", "as 4xA100, with 1 to 65536 cards of a kind"),
        ("deployments", "pool-gib", "1e300", "a number up to 1e+18"),
        ("expert-skew", "tokens", "1000000", "batches x tokens x chosen x chosen"),
        ("preload", "read-gb-s", "1e-300", "read_s = 1.2"),
    ):
        assert says in sentence([name, f"--{flag}={text}"], capsys)
    for split in ("0,0", "4,4"):
        said = sentence(["deployments", "--prefill", split], capsys)
        assert said.endswith("at least one has to prefill and one to decode")


@pytest.mark.parametrize(
    ("one", "text", "value"),
    [
        (number("rate", 1, "GB/s", "rate"), "2.5", 2.5),
        (number("share", 0.5, "", "share", high=1), "1", 1.0),
        (count("tokens", 1, "tokens", "tokens"), "0", 0),
        (numbers("rates", "1", "", "rates"), "1, 2.5", (1.0, 2.5)),
        (counts("rows", "1", "", "rows"), "32,16", (32, 16)),
        (choice("side", "a", "side", of=("a", "b")), "b", "b"),
        (model(), "qwen3-8b", QWEN3_8B),
    ],
)
def test_inputs_read_what_people_type(one: Any, text: str, value: object) -> None:
    assert one.parse(text) == value


def test_ranges_are_shown_as_they_are_checked() -> None:
    assert number("share", 0.5, "", "share", high=1, above=True).within == "> 0, <= 1"
    assert number("rate", 1, "", "rate").within == ">= 0"
    assert count("tokens", 1, "", "tokens", low=1, high=9).within == ">= 1, <= 9"
    assert counts("rows", "1", "", "rows", low=2).within == ">= 2"


def test_models_are_read_from_their_own_file() -> None:
    shape = model().parse(str(Path(__file__).parents[2] / "vectors" / "hf_configs" / "qwen3_8b.json"))
    assert shape.kv_bytes_per_token == QWEN3_8B.kv_bytes_per_token


def test_a_card_may_bring_its_own_peaks_and_memory() -> None:
    mine = card("card", "A100", "card").parse("MINE@100/200/12")
    assert (mine.name, mine.card.peak_tflops, mine.card.memory_gb_s, mine.card.memory_gib) == ("MINE", 100, 200, 12)
    reached = mine.reaching(compute_share=0.25, memory_share=0.75)
    assert (reached.flops_per_s, reached.bytes_per_s) == (25e12, 150e9)
    first, second = cards("cards", "4xA100", "cards").parse("2xA100,6xMINE@1/2")
    assert (first.count, first.kind.name, second.count, second.kind.card.peak_tflops) == (2, "A100", 6, 1)


@pytest.mark.parametrize("text", ["MINE@1", "MINE@1/2/3/4", "MINE@a/b", "@1/2", "nobody", "A100@0/1"])
def test_a_card_that_cannot_be_read_says_how_cards_are_written(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME@TFLOPS/GB_S|a number above 0"):
        card("card", "A100", "card").parse(text)


def test_lists_are_for_json_and_single_numbers_for_both(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(
        [Value("one_s", 0.25, "s"), Value("all_s", [0.25, 0.5], "s")],
        [Table("title", ("kind", "step, ms"), [("a", 1.5)])],
        ["A note."],
    )
    assert json.loads(as_json(answer)) == [
        {"id": "one_s", "value": 0.25, "unit": "s"},
        {"id": "all_s", "value": [0.25, 0.5], "unit": "s"},
    ]
    show.print_answer(answer, Console(width=100))
    out = capsys.readouterr().out
    assert "one s" in out
    assert "all s" not in out
    assert all(text in out for text in ("title", "step, ms", "1.5", "A note."))


def test_numbers_of_numpy_and_no_limit_go_into_json_too() -> None:
    answer = Answer([Value("a", np.float64(0.5)), Value("b", np.arange(2).tolist()), Value("c", inf)])
    assert [row["value"] for row in json.loads(as_json(answer))] == [0.5, [0, 1], None]


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (4.5512, "4.551"), (70272.0, "70,272"), (1234.5, "1,234"), (True, "yes"), ("decode", "decode"),
     (1e-6, "1e-06"), (float("inf"), "no limit"), (float("nan"), "-"), (1.5e9, "1,500,000,000")],
)  # fmt: skip
def test_numbers_are_shown_with_four_figures(value: Any, text: str) -> None:
    assert number_text(value) == text


@with_plots
def test_axes_stand_one_under_another_and_share_their_labels() -> None:
    from matplotlib.figure import Figure

    top, bottom = new_axes(Figure(), 2, title="title", xlabel="x", ylabel="y")
    assert (top.get_title(), top.get_xlabel(), bottom.get_xlabel()) == ("title", "", "x")
    assert (top.get_ylabel(), bottom.get_ylabel()) == ("y", "y")
