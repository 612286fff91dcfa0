"""`tfirst calc migration` and `switch`: moving a running replica, and changing how cards share a model."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from estimators.planning.moving import catch_up, copied_bytes, source_bytes, switch
from estimators.roofline import Roofline
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import MOST_SEQUENCES, NamedCard, card, count, model, number, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB = 1e9

MIGRATION_INPUTS = (
    model(),
    card("card", "H20", "card whose running batch is moved"),
    count("batch", 32, "sequences", "that decode there", low=1, high=MOST_SEQUENCES),
    number("context-tokens", 8704, "tokens", "mean context of them", above=True),
    numbers("copy-gb-s", "25,6.25", "GB/s", "link to the target", above=True),
)


def flows_of(model: ModelShape, card: NamedCard, batch: int, context_tokens: float) -> tuple[float, float]:
    """State of the batch, bytes, and what its decode adds a second."""
    roofline = Roofline.of(model, card.card)
    calls_per_s = batch / roofline.decode_step_s([context_tokens] * batch)
    grown = float(roofline.costs.kv_bytes_between(context_tokens, context_tokens + 1))
    return batch * float(roofline.costs.kv_bytes(context_tokens)), calls_per_s * grown


def answer_migration(
    *, model: ModelShape, card: NamedCard, batch: int, context_tokens: float, copy_gb_s: Sequence[float]
) -> Answer:
    state, growth = flows_of(model, card, batch, context_tokens)
    rows, seconds = [], []
    for gb_s in copy_gb_s:
        done = catch_up(state_bytes=state, growth_bytes_per_s=growth, copy_bytes_per_s=gb_s * GB)
        seconds.append(done.seconds if done.seconds < inf else "never")
        rows.append((gb_s, seconds[-1], done.grown_bytes / GB if done.grown_bytes < inf else "-"))
    values = [
        Value("state_gb", state / GB, "GB"),
        Value("growth_gb_s", growth / GB, "GB/s"),
        Value("caught_up_s", seconds, "s, for each link"),
    ]
    return Answer(values, [Table("Copy in the background", ("GB/s", "level after, s", "added meanwhile, GB"), rows)])


def draw_migration(
    figure: Figure, *, model: ModelShape, card: NamedCard, batch: int, context_tokens: float, copy_gb_s: Sequence[float]
) -> None:
    """State at the source and at the target."""
    state, growth = flows_of(model, card, batch, context_tokens)
    ends = [
        catch_up(state_bytes=state, growth_bytes_per_s=growth, copy_bytes_per_s=gb_s * GB).seconds for gb_s in copy_gb_s
    ]
    finite = [one for one in ends if one < inf]
    at_s = np.linspace(0.0, 1.2 * max(finite, default=60.0), 400)
    axes = new_axes(figure, title="A copy that catches up", xlabel="s", ylabel="GB")[0]
    axes.plot(
        at_s,
        [source_bytes(state_bytes=state, growth_bytes_per_s=growth, at_s=float(one)) / GB for one in at_s],
        label="source",
    )
    for gb_s in copy_gb_s:
        copy = [
            copied_bytes(state_bytes=state, growth_bytes_per_s=growth, copy_bytes_per_s=gb_s * GB, at_s=float(one)) / GB
            for one in at_s
        ]
        axes.plot(at_s, copy, linestyle="--", label=f"target over {gb_s:g} GB/s")
    axes.legend()


SWITCH_INPUTS = (
    number("network-gb", 16.4, "GB", "of weights and state over the busiest link"),
    numbers("network-gb-s", "6.25,25", "GB/s", "that link", above=True),
    number("built-gb", 4.7, "GB", "read and written in a card's own memory"),
    number("memory-gb-s", 1020, "GB/s", "that memory", above=True),
    number("prepare-s", 9, "s", "groups, graphs, taking requests again"),
    number("early-share", 0.0, "", "share of the preparation done beforehand", high=1),
)


def answer_switch(
    *,
    network_gb: float,
    network_gb_s: Sequence[float],
    built_gb: float,
    memory_gb_s: float,
    prepare_s: float,
    early_share: float,
) -> Answer:
    ways = [
        switch(
            network_bytes=network_gb * GB,
            network_bytes_per_s=gb_s * GB,
            built_bytes=built_gb * GB,
            memory_bytes_per_s=memory_gb_s * GB,
            prepare_s=prepare_s,
        )
        for gb_s in network_gb_s
    ]
    rows = [
        (gb_s, one.transfer_s, one.build_s, one.serial_s, one.overlapped_s(early_share))
        for gb_s, one in zip(network_gb_s, ways, strict=True)
    ]
    columns = ("GB/s", "transfer, s", "build, s", "one after another, s", f"{early_share:.0%} prepared early, s")
    values = [
        Value("transfer_s", [one.transfer_s for one in ways], "s, for each link"),
        Value("serial_s", [one.serial_s for one in ways], "s, for each link"),
        Value("overlapped_s", [one.overlapped_s(early_share) for one in ways], "s, for each link"),
        Value("least_s", ways[0].build_s + prepare_s, "s with a link of any speed, nothing prepared early"),
    ]
    return Answer(values, [Table("Changing the parallelism", columns, rows)])


MOVING = (
    Calculator(
        "migration",
        "copy a running batch to another card while it grows",
        MIGRATION_INPUTS,
        answer_migration,
        (Plot("9-43", "state at source and target", draw_migration),),
    ),
    Calculator("switch", "change how cards share a model", SWITCH_INPUTS, answer_switch),
)
