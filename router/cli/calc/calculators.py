"""All calculators, in the order `tfirst calc` lists them."""

from __future__ import annotations

from router.cli.calc.calculator import Calculator
from router.cli.calc.chapter9 import CHAPTER9
from router.cli.calc.pools import POOLS

CALCULATORS: dict[str, Calculator] = {one.name: one for one in (CHAPTER9, POOLS)}
