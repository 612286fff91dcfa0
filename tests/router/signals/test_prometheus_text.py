from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.signals.load import Load
from router.signals.prometheus_text import LEARN_EVERY, PageReader, load_of, loads_of
from tests.router.signals.events import VECTORS

SCRAPES = ["vllm_0.33.0", "vllm_0.9.2_legacy", "sglang_0.5.23"]
OTHER_NAMES = {"page_size": "block_size"}


def scrape(name: str) -> str:
    return (VECTORS / f"metrics_{name}.txt").read_text()


@pytest.mark.parametrize("name", SCRAPES)
def test_a_recorded_scrape_gives_its_signals_for_each_rank(name: str) -> None:
    expected: dict[str, dict[str, Any]] = json.loads((VECTORS / f"metrics_{name}.signals.json").read_text())
    assert loads_of(scrape(name)).keys() == expected.keys()
    for rank, signals in expected.items():
        load = load_of(scrape(name), rank)
        assert {key: getattr(load, OTHER_NAMES.get(key, key)) for key in signals} == signals
        assert load.anomalies == 0


def test_all_ranks_together_are_summed_and_shares_averaged() -> None:
    load = load_of(scrape("vllm_0.33.0"))
    assert (load.running, load.waiting, load.kv_usage) == (9.0, 3.0, 0.25)
    assert (load.block_size, load.num_gpu_blocks) == (16, 55042)


@pytest.mark.parametrize("page", ["", "<html><body>vllm</body></html>", "# HELP vllm:num_requests_running x\n"])
def test_a_page_without_samples_is_unknown_not_zero(page: str) -> None:
    assert load_of(page) == Load()
    assert load_of(page, "0") == Load()


def test_a_missing_series_stays_unknown_beside_a_zero() -> None:
    load = load_of("vllm:num_requests_running 0\n")
    assert (load.running, load.waiting, load.kv_usage) == (0.0, None, None)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many", ""])
def test_a_value_that_means_nothing_is_unknown_and_counted(value: str) -> None:
    load = load_of(f'vllm:num_requests_waiting{{engine="0"}} {value}\nvllm:num_requests_running{{engine="0"}} 2\n')
    assert (load.waiting, load.running, load.anomalies) == (None, 2.0, 1)


def test_a_share_above_one_is_an_anomaly() -> None:
    assert load_of("vllm:kv_cache_usage_perc 43.75\n") == Load(anomalies=1)


def test_one_unknown_rank_makes_the_sum_unknown() -> None:
    page = 'vllm:num_requests_waiting{engine="0"} 7\nvllm:num_requests_waiting{engine="1"} NaN\n'
    assert load_of(page).waiting is None
    assert load_of(page, "0").waiting == 7.0


def test_the_new_name_counts_before_the_old_one() -> None:
    page = "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.25\n"
    assert load_of(page).kv_usage == 0.25
    assert load_of("vllm:gpu_cache_usage_perc 0.9\n").kv_usage == 0.9


def test_names_are_matched_whole_and_labels_may_hold_anything() -> None:
    page = (
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 5\n'
        'vllm:num_requests_waiting{engine="1",model_name="a\\"}b,engine=\\"9"} 4 1767225600000\n'
    )
    assert {rank: load.waiting for rank, load in loads_of(page).items()} == {"1": 4.0}


def test_priorities_of_sglang_are_not_added_to_their_total() -> None:
    page = (
        'sglang:num_queue_reqs{dp_rank="0",priority=""} 5\n'
        'sglang:num_queue_reqs{dp_rank="0",priority="1"} 3\n'
        'sglang:num_queue_reqs{dp_rank="0",priority="2"} 2\n'
    )
    assert load_of(page).waiting == 5.0
    assert load_of(page.split("\n", 1)[1]).waiting is None, "parts without their total are not the load"


def test_sleep_and_process_start_are_told() -> None:
    page = (
        'process_start_time_seconds 1.7672256e+09\nvllm:num_requests_running{engine="0"} 0\n'
        'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0\n'
        'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1\n'
    )
    load = load_of(page)
    assert (load.asleep, load.started_s) == (True, 1767225600.0)
    assert load_of(scrape("vllm_0.33.0"), "0").asleep is False


def with_numbers(page: str, numbers: list[float]) -> str:
    """The page with other values, widths included."""
    turn = iter(range(10**6))
    return re.sub(r" [0-9.e+]+$", lambda _: f" {numbers[next(turn) % len(numbers)]}", page, flags=re.MULTILINE)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SCRAPES),
    st.lists(st.lists(st.floats(0, 1e9) | st.integers(0, 10**7), min_size=1, max_size=7), min_size=1, max_size=6),
)
def test_a_reader_gives_what_a_search_of_every_page_gives(name: str, pages: list[list[float]]) -> None:
    reader = PageReader()
    reader.read(scrape(name))
    for numbers in pages:
        page = with_numbers(scrape(name), numbers)
        assert reader.read(page) == loads_of(page)


def test_pages_that_differ_in_their_numbers_are_not_searched_again() -> None:
    reader = PageReader()
    for number in range(LEARN_EVERY + 1):
        reader.read(with_numbers(scrape("vllm_0.33.0"), [0.0, 10.0 ** (number % 7)]))
    assert reader.searches == 1


def test_a_line_that_is_gone_or_changed_is_noticed_at_once() -> None:
    page = scrape("vllm_0.33.0")
    reader = PageReader()
    reader.read(page)
    renamed = page.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert reader.read(renamed) == loads_of(renamed)
    resized = page.replace('num_gpu_blocks="27521"', 'num_gpu_blocks="9"')
    assert reader.read(resized)["0"].num_gpu_blocks == 9
    one_engine = "\n".join(line for line in page.splitlines() if 'engine="1"' not in line)
    assert reader.read(one_engine).keys() == {"0"}
    assert reader.read("<html>") == {}


def test_a_new_line_is_seen_within_the_learning_period_and_after_silence_at_once() -> None:
    page = "vllm:num_requests_running 1\n"
    reader = PageReader()
    reader.read(page)
    grown = page + "vllm:num_requests_waiting 2\n"
    reads = next(n for n in range(1, LEARN_EVERY + 2) if reader.read(grown)["0"].waiting == 2.0)
    assert reads <= LEARN_EVERY + 1
    silent = PageReader()
    silent.read("")
    assert silent.read(page)["0"].running == 1.0


def test_a_page_is_read_in_slices_and_the_old_load_stands_until_the_last() -> None:
    reader = PageReader()
    reader.read("vllm:num_requests_running 1\n")
    steps = reader.slices("sglang:num_running_reqs 2\n")
    next(steps)
    assert reader.loads["0"].running == 1.0
    assert sum(1 for _ in steps) > 5
    assert reader.loads["0"].running == 2.0
    assert reader.is_sglang


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e301", "x", ""])
def test_a_reader_that_knows_the_page_takes_no_rubbish_either(value: str) -> None:
    page = "vllm:num_requests_running %s\nvllm:num_requests_waiting 2\nprocess_start_time_seconds %s\n"
    page += 'vllm:engine_sleep_state{sleep_state="awake"} %s\n'
    reader = PageReader()
    reader.read(page % ("1", "5", "1"))
    said = reader.read(page % (value, value, value))["0"]
    assert said == loads_of(page % (value, value, value))["0"]
    assert (said.running, said.waiting, said.anomalies) == (None, 2.0, 1)
    if value not in ("-1", "1e301"):
        assert (said.started_s, said.asleep) == (None, None)
    assert reader.read(page % ("1", "5", "1"))["0"].started_s == 5.0


def test_an_exemplar_after_a_value_is_not_the_value() -> None:
    line = 'vllm:prefix_cache_queries_total{engine="0",note="a}b"} 7 # {trace_id="x"} 0.5 12\n'
    assert loads_of(line)["0"].prefix_queries == 7.0


@pytest.mark.parametrize("size", ["0", "0.5", "-16", "2.5"])
def test_a_block_size_that_is_none_is_unknown(size: str) -> None:
    load = load_of(f"sglang:page_size {size}\nsglang:num_pages {size}\nsglang:num_running_reqs 1\n")
    assert (load.block_size, load.num_gpu_blocks, load.anomalies) == (None, None, 2)
    labels = load_of(f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{size}"}} 1\n')
    assert (labels.block_size, labels.num_gpu_blocks) == (None, None)


NAME = "vllm:num_requests_running"


@pytest.mark.parametrize(
    "text", ["{" + 'a="b",' * 700_000, '{a="' + "\\" * 2_000_000, '{a="' + '"' * 4_000_000, "{" * 4_000_000]
)
def test_labels_that_never_close_say_nothing_and_cost_no_more_than_their_beginning(text: str) -> None:
    assert load_of(f"{NAME}{text}\nvllm:num_requests_waiting 2\n") == Load(waiting=2.0)


@pytest.mark.parametrize("inside", ["a" * 4000, "a" * 4000 + "=", 'a="' * 1331 + '"', 'a="\\""' * 600])
def test_labels_without_sense_are_passed_over_once(inside: str) -> None:
    """These lines would take a minute if each were searched from each of its characters."""
    page = f"{NAME}{{{inside}}} 1\n" * 500
    assert load_of(page).running == 1.0


def test_labels_of_any_text_are_read_up_to_a_length_no_engine_needs() -> None:
    def running(note: str) -> dict[str, Load]:
        return loads_of(f'{NAME}{{engine="3",note="{note}"}} 7\n')

    longest = 4096 - len('{engine="3",note=""}')
    for note in ("a}b", '\\"', "\\\\", ',engine=\\"4\\"', "x" * longest):
        assert running(note) == {"3": Load(running=7.0)}
    assert running("x" * (longest + 1)) == {}


def test_a_page_of_more_series_than_there_can_be_says_nothing_of_that_name() -> None:
    page = "".join(f'vllm:num_requests_running{{engine="{at}"}} 1\n' for at in range(20_000))
    load = load_of(page + "vllm:num_requests_waiting 2\n")
    assert (load.running, load.waiting) == (None, 2.0)
