"""`tfirst calc attention-ffn`: attention and feed-forward apart, against one handoff of the whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estimators.planning.attention_ffn import Crossing, critical_start_s, layer_crossings
from estimators.planning.known import DEEPSEEK_V3
from estimators.planning.pipelines import pipelined_s, serial_s
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B, ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import count, model, number, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIB, GIB = 2.0**10, 2.0**30

INPUTS = (
    model(),
    model("qwen3-8b", "state-model", "whose state a prefill handoff moves"),
    count("prompt-tokens", 8192, "tokens", "prompt", low=1),
    count("output-tokens", 1025, "tokens", "answer", low=1),
    number("link-gb-s", 25, "GB/s", "link, 10^9 bytes", above=True),
    number("start-us", 5, "us", "start of one transfer"),
    numbers("stages-ms", "2,3", "ms", "stages of the pipeline, of one micro-batch"),
    count("micro-batches", 4, "", "micro-batches", low=1),
)


def answer(
    *,
    model: ModelShape,
    state_model: ModelShape,
    prompt_tokens: int,
    output_tokens: int,
    link_gb_s: float,
    start_us: float,
    stages_ms: tuple[float, ...],
    micro_batches: int,
) -> Answer:
    link, start_s, calls = link_gb_s * 1e9, start_us * 1e-6, output_tokens - 1
    step, prompt = layer_crossings(model), layer_crossings(model, tokens=prompt_tokens)
    state = Crossing(costs_of(state_model).kv_bytes(float(prompt_tokens)), starts=1)
    handoff_s = state.serial_s(bytes_per_s=link, start_s=start_s)
    step_s = step.serial_s(bytes_per_s=link, start_s=start_s)
    critical_s = critical_start_s(state_bytes=state.payload_bytes, layers=step, bytes_per_s=link)
    in_turn_ms = serial_s(stages_ms, batches=micro_batches)
    piped_ms = pipelined_s(stages_ms, batches=micro_batches)
    values = [
        Value("handoff_ms", handoff_s * 1e3, "ms, once a request"),
        Value("step_kib", step.payload_bytes / KIB, "KiB"),
        Value("step_starts", step.starts, "transfers"),
        Value("step_ms", step_s * 1e3, "ms, every decode call"),
        Value("answer_ms", calls * step_s * 1e3, "ms, all decode calls"),
        Value("answer_over_handoff", calls * step_s / handoff_s, "times"),
        Value("prefill_gib", prompt.payload_bytes / GIB, "GiB"),
        Value("prefill_ms", prompt.serial_s(bytes_per_s=link, start_s=start_s) * 1e3, "ms"),
        Value("critical_start_us", critical_s * 1e6, "us, where one step takes as long as one handoff"),
        Value("serial_ms", in_turn_ms, "ms, micro-batches one after another"),
        Value("pipelined_ms", piped_ms, "ms, stages at the same time"),
        Value("affordable_ms", in_turn_ms - piped_ms, "ms that splitting and transfers may cost in all"),
    ]
    return Answer(values, [_starts_table(state, step, calls, link, start_us)])


def _starts_table(state: Crossing, step: Crossing, calls: int, link: float, start_us: float) -> Table:
    in_parts = Crossing(state.payload_bytes, step.starts)
    rows = []
    for each_us in sorted({1.0, 5.0, 20.0, start_us}):
        once, parts, one_step = (
            what.serial_s(bytes_per_s=link, start_s=each_us * 1e-6) * 1e3 for what in (state, in_parts, step)
        )
        rows.append((each_us, once, parts, one_step, calls * one_step))
    columns = ("start, us", "state at once, ms", f"in {step.starts} parts, ms", "one step, ms", "all steps, ms")
    return Table("Handoffs by start time", columns, rows)


def draw(
    figure: Figure,
    *,
    model: ModelShape,
    state_model: ModelShape,
    prompt_tokens: int,
    link_gb_s: float,
    **_: object,
) -> None:
    """One step and handoffs of a few states against the start time, out to where the last two cross."""
    link, step = link_gb_s * 1e9, layer_crossings(model)
    states = {
        shape.name: Crossing(costs_of(shape).kv_bytes(float(prompt_tokens)), starts=1)
        for shape in (state_model, QWEN3_8B, DEEPSEEK_V3)
    }
    equal_us = {
        name: critical_start_s(state_bytes=state.payload_bytes, layers=step, bytes_per_s=link) * 1e6
        for name, state in states.items()
    }
    starts_us = np.linspace(0.0, max(1.5 * max(equal_us.values()), 10.0), 50)
    axes = new_axes(
        figure, title=f"Serial handoff over {link_gb_s:g} GB/s", xlabel="start of one transfer, us", ylabel="ms"
    )[0]

    def line(crossing: Crossing, label: str) -> None:
        axes.plot(
            starts_us,
            [crossing.serial_s(bytes_per_s=link, start_s=each * 1e-6) * 1e3 for each in starts_us],
            label=label,
        )

    for name, state in states.items():
        crosses = f", equal at {equal_us[name]:.0f} us" if equal_us[name] > 0 else ""
        line(state, f"state of {name}, once a request{crosses}")
    line(step, f"layers, {step.starts} starts a step")
    axes.legend()


ATTENTION_FFN = Calculator(
    "attention-ffn",
    "attention and feed-forward on different machines: transfers of every step, and what a pipeline saves",
    INPUTS,
    answer,
    (Plot("9-18", "one handoff and one step against the start time", draw),),
)
