"""Pages as upgrades, data-parallel engines and broken proxies really give them: never a zero where nothing was said."""

from __future__ import annotations

import pytest

from router.signals.load import Load
from router.signals.load_board import LoadBoard, Origin
from router.signals.prometheus_text import PageReader, load_of

RUNNING = "vllm:num_requests_running 2\n"


def told_of(page: str) -> tuple[Load, LoadBoard]:
    """What a board tells of one polled page, and the board with its counters."""
    told: list[Load] = []
    board = LoadBoard(1, lambda row, load, asked_s, came_s: told.append(load))
    board.polled(0, load_of(page), 1.0, 1.1)
    return told[-1], board


@pytest.mark.parametrize(
    "name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "sglang:full_token_usage"]
)
def test_every_name_an_engine_gave_its_cache_use_is_known_or_left_unknown(name: str) -> None:
    load, _ = told_of(f'{name}{{engine="0"}} 0.25\n')
    assert load.kv_usage == (None if name == "sglang:full_token_usage" else 0.25)


def test_a_server_of_two_engines_is_as_busy_as_both() -> None:
    two = 'vllm:num_requests_waiting{engine="0"} 0\nvllm:num_requests_waiting{engine="1"} 7\n'
    assert told_of(two)[0].waiting == 7.0
    assert load_of(two, "0").waiting == 0.0
    assert told_of("vllm:num_requests_waiting 4\n")[0].waiting == 4.0


@pytest.mark.parametrize(
    "page",
    [RUNNING, RUNNING + "vllm:num_requests_waiting NaN\n", "<html><body>502</body></html>", ""],
    ids=["missing", "NaN", "HTML", "nothing yet"],
)
def test_what_is_not_said_is_unknown_and_shows_in_a_counter(page: str) -> None:
    load, board = told_of(page)
    assert load.waiting is None
    assert board.incomplete[Origin.POLL] == 1
    assert board.anomalies[Origin.POLL] == ("NaN" in page)


def test_zero_that_is_said_is_zero() -> None:
    load, board = told_of(RUNNING + "vllm:num_requests_waiting 0\n")
    assert (load.waiting, board.incomplete[Origin.POLL]) == (0.0, 0)


def test_sglangs_names_are_read() -> None:
    load, _ = told_of("sglang:num_running_reqs 3\nsglang:num_queue_reqs 5\nsglang:token_usage 0.5\n")
    assert (load.running, load.waiting, load.kv_usage) == (3.0, 5.0, 0.5)


def test_an_upgrade_behind_the_same_url_changes_names_without_a_round_of_zeros() -> None:
    reader = PageReader()
    old = RUNNING + "vllm:num_requests_waiting 4\nvllm:gpu_cache_usage_perc 0.5\n"
    new = "# HELP new\n" + RUNNING + "vllm:num_requests_waiting 6\nvllm:kv_cache_usage_perc 0.75\n"
    seen = [reader.read(page)["0"] for page in (old, old, new, new)]
    assert [(load.waiting, load.kv_usage) for load in seen] == [(4.0, 0.5), (4.0, 0.5), (6.0, 0.75), (6.0, 0.75)]
