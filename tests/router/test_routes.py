from __future__ import annotations

import pytest

from router.routes import Route, classify


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
        "/v1/responses/resp_1",
        "/v1/models/m1",
        "/v1/audio/transcriptions",
        "/score",
        "/v1/new-thing",
        "/ready/",
        "/",
        "*",
    ],
)
def test_everything_else_is_relayed_by_load(path: str) -> None:
    assert classify(b"POST", path) is Route.RELAY


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
        "/abort_request",
        "/v1/load_lora_adapter",
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
