"""`tfirst calc chapter9` against the textbook's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.cli.calc.chapter9 import ROWS
from router.cli.main import main

VECTORS = Path(__file__).parents[2] / "vectors"
EXPECTED: dict[str, dict[str, Any]] = {
    row["id"]: row for row in json.loads((VECTORS / "chapter9_values.json").read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", ROWS)
def test_each_number_is_the_textbooks_within_its_tolerance(name: str) -> None:
    value, unit = ROWS[name]()
    expected = EXPECTED[name]
    assert value == pytest.approx(expected["expected"], rel=0, abs=expected["tolerance"]), expected["quantity"]
    assert unit == expected["unit"]


def test_no_row_is_missing_and_none_is_unknown() -> None:
    assert sorted(ROWS) == sorted(EXPECTED)


def test_json_is_a_list_of_id_value_and_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc", "chapter9", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [set(row) for row in printed] == [{"id", "value", "unit"}] * len(ROWS)
    assert {row["id"]: (row["value"], row["unit"]) for row in printed} == {name: row() for name, row in ROWS.items()}
