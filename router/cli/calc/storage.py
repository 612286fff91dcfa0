"""`tfirst calc tiers`, `reuse`, `endurance`, `read-ahead`: where KV state is kept, and whether that pays."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from estimators.planning.preload import tokens_that_hide
from estimators.planning.storage import (
    Endurance,
    Saving,
    StorageTier,
    filled_tiers,
    hold_s,
    kv_bytes_per_s,
    needed_bytes,
    rate_to_repay_bytes_per_s,
    read_ahead,
    remote_reads_bytes_per_s,
    saving_over,
)
from estimators.roofline import Roofline
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Input, Plot, Table, Value, new_axes
from router.cli.calc.inputs import NamedCard, card, count, model, number, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB, GIB = 1e9, 2.0**30
DAY_S = 86_400.0

PROMPT: tuple[Input, ...] = (
    model(),
    card("card", "A100", "card that computes"),
    count("prompt-tokens", 8192, "tokens", "prompt whose state is kept", low=1),
)
NEW_STATE = number("new-share", 1.0, "", "share of prompt tokens that is new: 0.5 with half of them hit", high=1)


def roofline_of(model: ModelShape, card: NamedCard) -> Roofline:
    return Roofline.of(model, card.card)


def new_bytes_per_s(model: ModelShape, card: NamedCard, prompt_tokens: int, new_share: float) -> float:
    """State made in continuous prefill, of which only that share is new."""
    return new_share * kv_bytes_per_s(roofline_of(model, card), prompt_tokens=prompt_tokens)


def state_bytes_of(model: ModelShape, card: NamedCard, tokens: int) -> float:
    return float(roofline_of(model, card).costs.kv_bytes(float(tokens)))


# Tiers

TIER_INPUTS = (
    *PROMPT,
    NEW_STATE,
    number("hbm-gb", 63.6, "GB", "HBM left for state beside the weights", above=True),
    number("host-gib", 256, "GiB", "host memory of one card", above=True),
    number("disk-gb", 3840, "GB", "disk of one card", above=True),
    number("host-gb-s", 25, "GB/s", "host memory to card", above=True),
    number("disk-gb-s", 7.1, "GB/s", "disk, read", above=True),
    number("remote-gb-s", 25, "GB/s", "remote pool to host memory, then host memory to card", above=True),
    numbers("reuse-s", "10,600", "s", "times between two uses", above=True),
    count("tokens-in-store", 50_000 * 512, "tokens", "what a store of blocks holds", low=1),
)


def tiers_of(
    *, hbm_gb: float, host_gib: float, disk_gb: float, host_gb_s: float, disk_gb_s: float, remote_gb_s: float
) -> list[StorageTier]:
    """Nearest first; the disk is read by the card directly, the pool by way of host memory."""
    return [
        StorageTier("HBM", hbm_gb * GB),
        StorageTier("host memory", host_gib * GIB, (host_gb_s * GB,)),
        StorageTier("disk", disk_gb * GB, (disk_gb_s * GB,)),
        StorageTier("remote pool", inf, (remote_gb_s * GB, host_gb_s * GB)),
    ]


def answer_tiers(
    *,
    model: ModelShape,
    card: NamedCard,
    prompt_tokens: int,
    new_share: float,
    reuse_s: Sequence[float],
    tokens_in_store: int,
    **sizes: float,
) -> Answer:
    roofline = roofline_of(model, card)
    rate = new_bytes_per_s(model, card, prompt_tokens, new_share)
    state = state_bytes_of(model, card, prompt_tokens)
    compute_s = roofline.prefill_s(new_tokens=prompt_tokens, cached_tokens=0)
    tiers = tiers_of(**sizes)
    values = [
        Value("new_state_gb_s", rate / GB, "GB/s"),
        Value("state_gib", state / GIB, "GiB"),
        Value("compute_ms", compute_s * 1e3, "ms"),
        Value("store_tb", state_bytes_of(model, card, tokens_in_store) / 1e12, "TB"),
    ]
    rows = []
    for tier in tiers:
        name, read_s = tier.name.split()[0].lower(), tier.read_s(state)
        keeps_s = hold_s(capacity_bytes=tier.capacity_bytes, kv_bytes_per_s=rate)
        rows.append(
            (
                tier.name,
                _or_dash(tier.capacity_bytes / GB),
                read_s * 1e3,
                _or_dash(keeps_s),
                _hides(roofline, read_s, prompt_tokens),
            )
        )
        values.append(Value(f"{name}_read_ms", read_s * 1e3, "ms"))
        if tier.capacity_bytes < inf:
            values.append(Value(f"{name}_hold_s", keeps_s if keeps_s < inf else "for ever", "s"))
            values.append(Value(f"{name}_states", int(tier.capacity_bytes // state), "states"))
    columns = ("tier", "capacity, GB", "read the state, ms", "holds the last, s", "new tokens that hide the read")
    tables = [Table("One card's part of each tier", columns, rows), _reuse_table(tiers, reuse_s, rate)]
    values += [
        Value(f"needed_gb_{after:g}s", needed_bytes(reuse_after_s=after, kv_bytes_per_s=rate) / GB, "GB")
        for after in reuse_s
    ]
    return Answer(values, tables)


def _hides(roofline: Roofline, read_s: float, prompt_tokens: int) -> int:
    """New tokens after the prompt whose computation takes as long as the read."""
    if read_s == 0:
        return 0
    return tokens_that_hide(read_s, lambda tokens: roofline.prefill_s(new_tokens=tokens, cached_tokens=prompt_tokens))


def _reuse_table(tiers: Sequence[StorageTier], reuse_s: Sequence[float], rate: float) -> Table:
    rows = []
    for after in reuse_s:
        wanted = needed_bytes(reuse_after_s=after, kv_bytes_per_s=rate)
        filled = filled_tiers(tiers, wanted_bytes=wanted)
        used = " + ".join(tier.name for tier, part in zip(tiers, filled, strict=True) if part > 0) or "none"
        rows.append((after, wanted / GB, used))
    return Table("To hit whatever is used again within", ("s", "needed, GB", "which fills"), rows)


def _or_dash(value: float) -> float | str:
    return value if value < inf else "-"


def draw_tiers(
    figure: Figure,
    *,
    model: ModelShape,
    card: NamedCard,
    prompt_tokens: int,
    new_share: float,
    reuse_s: Sequence[float],
    tokens_in_store: int,
    **sizes: float,
) -> None:
    """Capacity needed against the time between two uses, with what each tier has."""
    rate = new_bytes_per_s(model, card, prompt_tokens, new_share)
    if rate == 0:
        raise ValueError("without new state every tier holds for ever: --new-share is 0")
    axes = new_axes(figure, title="Capacity for reuse: C = r T", xlabel="time between two uses, s", ylabel="GB")[0]
    after_s = np.geomspace(1.0, 1e4, 200)
    axes.loglog(after_s, after_s * rate / GB, label=f"r = {rate / GB:.2f} GB/s")
    for tier in tiers_of(**sizes):
        if tier.capacity_bytes < inf:
            axes.axhline(tier.capacity_bytes / GB, linestyle="--", color="grey")
            axes.text(1.1, tier.capacity_bytes / GB * 1.05, tier.name)
    for after in reuse_s:
        axes.axvline(after, linestyle=":", color="tab:orange")
    axes.legend(loc="lower right")


# Writing once, reading later

REUSE_INPUTS = (
    *PROMPT,
    number("write-gb-s", 25, "GB/s", "where it is written", above=True),
    number("read-gb-s", 25, "GB/s", "where it is read", above=True),
    count("reuses", 1, "times", "it is used again", low=1),
    count("decode-steps", 100, "steps", "that read it afresh, if it never becomes local", low=0),
    number("hold-s", 10, "s", "it stays local between two uses"),
)


def answer_reuse(
    *,
    model: ModelShape,
    card: NamedCard,
    prompt_tokens: int,
    write_gb_s: float,
    read_gb_s: float,
    reuses: int,
    decode_steps: int,
    hold_s: float,
) -> Answer:
    state = state_bytes_of(model, card, prompt_tokens)
    compute_s = roofline_of(model, card).prefill_s(new_tokens=prompt_tokens, cached_tokens=0)
    saving = Saving(state / (write_gb_s * GB), state / (read_gb_s * GB), compute_s)
    fewest = saving.reuses_to_repay
    each_step = remote_reads_bytes_per_s(state_bytes=state, reads=decode_steps, within_s=1.0)
    values = [
        Value("write_ms", saving.write_s * 1e3, "ms"),
        Value("read_ms", saving.read_s * 1e3, "ms"),
        Value("compute_ms", saving.compute_s * 1e3, "ms"),
        Value("write_and_read_ms", (saving.write_s + reuses * saving.read_s) * 1e3, "ms"),
        Value("saved_ms", saving.saved_s(reuses) * 1e3, "ms"),
        Value("reuses_to_repay", int(fewest) if fewest < inf else "never", ""),
        Value(
            "link_to_repay_gb_s",
            rate_to_repay_bytes_per_s(size_bytes=state, compute_s=compute_s, reuses=reuses) / GB,
            "GB/s, one link both ways",
        ),
        Value("link_never_gb_s", state / compute_s / GB, "GB/s: below it no reuse repays"),
        Value("read_each_step_s", decode_steps * saving.read_s, "s of the link"),
        Value("read_each_step_gb_s", each_step / GB, "GB/s if within one second"),
        Value("held_gib_s", state / GIB * hold_s, "GiB s"),
    ]
    rows = []
    for gb_s in (1.25, 1.5, 2.0, 3.0, 6.25, 12.5, 25.0, 50.0):
        over = saving_over(size_bytes=state, link_bytes_per_s=gb_s * GB, compute_s=compute_s)
        rows.append(
            (gb_s, (over.write_s + over.read_s) * 1e3, over.reuses_to_repay if over.reuses_to_repay < inf else "never")
        )
    table = Table("Over one link both ways", ("GB/s", "write + one read, ms", "reuses to repay"), rows)
    return Answer(values, [table])


# A disk's life

ENDURANCE_INPUTS = (
    *PROMPT,
    NEW_STATE,
    number("disk-gb", 3840, "GB", "capacity", above=True),
    number("writes-per-day", 1, "", "whole capacity, as warranted", above=True),
    number("years", 5, "years", "of warranty", above=True),
)


def answer_endurance(
    *,
    model: ModelShape,
    card: NamedCard,
    prompt_tokens: int,
    new_share: float,
    disk_gb: float,
    writes_per_day: float,
    years: float,
) -> Answer:
    rate = new_bytes_per_s(model, card, prompt_tokens, new_share)
    if rate == 0:
        raise ValueError("without new state nothing is written: --new-share is 0")
    disk = Endurance(disk_gb * GB, writes_per_day, years)
    share = disk.admitted_share(rate)
    return Answer(
        [
            Value("new_state_gb_s", rate / GB, "GB/s"),
            Value("budget_mb_s", disk.bytes_per_s / 1e6, "MB/s"),
            Value("over_budget", rate / disk.bytes_per_s, "times, if all is written"),
            Value("admitted_percent", 100 * share, "% of new state in the long run"),
            Value("worn_out_after_days", disk.worn_out_after_days(rate), "days, if all is written"),
            Value(
                "holds_days",
                hold_s(capacity_bytes=disk.capacity_bytes, kv_bytes_per_s=rate * share) / DAY_S,
                "days of what is admitted",
            ),
        ]
    )


# Reading ahead by the queue

READ_AHEAD_INPUTS = (
    *PROMPT,
    number("host-gib", 256, "GiB", "host memory for states read ahead", above=True),
    number("disk-gb-s", 7.1, "GB/s", "disk, read", above=True),
    number("queue-s", 0.17, "s", "a request's wait"),
)


def answer_read_ahead(
    *, model: ModelShape, card: NamedCard, prompt_tokens: int, host_gib: float, disk_gb_s: float, queue_s: float
) -> Answer:
    state = state_bytes_of(model, card, prompt_tokens)
    read_s = state / (disk_gb_s * GB)
    ahead = read_ahead(host_bytes=host_gib * GIB, state_bytes=state, read_s=read_s, queue_s=queue_s)
    return Answer(
        [
            Value("read_ms", read_s * 1e3, "ms from disk to host memory"),
            Value("depth", ahead.depth, "requests at the head of the queue"),
            Value("hidden_ms", ahead.hidden_s * 1e3, "ms"),
            Value("exposed_ms", ahead.exposed_s * 1e3, "ms"),
        ]
    )


STORAGE = (
    Calculator(
        "tiers",
        "how long each storage tier holds KV state, and how long it takes to read",
        TIER_INPUTS,
        answer_tiers,
        (Plot("9-30", "capacity needed by the time between two uses", draw_tiers),),
    ),
    Calculator("reuse", "write a prefix's state once and read it, or compute it again", REUSE_INPUTS, answer_reuse),
    Calculator("endurance", "how much new state a disk may take", ENDURANCE_INPUTS, answer_endurance),
    Calculator("read-ahead", "read state from disk while its request queues", READ_AHEAD_INPUTS, answer_read_ahead),
)
