"""`tfirst calc preload`: a cached prefix read layer by layer while the new tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

from estimators.planning.preload import (
    LayerTimes,
    buffer_bytes,
    layer_times,
    layers_over,
    layers_to_preload,
    tokens_that_hide,
    whole_then_compute_s,
)
from estimators.roofline import Roofline
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import NamedCard, card, count, model, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB, MB = 1e9, 1e6

INPUTS = (
    model(),
    card("card", "A100", "card that computes"),
    count("cached-tokens", 8192, "tokens", "prefix that is read", low=1),
    count("new-tokens", 256, "tokens", "computed after it", low=1),
    number("read-gb-s", 25, "GB/s", "link the layers come over", above=True),
    count("preloaded", 0, "layers", "read before the turn"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One prefill after a hit."""

    layers: int
    layer_bytes: float
    read_layer_s: float
    compute_layer_s: float

    @property
    def read_s(self) -> float:
        return self.layers * self.read_layer_s

    @property
    def compute_s(self) -> float:
        return self.layers * self.compute_layer_s

    @property
    def whole_s(self) -> float:
        return whole_then_compute_s(
            layers=self.layers, read_layer_s=self.read_layer_s, compute_layer_s=self.compute_layer_s
        )

    def times(self, preloaded: int) -> LayerTimes:
        return layer_times(
            layers=self.layers,
            read_layer_s=self.read_layer_s,
            compute_layer_s=self.compute_layer_s,
            preloaded=preloaded,
        )

    @property
    def enough(self) -> int:
        return layers_to_preload(
            layers=self.layers, read_layer_s=self.read_layer_s, compute_layer_s=self.compute_layer_s
        )


def case_of(*, model: ModelShape, card: NamedCard, cached_tokens: int, new_tokens: int, read_gb_s: float) -> Case:
    roofline = Roofline.of(model, card.card)
    layer_bytes = roofline.costs.kv_bytes_between(0, float(cached_tokens)) / model.layers
    compute_s = roofline.prefill_s(new_tokens=new_tokens, cached_tokens=cached_tokens)
    return Case(model.layers, layer_bytes, layer_bytes / (read_gb_s * GB), compute_s / model.layers)


def answer(
    *, model: ModelShape, card: NamedCard, cached_tokens: int, new_tokens: int, read_gb_s: float, preloaded: int
) -> Answer:
    case = case_of(model=model, card=card, cached_tokens=cached_tokens, new_tokens=new_tokens, read_gb_s=read_gb_s)
    roofline = Roofline.of(model, card.card)
    buffer = buffer_bytes(bytes_per_s=read_gb_s * GB, read_s=case.read_s, compute_s=case.compute_s)
    hides = tokens_that_hide(
        case.read_s, lambda tokens: roofline.prefill_s(new_tokens=tokens, cached_tokens=cached_tokens)
    )
    values = [
        Value("read_ms", case.read_s * 1e3, "ms"),
        Value("compute_ms", case.compute_s * 1e3, "ms"),
        Value("layer_read_ms", case.read_layer_s * 1e3, "ms"),
        Value("layer_compute_ms", case.compute_layer_s * 1e3, "ms"),
        Value("whole_then_compute_ms", case.whole_s * 1e3, "ms"),
        Value("layerwise_ms", case.times(0).total_s * 1e3, "ms"),
        Value("preloaded_ms", case.times(preloaded).total_s * 1e3, f"ms with {preloaded} layers there"),
        Value("buffer_mb", buffer / MB, "MB, read beyond what computing covers"),
        Value("buffer_layers", layers_over(buffer, layer_bytes=case.layer_bytes), "layers of that size"),
        Value("layers_to_preload", case.enough, "layers, so that the GPU never waits"),
        Value("tokens_that_hide", hides, "new tokens that take as long as the read"),
    ]
    rows = [
        (many, many * case.layer_bytes / MB, case.times(many).total_s * 1e3, case.times(many).waited_s * 1e3)
        for many in sorted({0, case.enough // 2, case.enough, case.layers, preloaded})
    ]
    columns = ("layers there before", "MB", "prefill, ms", "GPU waits, ms")
    return Answer(values, [Table("Layer by layer", columns, rows)])


def draw_whole(
    figure: Figure,
    *,
    model: ModelShape,
    card: NamedCard,
    cached_tokens: int,
    new_tokens: int,
    read_gb_s: float,
    preloaded: int,
) -> None:
    """All is read, then all is computed."""
    case = case_of(model=model, card=card, cached_tokens=cached_tokens, new_tokens=new_tokens, read_gb_s=read_gb_s)
    computed = layer_times(layers=case.layers, read_layer_s=0.0, compute_layer_s=case.compute_layer_s)
    reads = [(layer * case.read_layer_s, case.read_layer_s) for layer in range(case.layers)]
    computes = [(case.read_s + start_s, case.compute_layer_s) for start_s in computed.compute_starts_s]
    _bars(figure, "Read, then compute", reads, computes, case.read_s + case.compute_s)


def draw_layers(
    figure: Figure,
    *,
    model: ModelShape,
    card: NamedCard,
    cached_tokens: int,
    new_tokens: int,
    read_gb_s: float,
    preloaded: int,
) -> None:
    """Layer by layer from the turn on."""
    case = case_of(model=model, card=card, cached_tokens=cached_tokens, new_tokens=new_tokens, read_gb_s=read_gb_s)
    _timeline(figure, case, preloaded, "Layer by layer" + (f", {preloaded} there before" if preloaded else ""))


def draw_preloaded(
    figure: Figure,
    *,
    model: ModelShape,
    card: NamedCard,
    cached_tokens: int,
    new_tokens: int,
    read_gb_s: float,
    preloaded: int,
) -> None:
    """With as many layers read before as it takes, or as `preloaded` says."""
    case = case_of(model=model, card=card, cached_tokens=cached_tokens, new_tokens=new_tokens, read_gb_s=read_gb_s)
    before = preloaded or case.enough
    _timeline(figure, case, before, f"Layer by layer, {before} there before")


def _timeline(figure: Figure, case: Case, preloaded: int, title: str) -> None:
    times = case.times(preloaded)
    reads = [(start_s, case.read_layer_s) for start_s in times.read_starts_s[preloaded:]]
    computes = [(start_s, case.compute_layer_s) for start_s in times.compute_starts_s]
    _bars(figure, title, reads, computes, times.total_s)


def _bars(
    figure: Figure,
    title: str,
    reads: list[tuple[float, float]],
    computes: list[tuple[float, float]],
    total_s: float,
) -> None:
    axes = new_axes(figure, title=f"{title}: {total_s * 1e3:.1f} ms", xlabel="ms from the turn")[0]
    for height, (label, color, bars) in enumerate((("compute", "tab:green", computes), ("read", "tab:orange", reads))):
        in_ms = [(start_s * 1e3, wide_s * 1e3) for start_s, wide_s in bars]
        axes.broken_barh(in_ms or [(nan, nan)], (height - 0.3, 0.6), color=color, edgecolor="white", label=label)
    axes.set_yticks([0, 1], ["GPU", "link"])
    axes.set_xlim(0.0, total_s * 1e3 * 1.02)


PRELOAD = Calculator(
    "preload",
    "read a cached prefix layer by layer beside the computation",
    INPUTS,
    answer,
    (
        Plot("9-32", "all read before computing", draw_whole),
        Plot("9-33", "layer by layer", draw_layers),
        Plot("9-34", "layer by layer, enough there before", draw_preloaded),
    ),
)
