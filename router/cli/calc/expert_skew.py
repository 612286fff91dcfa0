"""`tfirst calc expert-skew`: how uneven an expert-parallel group is, and what that costs a layer at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from estimators.planning.expert_parallel import (
    Fabric,
    LayerBound,
    card_rows,
    layer_bound,
    one_hot_expert,
    random_rows,
    skew,
)
from estimators.planning.pipelines import break_even_factor, pipelined_s
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import MOST_CARDS, NamedCard, card, count, counts, model, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS = (
    model("qwen3-235b"),
    count("tokens", 1024, "tokens", "in a batch", low=1, high=1_000_000),
    count("chosen", 8, "experts", "each token passes", low=1),
    count("experts", 256, "experts", "in a layer", low=2, high=65_536),
    number("hot-rows", 128, "rows", "of the one hot expert"),
    counts("cards", "8,32,256", "cards", "sizes of the expert-parallel group", low=1, high=MOST_CARDS),
    count("batches", 1000, "batches", "of the simulation with even routing", low=1, high=100_000),
    count("seed", 0, "", "of the simulation"),
    counts("group-rows", "5120,1024,1024,1024", "rows", "each expert group gets in the exchange"),
    count("sources", 4, "cards", "that send rows, equally many", low=1, high=MOST_CARDS),
    number("card-gb-s", 50, "GB/s", "each card's own link, each way", above=True),
    number("cut-gb-s", 200, "GB/s", "all links between sources and groups, each way", above=True),
    number("dispatch-bytes", 2, "bytes", "of one value on the way there", above=True),
    number("combine-bytes", 2, "bytes", "of one value on the way back", above=True),
    card("gpu", "H100", "card with the experts"),
    number("compute-share", 0.5, "", "share of its peak it reaches", high=1, above=True),
    count("micro-batches", 2, "", "the batch is split into where stages overlap", low=1),
)


def bound_of(
    *,
    model: ModelShape,
    group_rows: Sequence[float],
    sources: int,
    card_gb_s: float,
    cut_gb_s: float,
    dispatch_bytes: float,
    combine_bytes: float,
    gpu: NamedCard,
    compute_share: float,
) -> LayerBound:
    """The layer's bound with every group's rows coming from all sources alike."""
    if not any(group_rows):
        raise ValueError("--group-rows are all 0: nothing is exchanged")
    if model.experts is None:
        raise ValueError(f"{model.name} is a model without routed experts")
    return layer_bound(
        np.tile(np.asarray(group_rows) / sources, (sources, 1)),
        dispatch_bytes=dispatch_bytes * model.hidden,
        combine_bytes=combine_bytes * model.hidden,
        fabric=Fabric(card_bytes_per_s=card_gb_s * 1e9, cut_bytes_per_s=cut_gb_s * 1e9),
        row_flops=2.0 * model.expert_weights,
        flops_per_s=gpu.reaching(compute_share=compute_share, memory_share=1.0).flops_per_s,
    )


def answer(
    *,
    tokens: int,
    chosen: int,
    experts: int,
    hot_rows: float,
    cards: tuple[int, ...],
    batches: int,
    seed: int,
    group_rows: tuple[int, ...],
    micro_batches: int,
    **exchange: Any,
) -> Answer:
    bound = bound_of(group_rows=group_rows, **exchange)
    even = (sum(group_rows) / len(group_rows),) * len(group_rows)
    level = bound_of(group_rows=even, **exchange)
    parts = [time_s / micro_batches for time_s in bound.stages_s]
    values = [
        Value("group_skew", float(skew(group_rows)), "fullest group over the mean"),
        Value("dispatch_ms", bound.dispatch_s * 1e3, "ms at least"),
        Value("compute_ms", bound.compute_s * 1e3, "ms, fullest card"),
        Value("combine_ms", bound.combine_s * 1e3, "ms at least"),
        Value("layer_ms", bound.total_s * 1e3, "ms, stages wait for each other"),
        Value("even_layer_ms", level.total_s * 1e3, "ms, with as many rows in even groups"),
        Value("batches_per_s", bound.batches_per_s, "batches/s at most"),
        Value("pipelined_ms", pipelined_s(parts, batches=micro_batches) * 1e3, "ms, stages at the same time"),
        Value("exchange_break_even", break_even_factor(parts, (0, 2), batches=micro_batches), "times slower exchanges"),
        Value("compute_break_even", break_even_factor(parts, (1,), batches=micro_batches), "times slower experts"),
    ]
    rows = one_hot_expert(tokens=tokens, chosen=chosen, experts=experts, hot_rows=hot_rows)
    drawn = random_rows(np.random.default_rng(seed), tokens=tokens, chosen=chosen, experts=experts, batches=batches)
    lines = []
    for many in cards:
        on_cards = card_rows(rows, many)
        chance = float(skew(card_rows(drawn, many)).mean())
        lines.append((many, float(on_cards.max()), float(on_cards.mean()), float(skew(on_cards)), chance))
        values += [
            Value(f"hot_rows_ep{many}", lines[-1][1], "rows on the fullest card"),
            Value(f"hot_skew_ep{many}", lines[-1][3], "fullest card over the mean"),
            Value(f"random_skew_ep{many}", chance, f"fullest card over the mean, {batches} batches"),
        ]
    columns = ("cards", "rows, fullest", "rows, mean", "skew, hot expert", "skew, even routing")
    return Answer(values, [Table(f"{experts} experts, {tokens} tokens, {chosen} each", columns, lines)])


def draw_cards(
    figure: Figure, *, tokens: int, chosen: int, experts: int, hot_rows: float, cards: tuple[int, ...], **_: object
) -> None:
    """Rows of the cards over their mean, the hot expert's apart."""
    rows = one_hot_expert(tokens=tokens, chosen=chosen, experts=experts, hot_rows=hot_rows)
    axes = new_axes(figure, len(cards), title="Rows of each card over the mean", xlabel="card", ylabel="over mean")
    hot = np.zeros(experts)
    hot[0] = hot_rows
    for each, many in zip(axes, cards, strict=True):
        share, hot_share = (card_rows(what, many) / card_rows(rows, many).mean() for what in (rows, hot))
        each.bar(range(many), share - hot_share, bottom=hot_share, label="other experts")
        each.bar(range(many), hot_share, label="hot expert")
        each.axhline(1.0, color="gray", linestyle=":")
        each.set_title(f"{many} cards", loc="right", fontsize="medium")
    axes[-1].legend(loc="upper right")


def draw_skew(
    figure: Figure,
    *,
    tokens: int,
    chosen: int,
    experts: int,
    hot_rows: float,
    batches: int,
    seed: int,
    **_: object,
) -> None:
    """The fullest card over the mean against the size of the group."""
    rows = one_hot_expert(tokens=tokens, chosen=chosen, experts=experts, hot_rows=hot_rows)
    drawn = random_rows(np.random.default_rng(seed), tokens=tokens, chosen=chosen, experts=experts, batches=batches)
    sizes = [each for each in range(1, experts + 1) if experts % each == 0]  # others are uneven by division alone
    axes = new_axes(
        figure, title="Fullest card of an expert-parallel group", xlabel="cards", ylabel="rows over the mean"
    )[0]
    axes.plot(sizes, [float(skew(card_rows(rows, each))) for each in sizes], "o-", label=f"one expert of {hot_rows:g}")
    label = f"even routing, mean of {batches} batches"
    axes.plot(sizes, [float(skew(card_rows(drawn, each)).mean()) for each in sizes], "s-", label=label)
    axes.set_xscale("log", base=2)
    axes.legend()


EXPERT_SKEW = Calculator(
    "expert-skew",
    "uneven cards of an expert-parallel group, and the least time of dispatch, experts and combine",
    INPUTS,
    answer,
    (
        Plot("9-21", "rows of each card for each size of the group", draw_cards),
        Plot("9-22", "the fullest card against the size of the group", draw_skew),
    ),
)
