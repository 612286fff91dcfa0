"""The parts of the benchmark of the page do what it says they do."""

from __future__ import annotations

import pytest

from loadtest.replay import bench_page
from loadtest.replay.bench_receipts import fastest


def test_a_request_and_a_second_watched_are_timed_on_a_page_that_has_something_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_page, "fastest", lambda call, **more: fastest(call, calls=3))
    small, large = bench_page.costs(2), bench_page.costs(32)
    assert min(small.keep_s, small.news_s) > 0.0
    assert large.news_bytes > small.news_bytes > 5000
