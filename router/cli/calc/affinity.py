"""`tfirst calc route`: the busy replica that has the state, or the free one that fetches or computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from estimators.first_token import Discipline
from estimators.planning.affinity import HitOrMiss, chain_s, first_token_s, tie_bytes_per_s
from estimators.roofline import Roofline
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Table, Value
from router.cli.calc.inputs import NamedCard, card, choice, count, model, number, numbers

GB = 1e9
DISCIPLINES = (Discipline.OVERLAPPED, Discipline.SERIAL)

INPUTS = (
    model(),
    card("card", "A100", "card of both replicas"),
    count("prefix-tokens", 8192, "tokens", "that replica A has", low=1),
    count("new-tokens", 256, "tokens", "after them", low=1),
    number("queue-a-ms", 250, "ms", "wait at A, which has the prefix"),
    number("queue-b-ms", 20, "ms", "wait at B, which has not"),
    number("look-up-ms", 10, "ms", "before a fetch"),
    numbers("network-gb-s", "6.25,25", "GB/s", "store to B's host memory", above=True),
    number("host-gb-s", 25, "GB/s", "host memory to card", above=True),
    choice("discipline", "overlapped", "when B fetches", of=[one.value for one in DISCIPLINES]),
    numbers("hit-probability", "0.5,0.9,0.99", "", "that A's copy is still there"),
    number("quantile", 0.99, "", "of the first token", low=0.5, high=0.999),
)


@dataclass(frozen=True, slots=True)
class Ways:
    """T_first of each way, seconds, and what a fetch is made of."""

    state_bytes: float
    hit_work_s: float
    local_s: float
    recompute_s: float
    lost_s: float  # A, when its copy has gone
    rest_of_fetch_s: float


def ways_of(
    *,
    model: ModelShape,
    card: NamedCard,
    prefix_tokens: int,
    new_tokens: int,
    queue_a_s: float,
    queue_b_s: float,
    look_up_s: float,
    host_gb_s: float,
) -> Ways:
    roofline = Roofline.of(model, card.card)
    work_s = roofline.prefill_s(new_tokens=new_tokens, cached_tokens=prefix_tokens)
    all_s = roofline.prefill_s(new_tokens=new_tokens + prefix_tokens, cached_tokens=0)
    state = float(roofline.costs.kv_bytes(float(prefix_tokens)))

    def alone(queue_s: float, work: float) -> float:
        return first_token_s(Discipline.OVERLAPPED, queue_s=queue_s, fetch_s=0.0, work_s=work)

    return Ways(
        state_bytes=state,
        hit_work_s=work_s,
        local_s=alone(queue_a_s, work_s),
        recompute_s=alone(queue_b_s, all_s),
        lost_s=alone(queue_a_s, all_s),
        rest_of_fetch_s=chain_s(size_bytes=state, bytes_per_s=(host_gb_s * GB,), start_s=look_up_s),
    )


def answer(
    *,
    model: ModelShape,
    card: NamedCard,
    prefix_tokens: int,
    new_tokens: int,
    queue_a_ms: float,
    queue_b_ms: float,
    look_up_ms: float,
    network_gb_s: Sequence[float],
    host_gb_s: float,
    discipline: str,
    hit_probability: Sequence[float],
    quantile: float,
) -> Answer:
    if max(hit_probability) > 1:
        raise ValueError("--hit-probability is a share from 0 to 1")
    ways = ways_of(
        model=model,
        card=card,
        prefix_tokens=prefix_tokens,
        new_tokens=new_tokens,
        queue_a_s=queue_a_ms / 1e3,
        queue_b_s=queue_b_ms / 1e3,
        look_up_s=look_up_ms / 1e3,
        host_gb_s=host_gb_s,
    )
    rows: list[tuple[str, float]] = [("A: local hit", ways.local_s), ("B: recompute", ways.recompute_s)]
    for gb_s in network_gb_s:
        fetch_s = ways.rest_of_fetch_s + ways.state_bytes / (gb_s * GB)
        first_s = first_token_s(
            Discipline(discipline), queue_s=queue_b_ms / 1e3, fetch_s=fetch_s, work_s=ways.hit_work_s
        )
        rows.append((f"B: fetch at {gb_s:g} GB/s", first_s))
    copy = HitOrMiss(ways.local_s, ways.lost_s)
    needed = copy.probability_to_beat(ways.recompute_s)
    values = [
        *(
            Value(name.replace(": ", "_").replace(" ", "_").lower() + "_ms", seconds * 1e3, "ms")
            for name, seconds in rows
        ),
        Value("a_copy_lost_ms", ways.lost_s * 1e3, "ms"),
        Value("tie_with_a_gb_s", _tie(ways, ways.local_s), "GB/s of the network"),
        Value("tie_with_recompute_gb_s", _tie(ways, ways.recompute_s), "GB/s of the network"),
        Value("hit_probability_needed", needed if needed < inf else "never", "for A's mean to beat B's recompute"),
        Value("mean_ms", [copy.mean_s(p) * 1e3 for p in hit_probability], "ms, for each hit probability"),
        Value("quantile_ms", [copy.quantile_s(p, quantile) * 1e3 for p in hit_probability], "ms, for each"),
    ]
    tables = [
        Table("First token", ("way", "ms"), [(name, seconds * 1e3) for name, seconds in rows]),
        Table(
            "A, when its copy may have gone",
            ("hit probability", "mean, ms", f"p{100 * quantile:g}, ms"),
            [(p, copy.mean_s(p) * 1e3, copy.quantile_s(p, quantile) * 1e3) for p in hit_probability],
        ),
    ]
    return Answer(values, tables)


def _tie(ways: Ways, other_s: float) -> float | str:
    rate = tie_bytes_per_s(
        size_bytes=ways.state_bytes, other_s=other_s, work_s=ways.hit_work_s, rest_of_fetch_s=ways.rest_of_fetch_s
    )
    return rate / GB if rate < inf else "never"


ROUTE = Calculator("route", "the busy replica with the state, or a free one without it", INPUTS, answer)
