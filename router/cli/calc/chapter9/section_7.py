"""Section 9.7: whole deployments, what they cost, and what changes the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from estimators.cost import fleet_per_thousand_usd
from estimators.hardware import Card
from estimators.planning.affinity import chain_s
from estimators.planning.backlog import StartUp, service_to_drain_rps
from estimators.planning.changes import faster
from estimators.planning.deployments import CardKind, Deployment, Facts, Organisation, RequestKind, deployment
from estimators.planning.known import DEEPSEEK_V3, PLANNED_CARDS
from estimators.planning.plan import Copies, Question, Targets, assess, copies
from estimators.planning.storage import Saving
from estimators.roofline import Roofline
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from router.cli.calc.chapter9.rows import GIB, OUTPUT_TOKENS, PREFIX_TOKENS, Rows

ARRIVAL_RPS, READY_S, BY_S = 3.5, 10.0, 60.0
CHANNEL = 25e9  # bytes/s that the two servers share
PRICE = 8.0  # of eight cards and hour
POOL = 64 * GIB
STATE = costs_of(QWEN3_8B).kv_bytes(float(PREFIX_TOKENS))
MLA_STATE = costs_of(DEEPSEEK_V3).kv_bytes(float(PREFIX_TOKENS))


def question(**lengths: int) -> Question:
    """Example 9.8; `lengths` change its kind of request."""
    kind = {"input_tokens": PREFIX_TOKENS, "output_tokens": OUTPUT_TOKENS, **lengths}
    facts = Facts(
        shape=QWEN3_8B,
        kinds=(RequestKind(**kind),),
        cards=tuple(CardKind(name, _priced(name), 4) for name in ("A100", "H20")),
        batch=32,
        network_bytes_per_s=CHANNEL,
        store=True,
    )
    return Question(facts=facts, arrival_rps=ARRIVAL_RPS, ready_s=READY_S, targets=Targets(drained_by_s=BY_S))


def _priced(name: str) -> Card:
    return msgspec.structs.replace(PLANNED_CARDS[name], usd_per_hour=PRICE / 8)


def whole_fleet(
    asked: Question, organisation: Organisation = Organisation.SPLIT, *, prefill: Sequence[int] | None = None
) -> Deployment:
    found = deployment(asked.facts, organisation, prefill=prefill)
    assert found is not None, "eight cards can be split"
    return found


def groups(**lengths: int) -> Copies:
    asked = question(**lengths)
    return copies(asked, assess(asked, whole_fleet(asked)))


def slower_drain_s() -> float:
    """At nine tenths of the assumed speed."""
    asked = faster(question(), 0.9)
    return StartUp(ARRIVAL_RPS, whole_fleet(asked).per_s, READY_S).drained_at_s


def cost(finished_rps: float, good_share: float = 1.0) -> float:
    return fleet_per_thousand_usd(usd_per_hour=PRICE, finished_rps=finished_rps, good_share=good_share)


def rate(organisation: Organisation) -> float:
    return whole_fleet(question(), organisation).per_s


def later_use() -> Saving:
    """A second request that finds the prefix in the pool: one detour more when it is written, one read later."""
    compute_s = Roofline.of(QWEN3_8B, PLANNED_CARDS["A100"]).prefill_s(new_tokens=PREFIX_TOKENS, cached_tokens=0)
    move_s = chain_s(size_bytes=STATE, bytes_per_s=(CHANNEL,))
    return Saving(write_s=move_s, read_s=move_s, compute_s=compute_s)


def pair_question() -> Question:
    """Every prompt comes once more, at another replica: pairs of requests, half of which find all of it stored."""
    asked = question()
    first = asked.facts.kinds[0]
    again = replace(first, stored_tokens=PREFIX_TOKENS)
    return replace(asked, arrival_rps=2 * ARRIVAL_RPS, facts=replace(asked.facts, kinds=(first, again)))


ROWS: Rows = {
    "mu_needed": lambda: (service_to_drain_rps(arrival_rps=ARRIVAL_RPS, ready_s=READY_S, by_s=BY_S), "req/s"),
    "drain_90pct": lambda: (slower_drain_s(), "s"),
    "cost_reserved": lambda: (cost(ARRIVAL_RPS), "yuan/1000"),
    "cost_full_co": lambda: (cost(rate(Organisation.REPLICAS)), "yuan/1000"),
    "cost_full_pd": lambda: (cost(rate(Organisation.SPLIT)), "yuan/1000"),
    "cost_slo_quarter": lambda: (cost(rate(Organisation.SPLIT), good_share=0.25), "yuan/1000 good"),
    "pool_prefixes": lambda: (POOL // STATE, "prefixes"),
    "pool_prefixes_mla": lambda: (POOL // MLA_STATE, "prefixes"),
    "reuse_saving": lambda: (later_use().saved_s(1) * 1e3, "ms"),
    "reuse_bytes": lambda: (
        pair_question().arrival_rps * whole_fleet(pair_question(), Organisation.SPLIT_STORE).moved_bytes / 1e9,
        "GB/s",
    ),
    "pd_4097": lambda: (whole_fleet(question(output_tokens=4097)).per_s, "req/s"),
    "groups_steady": lambda: (groups(output_tokens=4097).steady, "groups"),
    "groups_drain": lambda: (groups(output_tokens=4097).in_time, "groups"),
}
