from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.load import Load
from router.signals.orca import REQUEST_HEADER, load_of_header, load_of_headers
from tests.router.signals.events import VECTORS

RECORDED = [
    line.partition(": ") for line in (VECTORS / "orca_headers.txt").read_text().splitlines() if not line.startswith("#")
]
ANSWERS = [value.encode() for name, _, value in RECORDED if name == "endpoint-load-metrics"]


@pytest.mark.parametrize("value", ANSWERS, ids=["text", "json"])
def test_a_recorded_header_tells_queue_and_cache_use_and_nothing_else(value: bytes) -> None:
    assert load_of_header(value) == Load(waiting=3.0, kv_usage=0.4375)


def test_what_is_asked_for_is_what_was_recorded() -> None:
    asked = {(name.encode(), value.encode()) for name, _, value in RECORDED}
    assert REQUEST_HEADER in asked


def test_several_engines_in_text_are_summed_and_shares_averaged() -> None:
    value = b"TEXT named_metrics.num_requests_waiting=3, named_metrics.kv_cache_usage_perc=0.5,"
    value += b" named_metrics.num_requests_waiting=4.0, named_metrics.kv_cache_usage_perc=0.25"
    assert load_of_header(value) == Load(waiting=7.0, kv_usage=0.375)


@pytest.mark.parametrize("number", [b"NaN", b"inf", b"-1", b"", b"many"])
def test_a_value_that_means_nothing_is_unknown_and_counted(number: bytes) -> None:
    assert load_of_header(b"TEXT named_metrics.num_requests_waiting=" + number) == Load(anomalies=1)
    both = b"TEXT num_requests_waiting=2, num_requests_waiting=" + number
    assert load_of_header(both) == Load(anomalies=1), "of one engine unknown, so unknown of all"


def test_a_share_above_one_is_an_anomaly() -> None:
    assert load_of_header(b'JSON {"named_metrics": {"kv_cache_usage_perc": 43.75}}') == Load(anomalies=1)


@pytest.mark.parametrize(
    "value", [b"", b"BIN abc", b"TEXTnum=1", b"JSON [1]", b"JSON {", b"JSON", b"TEXT " + b"x" * 9000]
)
def test_another_form_is_no_report(value: bytes) -> None:
    report = load_of_header(value)
    assert report is None


def test_the_form_is_read_in_any_case_and_unknown_names_are_passed_over() -> None:
    assert load_of_header(b'json {"cpu_utilization": 0.3, "named_metrics": {"x": 1}}') == Load()
    assert load_of_header(b"text cpu_utilization=0.3, named_metrics.num_requests_waiting=1") == Load(waiting=1.0)


def test_the_header_is_found_among_others_by_its_name_in_any_case() -> None:
    headers = [(b"content-type", b"application/json"), (b"Endpoint-Load-Metrics", ANSWERS[0])]
    assert load_of_headers(headers) == Load(waiting=3.0, kv_usage=0.4375)
    assert load_of_headers(headers[:1]) is None


@given(st.sampled_from([b"TEXT ", b"JSON ", b""]), st.binary(max_size=80))
def test_no_header_can_do_more_than_be_no_report(form: bytes, rest: bytes) -> None:
    report = load_of_header(form + rest)
    assert report is None or isinstance(report, Load)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e301", "-1"])
def test_a_number_no_engine_could_mean_is_unknown_and_counted(number: str) -> None:
    for header in (
        f'JSON {{"named_metrics": {{"num_requests_waiting": {number}}}}}',
        f"TEXT num_requests_waiting={number}",
    ):
        load = load_of_header(header.encode())
        assert load is not None
        assert (load.waiting, load.anomalies) == (None, 1)
