"""The textbook's numbers (chapter 9), each through the public function that gives it; one module a section."""

from __future__ import annotations

from router.cli.calc.calculator import Answer, Calculator, Value
from router.cli.calc.chapter9 import section_2, section_3, section_4, section_5, section_6, section_7
from router.cli.calc.chapter9.rows import Rows

ROWS: Rows = {
    **section_2.ROWS,
    **section_3.ROWS,
    **section_4.ROWS,
    **section_5.ROWS,
    **section_6.ROWS,
    **section_7.ROWS,
}


def answer() -> Answer:
    return Answer([Value(name, *row()) for name, row in ROWS.items()])


CHAPTER9 = Calculator("chapter9", "every number of the textbook's chapter 9, with its id", inputs=(), answer=answer)
