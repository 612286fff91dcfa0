"""`tfirst calc experts`: routed experts on the host's processor or on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estimators.planning.expert_placement import (
    Device,
    Expert,
    Placement,
    expert_of,
    resident_bytes,
    residents_that_fit,
)
from estimators.shape_parts import active_experts
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import NamedCard, card, count, counts, model, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB, GIB = 2.0**20, 2.0**30

INPUTS = (
    model("qwen3-235b"),
    number("cpu-tflops", 1.8, "TFLOP/s", "what the processor's kernel sustains: 1.8 AVX-512, 21.3 AMX", above=True),
    number("cpu-gb-s", 220, "GB/s", "host memory within a socket", above=True),
    number("cross-socket-gb-s", 125, "GB/s", "host memory of the other socket", above=True),
    card("gpu", "A100-40GB", "card"),
    number("gpu-share", 0.5, "", "share of both peaks of the card that is reached", high=1, above=True),
    number("link-gb-s", 25, "GB/s", "between host and card, 10^9 bytes", above=True),
    number("start-us", 5, "us", "start of one transfer"),
    number("weight-bytes", 2, "bytes", "of one weight of an expert", above=True),
    count("experts", 8, "experts", "that run one after another", low=1),
    counts("rows", "1,128", "rows", "of each of them, several cases", low=1),
    count("batch-tokens", 64, "tokens", "in a batch that routers spread evenly", low=1),
    count("resident", 32, "experts", "kept on the card in every layer"),
    number("room-gib", 74.5, "GiB", "on the card for resident experts"),
)


def placement_of(
    *,
    cpu_tflops: float,
    memory_gb_s: float,
    gpu: NamedCard,
    gpu_share: float,
    link_gb_s: float,
    start_us: float,
) -> Placement:
    reached = gpu.reaching(compute_share=gpu_share, memory_share=gpu_share)
    return Placement(
        cpu=Device(flops_per_s=cpu_tflops * 1e12, bytes_per_s=memory_gb_s * 1e9),
        gpu=Device(flops_per_s=reached.flops_per_s, bytes_per_s=reached.bytes_per_s),
        link_bytes_per_s=link_gb_s * 1e9,
        start_s=start_us * 1e-6,
    )


def answer(
    *,
    model: ModelShape,
    cpu_tflops: float,
    cpu_gb_s: float,
    cross_socket_gb_s: float,
    gpu: NamedCard,
    gpu_share: float,
    link_gb_s: float,
    start_us: float,
    weight_bytes: float,
    experts: int,
    rows: tuple[int, ...],
    batch_tokens: int,
    resident: int,
    room_gib: float,
) -> Answer:
    expert = expert_of(model, weight_bytes_per_value=weight_bytes)
    near, far = (
        placement_of(
            cpu_tflops=cpu_tflops,
            memory_gb_s=memory_gb_s,
            gpu=gpu,
            gpu_share=gpu_share,
            link_gb_s=link_gb_s,
            start_us=start_us,
        )
        for memory_gb_s in (cpu_gb_s, cross_socket_gb_s)
    )
    wins, far_wins = near.gpu_wins_from(expert), far.gpu_wins_from(expert)
    values = [
        Value("expert_mib", expert.weight_bytes / MIB, "MiB"),
        Value("gpu_wins_from_rows", _or_never(wins), "rows of each expert"),
        Value("gpu_wins_from_rows_cross_socket", _or_never(far_wins), "rows of each expert"),
        Value("cpu_compute_bound_rows", near.cpu.compute_bound_rows(expert), "rows"),
        Value("cpu_compute_bound_rows_cross_socket", far.cpu.compute_bound_rows(expert), "rows"),
        *_batch_values(model, expert, near, batch_tokens),
        *_resident_values(model, resident, room_gib),
    ]
    return Answer(values, [_rows_table(expert, near, far, experts, rows)])


def _batch_values(model: ModelShape, expert: Expert, near: Placement, batch_tokens: int) -> list[Value]:
    """One layer of a batch whose tokens choose independently."""
    assert model.experts is not None
    kinds = model.experts
    active = active_experts(count=kinds.count, chosen=kinds.chosen, tokens=batch_tokens)
    rows = batch_tokens * kinds.chosen / active
    on_cpu_s, on_gpu_s = active * near.on_cpu(expert, rows).total_s, active * near.on_gpu(expert, rows).total_s
    return [
        Value("active_experts", active, "experts a batch touches in a layer"),
        Value("rows_of_each", rows, "rows"),
        Value("layer_read_gib", active * expert.weight_bytes / GIB, "GiB"),
        Value("layer_gflop", batch_tokens * kinds.chosen * expert.row_flops / 1e9, "GFLOP"),
        Value("layer_read_ms", active * expert.weight_bytes / near.cpu.bytes_per_s * 1e3, "ms from host memory"),
        Value("layer_on_cpu_ms", on_cpu_s * 1e3, "ms"),
        Value("layer_on_gpu_ms", on_gpu_s * 1e3, "ms, every expert moved"),
    ]


def _resident_values(model: ModelShape, resident: int, room_gib: float) -> list[Value]:
    """Residents stay in the model's own format: that is what the card holds."""
    return [
        Value("resident_gib", resident_bytes(model, per_layer=resident) / GIB, "GiB in all layers"),
        Value("residents_that_fit", residents_that_fit(model, room_bytes=room_gib * GIB), "experts of every layer"),
    ]


def _rows_table(expert: Expert, near: Placement, far: Placement, experts: int, rows: tuple[int, ...]) -> Table:
    lines = []
    for each in rows:
        cpu, gpu = near.on_cpu(expert, each), near.on_gpu(expert, each)
        lines.append(
            (
                each,
                experts * cpu.total_s * 1e3,
                experts * gpu.total_s * 1e3,
                "CPU" if cpu.total_s <= gpu.total_s else "GPU",
                experts * cpu.compute_s * 1e3,
                experts * cpu.read_s * 1e3,
                experts * far.on_cpu(expert, each).read_s * 1e3,
                experts * far.on_cpu(expert, each).total_s * 1e3,
            )
        )
    columns = ("rows", "CPU, ms", "GPU, ms", "faster", "compute", "read", "read far", "CPU far, ms")
    return Table(f"{experts} experts one after another", columns, lines)


def _or_never(rows: int | None) -> int | str:
    return "never" if rows is None else rows


def draw(
    figure: Figure,
    *,
    model: ModelShape,
    cpu_tflops: float,
    cpu_gb_s: float,
    gpu: NamedCard,
    gpu_share: float,
    link_gb_s: float,
    start_us: float,
    weight_bytes: float,
    experts: int,
    **_: object,
) -> None:
    """Both paths against the rows of each expert; for the kernel asked for and for the two of the textbook."""
    expert = expert_of(model, weight_bytes_per_value=weight_bytes)
    rows = np.unique(np.geomspace(1, 2048, 200).round())
    axes = new_axes(figure, title=f"{experts} experts one after another", xlabel="rows of each expert", ylabel="ms")[0]
    for tflops in sorted({cpu_tflops, 1.8, 21.3}):
        here = placement_of(
            cpu_tflops=tflops,
            memory_gb_s=cpu_gb_s,
            gpu=gpu,
            gpu_share=gpu_share,
            link_gb_s=link_gb_s,
            start_us=start_us,
        )
        wins = here.gpu_wins_from(expert)
        label = f"CPU, {tflops:g} TFLOP/s" + (f": GPU faster from {wins} rows" if wins is not None else "")
        axes.plot(rows, [experts * here.on_cpu(expert, each).total_s * 1e3 for each in rows], label=label)
    axes.plot(rows, [experts * here.on_gpu(expert, each).total_s * 1e3 for each in rows], "k--", label="GPU")
    axes.set_xscale("log")
    axes.set_ylim(0, 4 * experts * here.on_gpu(expert, 1).total_s * 1e3)
    axes.legend()


EXPERTS = Calculator(
    "experts",
    "routed experts on the host's processor or moved to the GPU, and how many stay there",
    INPUTS,
    answer,
    (Plot("9-14", "both paths against the rows of each expert", draw),),
)
