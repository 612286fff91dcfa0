"""`tfirst calc pools`: the same cards colocated, with chunked prefill, and split into prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from estimators.planning.deployments import mean_times
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
    per_s,
    piggyback_per_s,
    resident_bytes,
    spare_call_s,
    stage_times,
)
from estimators.shape_costs import costs_of
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import MOST_SEQUENCES, CardsOfAKind, cards, count, counts, model, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2.0**30
MOST_DRAWN = 33  # of one kind, splits that can still be read

INPUTS = (
    model(),
    cards("cards", "4xA100,4xH20", "cards"),
    number("compute-share", 0.5, "", "share of the peak arithmetic a prefill reaches", high=1, above=True),
    number("memory-share", 0.5, "", "share of the bandwidth a decode step reaches", high=1, above=True),
    count("new-tokens", 8192, "tokens", "prompt tokens to compute", low=1),
    count("cached-tokens", 0, "tokens", "prompt tokens the prefill finds cached", low=0),
    counts("output-tokens", "1025", "tokens", "answer; several lengths are equally frequent", low=1),
    count("batch", 32, "sequences", "in a decode step", low=1, high=MOST_SEQUENCES),
    number("link-gb-s", 25, "GB/s", "link from prefill to decode, 10^9 bytes", above=True),
    model("qwen3-8b", "state-model", "whose state is handed over"),
    number("arrival-rps", 3.5, "requests/s", "load the pools have to carry", above=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The inputs as they are typed, and what follows from them at once."""

    model: ModelShape
    cards: Sequence[CardsOfAKind]
    compute_share: float
    memory_share: float
    new_tokens: int
    cached_tokens: int
    output_tokens: tuple[int, ...]
    batch: int
    link_gb_s: float
    state_model: ModelShape
    arrival_rps: float

    @property
    def works(self) -> list[Work]:
        return [
            Work(new_tokens=self.new_tokens, cached_tokens=self.cached_tokens, output_tokens=each, batch=self.batch)
            for each in self.output_tokens
        ]

    @property
    def mean_calls(self) -> float:
        return sum(work.calls for work in self.works) / len(self.works)

    @property
    def state_bytes(self) -> float:
        """Of one handoff."""
        return costs_of(self.state_model).kv_bytes(float(self.new_tokens + self.cached_tokens))

    @property
    def handed_over(self) -> float:
        """Share of the requests that decode at all."""
        return sum(work.calls > 0 for work in self.works) / len(self.works)

    def groups(self, extra_call_flops: float = 0.0) -> list[Group]:
        """What the mean request costs on each kind of card."""
        groups = []
        for one in self.cards:
            card = one.kind.reaching(compute_share=self.compute_share, memory_share=self.memory_share)
            extra_s = extra_call_flops / card.flops_per_s
            times = [stage_times(self.model, card, work, extra_call_s=extra_s) for work in self.works]
            groups.append(Group(one.count, mean_times(times, [1 / len(times)] * len(times))))
        return groups

    def splits(self) -> Splits:
        link_per_s = inf
        if self.handed_over:
            link_per_s = handoffs_per_s(
                link_bytes_per_s=self.link_gb_s * 1e9, state_bytes=self.state_bytes, moves=self.handed_over
            )
        return all_splits(self.groups(), link_per_s=link_per_s)


def answer(**inputs: Any) -> Answer:
    asked = Question(**inputs)
    groups, splits = asked.groups(), asked.splits()
    best = splits.at(splits.best)
    needed_gb_s = asked.arrival_rps * asked.handed_over * asked.state_bytes / 1e9
    values = [
        Value("colocated_per_s", colocated_per_s(groups), "requests/s"),
        Value("piggyback_per_s", piggyback_per_s(groups), "requests/s, at most"),
        Value("split_per_s", best.per_s, "requests/s"),
        Value("split_prefill_cards", list(best.prefill_cards), "cards of each kind"),
        Value("split_limited_by", best.limited_by),
        Value("handoff_gib", asked.state_bytes / GIB, "GiB"),
        Value("link_needed_gb_s", needed_gb_s, "GB/s at the arrival rate"),
        Value("splits_per_s", splits.per_s.tolist(), "requests/s, indexed by cards of each kind for prefill"),
        *_absorbed(asked, best),
    ]
    return Answer(values, [_cards_table(asked, groups), _splits_table(asked.cards, splits)], list(_notes(asked, best)))


def _absorbed(asked: Question, best: Split) -> list[Value]:
    """What reading the latent state costs the decode pool, if reads do not hide it; nothing for other state."""
    extra_flops = absorbed_call_flops(asked.state_model)
    if not extra_flops:
        return []
    values = [Value("absorbed_gflop_a_call", extra_flops / 1e9, "GFLOP")]
    decode = [
        (one.count - given, plain.times, slowed.times)
        for one, given, plain, slowed in zip(
            asked.cards, best.prefill_cards, asked.groups(), asked.groups(extra_flops), strict=True
        )
        if one.count > given
    ]
    if not decode or not asked.mean_calls:
        return values
    slowed_per_s = per_s([many for many, _, _ in decode], [slowed.decode_s for _, _, slowed in decode])
    values.append(Value("decode_with_absorbed_per_s", slowed_per_s, "requests/s"))
    if len(decode) == 1:
        pool = [Group(decode[0][0], decode[0][1])]
        spare_s = spare_call_s(pool, arrival_rps=asked.arrival_rps, calls=asked.mean_calls)
        values.append(Value("spare_us_a_call", spare_s * 1e6, "us until the decode pool no longer keeps up"))
    return values


def _cards_table(asked: Question, groups: Sequence[Group]) -> Table:
    rows = [
        (
            f"{one.count} x {one.kind.name}",
            group.times.prefill_s,
            group.times.decode_s,
            group.times.step_s * 1e3,
            group.times.idle_tokens,
            chunked_prefill(group.times, new_tokens=asked.new_tokens).first_token_s
            if group.times.idle_tokens >= 1
            else "-",
        )
        for one, group in zip(asked.cards, groups, strict=True)
    ]
    columns = ("cards", "prefill, GPU s", "decode, GPU s", "step, ms", "tokens beside a step", "T_first in chunks, s")
    return Table("The mean request", columns, rows)


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


def _notes(asked: Question, best: Split) -> Iterator[str]:
    needed = max(resident_bytes(asked.model, work) for work in asked.works)
    for one in asked.cards:
        if needed > one.kind.card.memory_gib * GIB:
            yield (
                f"A batch of {asked.batch} does not fit {one.kind.name}: it needs {needed / GIB:.1f} GiB with weights"
                f" and one arriving state, of {one.kind.card.memory_gib:g}."
            )
    if max(best.per_s, piggyback_per_s(asked.groups())) < asked.arrival_rps:
        yield f"No way to use these cards keeps up with {asked.arrival_rps:g} requests/s."
    if not asked.mean_calls:
        yield "An answer of one token needs no decode pool and no handoff."


def draw(figure: Figure, **inputs: Any) -> None:
    """A map of all splits of two kinds of cards, or bars for one kind."""
    asked = Question(**inputs)
    splits = asked.splits()
    rates, names = splits.per_s, [one.kind.name for one in asked.cards]
    title = f"Requests/s of each split, best {rates.max():.2f}"
    if len(names) == 1:
        axes = new_axes(figure, title=title, xlabel=f"{names[0]} for prefill", ylabel="requests/s")[0]
        axes.bar(range(len(rates)), rates)
        axes.axhline(asked.arrival_rps, linestyle="--", label="arrivals")
        axes.legend()
        return
    if len(names) > 2 or max(rates.shape) > MOST_DRAWN:
        raise ValueError(f"--plot draws one or two kinds of cards, fewer than {MOST_DRAWN} of each")
    axes = new_axes(figure, title=title, xlabel=f"{names[0]} for prefill", ylabel=f"{names[1]} for prefill")[0]
    axes.grid(visible=False)
    image = axes.imshow(rates.T, origin="lower", cmap="YlGn", aspect="auto", vmin=0, vmax=1.6 * rates.max())
    figure.colorbar(image, ax=axes, label="requests/s")
    axes.set_xticks(range(rates.shape[0]))
    axes.set_yticks(range(rates.shape[1]))
    for x, y in product(range(rates.shape[0]), range(rates.shape[1])):
        axes.text(x, y, f"{rates[x, y]:.2f}", ha="center", va="center")
    x, y = splits.best
    left, right, low, high = x - 0.49, x + 0.49, y - 0.48, y + 0.48
    axes.plot([left, right, right, left, left], [low, low, high, high, low], "k")  # frames the best


POOLS = Calculator(
    "pools",
    "cards colocated, with chunked prefill, and split into prefill and decode",
    INPUTS,
    answer,
    (Plot("9-10", "requests/s of every split", draw),),
)
