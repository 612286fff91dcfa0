"""What operators see of how prompts are read: Prometheus families and a part of /fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.prompts.agreement import State
from router.tokenizing.asked import Form

READ_BUCKETS = (5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class PromptReport:
    """How prompts are read, as of now.

    source : configured way; up : whether who tokenises answers, None where nobody is asked
    read : prompts by how they were read, or why they were not
    states : by model and form; differing : forms in which a replica made other tokens when asked, by replica
    waiting : prompts under way; lost_workers : processes that ended unasked
    """

    source: str
    up: bool | None
    read: dict[str, int]
    states: dict[tuple[str, Form], State]
    differing: dict[str, list[str]]
    waiting: int
    lost_workers: int

    def as_values(self) -> dict[str, Any]:
        """For /fleet."""
        tokens: dict[str, dict[str, str]] = {}
        for (model, form), state in self.states.items():
            tokens.setdefault(model, {})[form.value] = state.value
        return {
            "source": self.source,
            "up": self.up,
            "read": self.read,
            "tokens": tokens,
            "differing": self.differing,
            "waiting": self.waiting,
            "lost_workers": self.lost_workers,
        }


class PromptMetrics(Collector):
    """Families in `registry`, read when somebody scrapes."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], PromptReport]) -> None:
        self._read = read
        self.took_s: Callable[[float], None] = Histogram(
            "tfirst_prompt_read_seconds",
            "Time requests waited for their prompt to be read beside the event loop",
            buckets=READ_BUCKETS,
            registry=registry,
        ).observe
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing is read while nobody scrapes."""
        return []

    def collect(self) -> Iterator[Metric]:
        report = self._read()
        prompts = CounterMetricFamily("tfirst_prompts", "Prompts by how they were read, or why not", labels=["read"])
        for how, total in report.read.items():
            prompts.add_metric([how], total)
        agree = GaugeMetricFamily(
            "tfirst_prompt_tokens_state",
            "Models by whether the engine makes the same tokens of a form of prompt",
            labels=["form", "state"],
        )
        models = Counter((form, state) for (_, form), state in report.states.items())
        for form in Form:
            for state in State:
                agree.add_metric([form.value, state.value], models[form, state])
        waiting = GaugeMetricFamily("tfirst_prompts_waiting", "Prompts being read", value=report.waiting)
        lost = CounterMetricFamily("tfirst_prompt_workers_lost", "Reading processes lost", value=report.lost_workers)
        yield from (prompts, agree, waiting, lost)
        if report.up is not None:
            yield GaugeMetricFamily("tfirst_prompt_source_up", "1 while who tokenises answers", value=float(report.up))
