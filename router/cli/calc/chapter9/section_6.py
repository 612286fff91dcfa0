"""Section 9.6: starting, and moving what runs."""

from __future__ import annotations

from estimators.planning.backlog import StartUp, steps_to_repay
from estimators.planning.moving import catch_up
from estimators.planning.pools import piggyback_per_s
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from router.cli.calc.chapter9.rows import Rows
from router.cli.calc.chapter9.section_2 import REQUEST, groups, split, times

ARRIVAL_RPS, READY_S = 3.5, 10.0


def drained_at_s(service_rps: float) -> float:
    return StartUp(ARRIVAL_RPS, service_rps, READY_S).drained_at_s


def caught_up_s(copy_bytes_per_s: float) -> float:
    """The batch of one H20, while it goes on decoding."""
    state = REQUEST.batch * costs_of(QWEN3_8B).kv_bytes(REQUEST.mean_context)
    growth = REQUEST.batch / times("H20").step_s * costs_of(QWEN3_8B).kv_bytes(1.0)
    return catch_up(state_bytes=state, growth_bytes_per_s=growth, copy_bytes_per_s=copy_bytes_per_s).seconds


ROWS: Rows = {
    "break_even_steps": lambda: (steps_to_repay(extra_s=10.0, saved_per_step_s=0.2e-3), "steps"),
    "drain_pd": lambda: (drained_at_s(split(A100=4, H20=4).per_s), "s"),
    "drain_piggyback": lambda: (drained_at_s(piggyback_per_s(groups(A100=4, H20=4))), "s"),
    "migrate_25": lambda: (caught_up_s(25e9), "s"),
    "migrate_6": lambda: (caught_up_s(6.25e9), "s"),
}
