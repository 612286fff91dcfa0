from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.tallies import Spread, Spreads, Tally

BOUNDS = (0.0, 0.5, 2.0)


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_says_what_the_client_library_says(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = Spread("x", "text", BOUNDS, registry=ours)
    by_label = Spreads("y", "text", "of", BOUNDS, registry=ours)
    plain = Histogram("x", "text", buckets=BOUNDS, registry=theirs)
    labelled = Histogram("y", "text", ["of"], buckets=BOUNDS, registry=theirs)
    for value in values:
        for one in (spread, plain, labelled.labels("a")):
            one.observe(value)
        by_label.observe("a", value)

    def said(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if "_created" not in line]

    assert said(ours) == said(theirs)


def test_what_is_known_from_the_start_is_zero_and_what_somebody_else_counts_is_added() -> None:
    registry = CollectorRegistry()
    tally = Tally("x", "text", ["kind"], known=[("a",), ("b",)], registry=registry)
    tally.add(("a",), 2.0)
    tally.beside = lambda: {("a",): 1.0, ("c",): 4.0}
    assert [registry.get_sample_value("x_total", {"kind": kind}) for kind in "abcd"] == [3.0, 0.0, 4.0, None]


def test_series_of_names_that_are_gone_are_forgotten() -> None:
    tally = Tally("x", "text", ["replica", "kind"], registry=CollectorRegistry())
    for replica in ("a", "b"):
        tally.add((replica, "k"))
    tally.keep_only(["b", "new"])
    assert tally.totals == {("b", "k"): 1.0}
