"""`tfirst calc pools`: the same cards colocated, with chunked prefill, and split into prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from estimators.planning.pools import (
    Group,
    Split,
    Splits,
    Work,
    absorbed_call_flops,
    all_splits,
    chunked_prefill,
    colocated_per_s,
    handoffs_per_s,
    piggyback_per_s,
    resident_bytes,
    spare_call_s,
    stage_times,
)
from estimators.shape_costs import costs_of
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import CardsOfAKind, cards, count, model, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2.0**30

INPUTS = (
    model(),
    cards("cards", "4xA100,4xH20", "cards"),
    number("compute-share", 0.5, "", "share of the peak arithmetic a prefill reaches", high=1, above=True),
    number("memory-share", 0.5, "", "share of the bandwidth a decode step reaches", high=1, above=True),
    count("new-tokens", 8192, "tokens", "prompt tokens to compute", low=1),
    count("cached-tokens", 0, "tokens", "prompt tokens the prefill finds cached", low=0),
    count("output-tokens", 1025, "tokens", "answer", low=1),
    count("batch", 32, "sequences", "in a decode step", low=1),
    number("link-gb-s", 25, "GB/s", "link from prefill to decode, 10^9 bytes", above=True),
    model("qwen3-8b", "state-model", "whose state is handed over"),
    number("arrival-rps", 3.5, "requests/s", "load the pools have to carry", above=True),
)


def groups_of(
    model: ModelShape,
    cards: Sequence[CardsOfAKind],
    work: Work,
    *,
    compute_share: float,
    memory_share: float,
    extra_call_flops: float = 0.0,
) -> list[Group]:
    """What the request costs on each kind of card."""
    groups = []
    for one in cards:
        card = one.kind.reaching(compute_share=compute_share, memory_share=memory_share)
        extra_call_s = extra_call_flops / card.flops_per_s
        groups.append(Group(one.count, stage_times(model, card, work, extra_call_s=extra_call_s)))
    return groups


def answer(
    *,
    model: ModelShape,
    cards: Sequence[CardsOfAKind],
    compute_share: float,
    memory_share: float,
    new_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    batch: int,
    link_gb_s: float,
    state_model: ModelShape,
    arrival_rps: float,
) -> Answer:
    work = Work(new_tokens=new_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens, batch=batch)
    shares = {"compute_share": compute_share, "memory_share": memory_share}
    groups = groups_of(model, cards, work, **shares)
    state_bytes = costs_of(state_model).kv_bytes(float(work.prompt_tokens))
    splits = all_splits(groups, link_per_s=handoffs_per_s(link_bytes_per_s=link_gb_s * 1e9, state_bytes=state_bytes))
    best = splits.at(splits.best)
    values = [
        Value("colocated_per_s", colocated_per_s(groups), "requests/s"),
        Value("piggyback_per_s", piggyback_per_s(groups), "requests/s, at most"),
        Value("split_per_s", best.per_s, "requests/s"),
        Value("split_prefill_cards", list(best.prefill_cards), "cards of each kind"),
        Value("split_limited_by", best.limited_by),
        Value("handoff_gib", state_bytes / GIB, "GiB"),
        Value("link_needed_gb_s", _needed_gb_s(best, arrival_rps, state_bytes), "GB/s at the arrival rate"),
        Value("splits_per_s", splits.per_s.tolist(), "requests/s, indexed by cards of each kind for prefill"),
    ]
    tables = [_cards_table(cards, groups, new_tokens), _splits_table(cards, splits)]
    notes = list(_notes(model, cards, work, groups, max(best.per_s, piggyback_per_s(groups)), arrival_rps))
    extra_flops = absorbed_call_flops(state_model)
    if extra_flops:
        slowed = groups_of(model, cards, work, **shares, extra_call_flops=extra_flops)
        values += _absorbed(cards, groups, slowed, best, extra_flops, arrival_rps, work)
    return Answer(values, tables, notes)


def _needed_gb_s(best: Split, arrival_rps: float, state_bytes: float) -> float:
    return 0.0 if best.link_per_s == inf else arrival_rps * state_bytes / 1e9


def _absorbed(
    cards: Sequence[CardsOfAKind],
    groups: Sequence[Group],
    slowed: Sequence[Group],
    best: Split,
    extra_flops: int,
    arrival_rps: float,
    work: Work,
) -> list[Value]:
    """What reading the latent state costs the decode pool, if reads do not hide it."""
    left = [one.count - given for one, given in zip(cards, best.prefill_cards, strict=True)]
    decode = [Group(many, group.times) for many, group in zip(left, slowed, strict=True) if many]
    values = [Value("absorbed_gflop_a_call", extra_flops / 1e9, "GFLOP")]
    if not decode or not work.calls:
        return values
    slowed_per_s = sum(group.count / group.times.decode_s for group in decode)
    values.append(Value("decode_with_absorbed_per_s", slowed_per_s, "requests/s"))
    plain = [Group(many, group.times) for many, group in zip(left, groups, strict=True) if many]
    if len(plain) == 1:
        spare_s = spare_call_s(plain, arrival_rps=arrival_rps, calls=work.calls)
        values.append(Value("spare_us_a_call", spare_s * 1e6, "us until the decode pool no longer keeps up"))
    return values


def _cards_table(cards: Sequence[CardsOfAKind], groups: Sequence[Group], new_tokens: int) -> Table:
    rows = []
    for one, group in zip(cards, groups, strict=True):
        times = group.times
        rows.append(
            (
                f"{one.count} x {one.kind.name}",
                times.prefill_s,
                times.decode_s,
                times.step_s * 1e3,
                times.idle_tokens,
                chunked_prefill(times, new_tokens=new_tokens).first_token_s if times.idle_tokens >= 1 else "-",
            )
        )
    columns = (
        "cards",
        "prefill, GPU s",
        "decode, GPU s",
        "decode step, ms",
        "prefill tokens beside a step",
        "first token in chunks, s",
    )
    return Table("One request", columns, rows)


def _splits_table(cards: Sequence[CardsOfAKind], splits: Splits, shown: int = 8) -> Table:
    """The best few; all of them are in --json."""
    rates = splits.per_s
    behind = np.minimum(splits.prefill_per_s, splits.decode_per_s)  # the link
    order = np.lexsort((-behind.ravel(), -rates.ravel()))[:shown]
    best = [splits.at([int(one) for one in np.unravel_index(int(flat), rates.shape)]) for flat in order]
    rows = [
        (
            " + ".join(
                f"{given} {one.kind.name}" for given, one in zip(split.prefill_cards, cards, strict=True) if given
            )
            or "none",
            split.prefill_per_s,
            split.decode_per_s,
            split.link_per_s,
            split.per_s,
            split.limited_by,
        )
        for split in best
    ]
    title = f"Best of {rates.size} splits, requests/s"
    return Table(title, ("for prefill", "prefill", "decode", "link", "together", "limited by"), rows)


def _notes(
    model: ModelShape,
    cards: Sequence[CardsOfAKind],
    work: Work,
    groups: Sequence[Group],
    most_per_s: float,
    arrival_rps: float,
) -> list[str]:
    needed = resident_bytes(model, work)
    notes = [
        f"A batch of {work.batch} does not fit {one.kind.name}: it needs {needed / GIB:.1f} GiB with weights"
        f" and one arriving state, of {one.kind.card.memory_gib:g}."
        for one in cards
        if needed > one.kind.card.memory_gib * GIB
    ]
    if most_per_s < arrival_rps:
        notes.append(f"No way to use these cards keeps up with {arrival_rps:g} requests/s.")
    if not work.calls:
        notes.append("An answer of one token needs no decode pool and no handoff.")
    return notes


def draw(
    figure: Figure,
    *,
    model: ModelShape,
    cards: Sequence[CardsOfAKind],
    compute_share: float,
    memory_share: float,
    new_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    batch: int,
    link_gb_s: float,
    state_model: ModelShape,
    arrival_rps: float,
) -> None:
    """A map of all splits of two kinds of cards, or bars for one kind."""
    if len(cards) > 2:
        raise ValueError("--plot draws one or two kinds of cards")
    work = Work(new_tokens=new_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens, batch=batch)
    groups = groups_of(model, cards, work, compute_share=compute_share, memory_share=memory_share)
    state_bytes = costs_of(state_model).kv_bytes(float(work.prompt_tokens))
    splits = all_splits(groups, link_per_s=handoffs_per_s(link_bytes_per_s=link_gb_s * 1e9, state_bytes=state_bytes))
    rates, first = splits.per_s, cards[0].kind.name
    title = f"Requests/s of each split, best {rates.max():.2f}"
    if len(cards) == 1:
        axes = new_axes(figure, title=title, xlabel=f"{first} for prefill", ylabel="requests/s")[0]
        axes.bar(range(len(rates)), rates)
        axes.axhline(arrival_rps, linestyle="--", label="arrivals")
        axes.legend()
        return
    axes = new_axes(figure, title=title, xlabel=f"{first} for prefill", ylabel=f"{cards[1].kind.name} for prefill")[0]
    axes.grid(visible=False)
    image = axes.imshow(rates.T, origin="lower", cmap="YlGn", aspect="auto", vmin=0, vmax=1.6 * rates.max())
    figure.colorbar(image, ax=axes, label="requests/s")
    axes.set_xticks(range(rates.shape[0]))
    axes.set_yticks(range(rates.shape[1]))
    for x, y in product(range(rates.shape[0]), range(rates.shape[1])):
        axes.text(x, y, f"{rates[x, y]:.2f}", ha="center", va="center")
    x, y = splits.best
    axes.plot(
        [x - 0.49, x + 0.49, x + 0.49, x - 0.49, x - 0.49], [y - 0.48, y - 0.48, y + 0.48, y + 0.48, y - 0.48], "k"
    )


POOLS = Calculator(
    "pools",
    "cards colocated, with chunked prefill, and split into prefill and decode",
    INPUTS,
    answer,
    (Plot("9-10", "requests/s of every split", draw),),
)
