"""All calculators, in the order `tfirst calc` lists them."""

from __future__ import annotations

from router.cli.calc.attention_ffn import ATTENTION_FFN
from router.cli.calc.calculator import Calculator
from router.cli.calc.chapter9 import CHAPTER9
from router.cli.calc.expert_replicas import EXPERT_REPLICAS, PADDING
from router.cli.calc.expert_skew import EXPERT_SKEW
from router.cli.calc.experts import EXPERTS
from router.cli.calc.pools import POOLS

ALL = (
    POOLS,
    ATTENTION_FFN,
    EXPERTS,
    EXPERT_SKEW,
    EXPERT_REPLICAS,
    PADDING,
    CHAPTER9,
)
CALCULATORS: dict[str, Calculator] = {one.name: one for one in ALL}
