"""All calculators, in the order `tfirst calc` lists them."""

from __future__ import annotations

from router.cli.calc.affinity import ROUTE
from router.cli.calc.attention_ffn import ATTENTION_FFN
from router.cli.calc.calculator import Calculator
from router.cli.calc.chapter9 import CHAPTER9
from router.cli.calc.deployments import DEPLOYMENTS
from router.cli.calc.expert_replicas import EXPERT_REPLICAS, PADDING
from router.cli.calc.expert_skew import EXPERT_SKEW
from router.cli.calc.experts import EXPERTS
from router.cli.calc.moving import MOVING
from router.cli.calc.pools import POOLS
from router.cli.calc.preload import PRELOAD
from router.cli.calc.recovery import RECOVERY
from router.cli.calc.startup import STARTUP
from router.cli.calc.storage import STORAGE

ALL = (
    POOLS,
    ATTENTION_FFN,
    EXPERTS,
    EXPERT_SKEW,
    EXPERT_REPLICAS,
    PADDING,
    *STORAGE,
    PRELOAD,
    *RECOVERY,
    ROUTE,
    *STARTUP,
    *MOVING,
    *DEPLOYMENTS,
    CHAPTER9,
)
CALCULATORS: dict[str, Calculator] = {one.name: one for one in ALL}
