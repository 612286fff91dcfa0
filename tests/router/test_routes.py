from __future__ import annotations

from pathlib import Path

import pytest

from router.routes import TABLE, Route, classify, stored_id


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/v1/models"])
def test_probes_and_the_model_list_are_answered_here(path: str) -> None:
    assert classify(b"GET", path) is classify(b"HEAD", path) is Route.ANSWERED


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/inference/v1/generate"],
)
def test_generation_is_placed_by_its_prompt_only_when_posted(path: str) -> None:
    assert classify(b"POST", path) is Route.GENERATE
    assert classify(b"OPTIONS", path) is Route.RELAY


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/tokenize",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/responses/render",
        "/v1/models/org/m1",
        "/v1/audio/transcriptions",
        "//score",
    ],
)
def test_other_routes_of_engines_are_relayed_by_load(path: str) -> None:
    assert classify(b"POST", path) is Route.RELAY


@pytest.mark.parametrize("path", ["/v1/new-thing", "/", "*", "/v1", "/healthz"])
def test_what_is_in_no_row_is_unknown(path: str) -> None:
    assert classify(b"POST", path) is classify(b"GET", path) is Route.UNKNOWN


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/v1/responses/resp_1/input_items",
        "/v1//responses/resp%5F1",
    ],
)
def test_a_stored_response_is_found_by_its_id_in_every_spelling(path: str) -> None:
    assert classify(b"GET", path) is classify(b"POST", path) is classify(b"DELETE", path) is Route.STORED
    assert stored_id(path) == "resp_1"


@pytest.mark.parametrize(
    ("path", "route"),
    [("/abort_request", Route.ABORT), ("/v1/load_lora_adapter", Route.TO_ALL), ("/unload_lora_adapter/", Route.TO_ALL)],
)
def test_what_changes_replicas_is_never_relayed_by_load(path: str, route: Route) -> None:
    assert classify(b"POST", path) is route
    assert classify(b"GET", path) is classify(b"PUT", path) is Route.ADMIN_ONLY


def test_no_path_stands_in_two_rows() -> None:
    paths = [path for row in TABLE for path in row.paths]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/metrics/",
        "/metrics/x",
        "//metrics",
        "/%6Detrics",
        "/v1/../metrics",
        "/./load",
        "/reset_prefix_cache",
        "/flush_cache",
        "/sleep",
        "/wake_up",
        "/server_info",
        "/get_server_info",
        "/v1/loads",
        "/kv_event_sources",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_admin_paths_are_hidden_in_every_spelling(path: str, method: bytes) -> None:
    assert classify(method, path) is Route.ADMIN_ONLY


def test_another_spelling_of_a_generation_path_is_still_generation() -> None:
    assert classify(b"POST", "/v1//completions/") is Route.GENERATE


def test_a_method_the_router_does_not_answer_is_left_to_a_replica() -> None:
    assert classify(b"POST", "/v1/models") is Route.RELAY
    assert classify(b"POST", "/ping") is Route.ANSWERED


def test_the_table_of_the_docs_is_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "traffic.md").read_text()
    for row in TABLE:
        methods = ", ".join(sorted(method.decode() for method in row.methods)) or "all"
        paths = ", ".join(f"`{path}`" for path in row.paths)
        assert f"| `{row.route.value}` | {methods} | {paths} |" in page
    assert all(f"| `{route.value}` |" in page for route in Route if route is not Route.UNKNOWN)
