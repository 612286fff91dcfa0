"""Which rules are played where: the tables of a contest.

Model     every table answers one question: a trace, fleets, loads and rules. A rule's seeds are 0, 1, ...; central_fcfs
          is played with as many as the rule with the most
Valid     the part of a trace behind the one on which weights were chosen (`workload.PARTS`), or slices cut from it
"""

from __future__ import annotations

from dataclasses import dataclass, replace

OURS = ("e2e", "ttft", "p99", "cost")
STRONG = ("e2e", "ttft", "p99", "lmetric", "conductor", "dynamo")
OTHERS = (
    "random",
    "round_robin",
    "least_request",
    "kv_affinity",
    "vllm_dp",
    "two_choices",
    "peak_ewma",
    "prequal",
    "prefix_hash",
    "sglang_cache_aware",
    "llm_d",
    "llm_d_sticky",
    "preble_e2",
    "llumnix",
    "dualmap",
    "fetch_threshold",
    "greedy_ttft",
    "cost",
)
TOLD = ("cost", "least_request", "llm_d_sticky", "fetch_threshold", "greedy_ttft")  # where paths may differ
TRACES = ("conversation", "synthetic")

# A load is stated for a perfect cache, and central_fcfs has one: with a store that cannot hold what a trace says again,
# every rule has more to compute than the load says, and what is compared is no longer where requests were placed.
# The conversation trace fills 8 TiB; SMALL_GIB is the simulator's default.
HOLDS_ALL_GIB, SMALL_GIB = 16_384.0, 2_048.0


@dataclass(frozen=True, slots=True)
class Table:
    """One question.

    name : of its file; title : what is asked, for people
    seeds : how many each rule is played with
    error : standard deviation of the relative error of every estimate
    first_tokens_only : answers of one token, so that placement of prefills is all
    store_gib : of the shared store
    mark : highest mean first token over that of central_fcfs that is aimed at; None: nothing is
    """

    name: str
    title: str
    trace: str
    sizes: tuple[int, ...]
    cards: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: dict[str, int]
    directed: bool = False
    error: float = 0.0
    first_tokens_only: bool = False
    store_gib: float = HOLDS_ALL_GIB
    mark: float | None = None


def full() -> list[Table]:
    """Five seeds for the strongest six rules and two for the rest: placement on 8 and 16 replicas, answers on 16.

    Engines that fetch what they are told to are played with the rules that read where state is, and least_request.
    """
    seeds = dict.fromkeys(STRONG, 5) | dict.fromkeys(OTHERS, 2)
    loads = (0.5, 0.7, 0.8, 0.9)
    told = {rule: seeds[rule] for rule in (*STRONG, *TOLD)}
    tables = _tables((8, 16), loads, (16,), loads, seeds, (0.5, 0.7, 0.8), told)
    small = replace(
        tables[0],
        name="forgetful-conversation",
        title="conversation: placement alone, with a store of 2 TiB where the trace fills 8",
        sizes=(16,),
        seeds=dict.fromkeys(STRONG, 5),
        store_gib=SMALL_GIB,
        mark=None,
    )
    return [*tables, small]


def quick() -> list[Table]:
    """The same questions in minutes: slices, 16 replicas, one seed, fewer loads and rules."""
    few = dict.fromkeys((*STRONG, "cost", "least_request", "llm_d_sticky"), 1)
    tables = _tables((16,), (0.5, 0.7, 0.8, 0.9), (16,), (0.5, 0.7), few, (0.5, 0.7), few)
    every = dict.fromkeys((*STRONG, *OTHERS), 1)
    return [replace(table, seeds=every) if table.name == "mixed" else table for table in tables]


def _tables(
    sizes: tuple[int, ...],
    loads: tuple[float, ...],
    answered_sizes: tuple[int, ...],
    answered_loads: tuple[float, ...],
    seeds: dict[str, int],
    mixed_loads: tuple[float, ...],
    told_seeds: dict[str, int],
) -> list[Table]:
    tables: list[Table] = []
    for trace, mark in zip(TRACES, (1.10, 1.15), strict=True):
        plain = Table(
            f"answers-{trace}", f"{trace}: with its answers", trace, answered_sizes, ("A100",), answered_loads, seeds
        )
        placement = replace(
            plain,
            sizes=sizes,
            name=f"placement-{trace}",
            title=f"{trace}: placement alone",
            loads=loads,
            first_tokens_only=True,
            mark=mark,
        )
        wrong = replace(
            placement,
            name=f"error-{trace}",
            title=f"{trace}: placement alone, every estimate 20 % off",
            error=0.2,
            mark=None,
            seeds={rule: seeds[rule] for rule in ("e2e", "ttft", "conductor")},
        )
        told = replace(
            plain,
            name=f"directed-{trace}",
            title=f"{trace}: with its answers, engines fetch only what they are told to",
            directed=True,
            seeds=told_seeds,
        )
        tables += [placement, wrong, plain, told]
    mixed = Table(
        "mixed", "conversation: half A100, half H20", "conversation", (16,), ("A100", "H20"), mixed_loads, seeds
    )
    return [*tables, mixed]
