from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from estimators.request import RequestFacts
from router.actions import Refuse
from router.identity import Identity, chain
from router.names import ModelNames
from router.prompts import LONGEST_GUESS_TOKENS, CharactersPerToken, PromptReader


@dataclass
class FakeHead:
    path: str = "/v1/completions"
    method: bytes = b"POST"
    fields: dict[bytes, bytes] = field(default_factory=dict)
    client: str = ""

    def get(self, name: bytes) -> bytes | None:
        return self.fields.get(name)


def read(body: Any, head: FakeHead | None = None) -> RequestFacts | Refuse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return PromptReader(16).facts_of(head or FakeHead(), data)


def facts(body: Any, head: FakeHead | None = None) -> RequestFacts:
    read_facts = read(body, head)
    assert isinstance(read_facts, RequestFacts), read_facts
    return read_facts


TOKENS = list(range(1, 101))


def test_token_ids_give_an_exact_length_and_chain() -> None:
    read_facts = facts({"model": "m", "prompt": TOKENS, "max_tokens": 7, "stream": True})
    assert (read_facts.prompt_tokens, read_facts.prompt_exact) == (100, True)
    assert read_facts.chain == chain(Identity("m").root(), TOKENS, 16)
    assert (read_facts.max_tokens, read_facts.streams) == (7, True)


def test_the_block_that_ends_with_the_last_token_is_never_counted_on() -> None:
    """An engine computes at least one token, so 32 tokens reuse one block and 33 reuse two."""
    assert [len(facts({"model": "m", "prompt": TOKENS[:n]}).chain) for n in (16, 17, 32, 33)] == [0, 1, 1, 2]


@pytest.mark.parametrize("changed", [{"temperature": 0.9}, {"seed": 3}, {"top_p": 0.1}, {"user": "u"}])
def test_sampling_parameters_do_not_split_a_prefix(changed: dict[str, Any]) -> None:
    assert facts({"model": "m", "prompt": TOKENS, **changed}).chain == facts({"model": "m", "prompt": TOKENS}).chain


@pytest.mark.parametrize("changed", [{"model": "n"}, {"cache_salt": "tenant"}])
def test_model_and_salt_do(changed: dict[str, Any]) -> None:
    assert facts({"model": "m", "prompt": TOKENS, **changed}).chain != facts({"model": "m", "prompt": TOKENS}).chain


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 400}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 400}]}),
        ("/v1/completions", {"prompt": ["one", "two"]}),
    ],
)
def test_text_has_a_guessed_length_and_no_chain(path: str, body: dict[str, Any]) -> None:
    read_facts = facts({"model": "m", **body}, FakeHead(path))
    assert read_facts.chain == []
    assert not read_facts.prompt_exact
    if "x" in json.dumps(body):
        assert read_facts.prompt_tokens == pytest.approx(100, abs=4)


def test_several_prompts_of_token_ids_are_counted_together_and_credited_by_the_longest() -> None:
    read_facts = facts({"model": "m", "prompt": [[7] * 20, TOKENS, [9]]})
    assert (read_facts.prompt_tokens, read_facts.prompt_exact) == (121, True)
    assert read_facts.chain == facts({"model": "m", "prompt": TOKENS}).chain


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [TOKENS]}),
        ("/generate", {"input_ids": TOKENS}),
        ("/generate", {"input_ids": [TOKENS]}),
        ("/inference/v1/generate", {"token_ids": TOKENS, "sampling_params": {}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "input_ids": TOKENS}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "kv_transfer_params": {"do_remote_prefill": False, "prompt_token_ids": TOKENS},
            },
        ),
    ],
)
def test_token_ids_are_found_where_each_api_puts_them(path: str, body: dict[str, Any]) -> None:
    assert facts({"model": "m", **body}, FakeHead(path)).chain == facts({"model": "m", "prompt": TOKENS}).chain


@pytest.mark.parametrize(("salted", "same"), [({"extra_key": "t"}, False), ({"extra_key": None}, True)])
def test_an_extra_key_sets_a_cache_apart_like_a_salt(salted: dict[str, Any], same: bool) -> None:
    salt = {"cache_salt": "s"}
    plain = facts({"model": "m", "prompt": TOKENS, **salt})
    assert (facts({"model": "m", "prompt": TOKENS, **salt, **salted}).chain == plain.chain) is same


def test_a_conversation_is_named_by_its_header_or_else_by_the_body() -> None:
    body = {"model": "m", "prompt": TOKENS, "session_id": "in-body"}
    assert facts(body, FakeHead(fields={b"x-session-id": b"in-header"})).session == "in-header"
    assert facts(body).session == "in-body"
    assert facts({**body, "session_id": 7}).session is None
    assert facts({**body, "session_id": "x" * 257}).session is None
    relayed = PromptReader(16).facts_of(FakeHead("/tokenize", fields={b"x-session-id": b"in-header"}), b"{}")
    assert isinstance(relayed, RequestFacts)
    assert relayed.session == "in-header"


def chunked(body: Any, head: FakeHead | None = None) -> RequestFacts:
    read_facts = PromptReader(16, chunks=True).facts_of(head or FakeHead(), json.dumps(body).encode())
    assert isinstance(read_facts, RequestFacts)
    return read_facts


@pytest.mark.parametrize("changed", [{"temperature": 0.9}, {"seed": 3}, {"stream": True}, {"max_tokens": 9}])
def test_sampling_parameters_do_not_split_a_text_prefix(changed: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": "x" * 4000}
    assert chunked({**changed, **body}).chain == chunked(body).chain != []


def test_conversations_share_blocks_of_text_as_far_as_their_messages_are_the_same() -> None:
    messages = [{"role": "user", "content": "x" * 4000}]
    head = FakeHead("/v1/chat/completions")
    first = chunked({"model": "m", "messages": messages}, head)
    longer = [*messages, {"role": "assistant", "content": "y" * 2000}, {"role": "user", "content": "z"}]
    second = chunked({"model": "m", "messages": longer}, head)
    assert first.chain_of_text
    assert not first.prompt_exact
    assert first.prompt_tokens - first.block_tokens <= len(first.chain) * first.block_tokens < first.prompt_tokens
    assert 10 < len(first.chain) < len(second.chain)
    assert second.chain[: len(first.chain)] == first.chain
    other = chunked({"model": "m", "messages": longer, "cache_salt": "s"}, head)
    assert not set(other.chain) & set(second.chain)


def test_tool_definitions_stand_before_the_messages_in_blocks_of_text() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}]}
    head = FakeHead("/v1/chat/completions")
    assert not set(chunked({**body, "tools": [{"a": 1}]}, head).chain) & set(chunked(body, head).chain)


def test_blocks_of_text_never_equal_blocks_of_tokens() -> None:
    token_ids = facts({"model": "m", "prompt": [0x78787878] * 100})  # their bytes are those of the text
    assert not set(token_ids.chain) & set(chunked({"model": "m", "prompt": "x" * 4000}).chain)


def test_an_image_is_not_counted_as_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    content = [{"type": "text", "text": "x" * 400}, image]
    read_facts = facts(
        {"model": "m", "messages": [{"role": "user", "content": content}]}, FakeHead("/v1/chat/completions")
    )
    assert read_facts.prompt_tokens == 100


def test_a_guessed_length_is_bounded() -> None:
    assert facts({"model": "m", "prompt": "x" * 10_000_000}).prompt_tokens == LONGEST_GUESS_TOKENS


def test_the_guess_follows_what_engines_report() -> None:
    learned = CharactersPerToken()
    for _ in range(300):
        learned.observe(300, 200)
    reader = PromptReader(16, characters_per_token=learned)
    guess = reader.facts_of(FakeHead(), json.dumps({"model": "m", "prompt": "x" * 1500}).encode())
    assert isinstance(guess, RequestFacts)
    assert guess.prompt_tokens == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize(("characters", "tokens"), [(4_000_000, 1), (1, 4_000_000)])
def test_one_odd_answer_moves_the_guess_little(characters: int, tokens: int) -> None:
    learned = CharactersPerToken()
    learned.observe(characters, tokens)
    assert 3.0 < learned.mean < 6.0


def test_a_prompt_that_is_more_than_text_teaches_nothing_about_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 400}, image]}]
    assert facts({"model": "m", "messages": messages}, FakeHead("/v1/chat/completions")).prompt_characters == 0
    messages[0]["content"] = "x" * 400
    assert facts({"model": "m", "messages": messages}, FakeHead("/v1/chat/completions")).prompt_characters == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[7] * 8000, [9] * 8000]}),
        ("/v1/responses", {"instructions": "x" * 64_000, "input": ""}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * 64_000}}]}]},
        ),
    ],
)
def test_no_part_of_a_prompt_counts_as_nothing(path: str, body: dict[str, Any]) -> None:
    assert facts({"model": "m", **body}, FakeHead(path)).prompt_tokens == pytest.approx(16_000, rel=0.01)


@pytest.mark.parametrize(
    "messages", [b"[" * 400 + b"]" * 400, b'[{"content":"\\ud83d"}]', b'[{"type":[1],"content":{"text":3}}]']
)
def test_odd_messages_are_still_placed(messages: bytes) -> None:
    body = b'{"model":"m","messages":' + messages + b"}"
    assert facts(body, FakeHead("/v1/chat/completions")).prompt_tokens >= 0


def test_a_body_only_pythons_reader_takes_is_read_like_any_other() -> None:
    body = (
        rb'{"model":"m1","top_p":1E-1,"seed":12345678901234567890,"x":"a\/b\ud83d","rid":"r-1","cache_salt":"s",'
        rb'"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"stream":true,"max_tokens":9}'
    )
    read_facts = facts(body)
    assert (read_facts.model, read_facts.prompt_tokens, len(read_facts.chain)) == ("m1", 17, 1)
    assert (read_facts.streams, read_facts.max_tokens) == (True, 9)
    salted = facts({"model": "m1", "cache_salt": "s", "prompt": list(range(1, 18))})
    assert read_facts.chain == salted.chain


def test_a_replica_that_lists_other_names_than_before_no_longer_has_the_old_ones() -> None:
    names = ModelNames()
    names.listed(0, ["old"], {})
    names.listed(0, ["new"], {})
    assert names.resolve("") == ("new", "")
    assert names.resolve("old") == ("old", "")


def test_adapters_that_left_or_have_other_weights_under_their_name_are_named() -> None:
    names = ModelNames()
    parents, roots = {"a": "m", "b": "m", "c": "m"}, {"a": "/a", "b": "/b"}
    assert names.listed(0, ["m", "a", "b", "c"], parents, roots) == []
    assert names.listed(0, ["m", "a", "b", "c"], parents, roots) == []
    assert names.listed(1, ["m"], {}) == [], "another replica"
    assert names.listed(0, ["m", "c", "b", "a"], parents, {"a": "/a", "b": "/b2"}) == ["b"]
    assert names.listed(0, ["m", "c", "n"], {"c": "n"}) == ["c", "b", "a"]
    assert names.listed(0, ["m", "a"], parents, roots) == ["c"]


def test_an_alias_shares_the_cache_of_its_model_and_an_adapter_has_its_own() -> None:
    names = ModelNames()
    names.listed(0, ["base", "alias", "lora"], {"lora": "base"})
    reader = PromptReader(16, names)

    def root_blocks(model: str | None) -> list[int]:
        body = {"prompt": TOKENS} if model is None else {"prompt": TOKENS, "model": model}
        read_facts = reader.facts_of(FakeHead(), json.dumps(body).encode())
        assert isinstance(read_facts, RequestFacts)
        return read_facts.chain

    assert root_blocks("alias") == root_blocks("base") == root_blocks(None)
    assert root_blocks("base") == chain(Identity("base").root(), TOKENS, 16)
    assert root_blocks("lora") == chain(Identity("base", adapter="lora").root(), TOKENS, 16)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b'{"prompt": [1,}', b"\xff\xfe", b"[" * 5000])
def test_a_body_that_is_not_a_json_object_is_a_400(body: bytes) -> None:
    refusal = read(body)
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.kind) == (400, "BadRequestError")
    assert "JSON" in refusal.message


def test_a_model_that_is_not_text_is_a_400_that_names_the_field() -> None:
    refusal = read({"model": 5, "prompt": "a"})
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.param) == (400, "model")


def test_token_ids_outside_their_range_are_a_400() -> None:
    refusal = read({"model": "m", "prompt": [1, -2, 3, 4] * 10})
    assert isinstance(refusal, Refuse)
    assert refusal.param == "prompt"


@pytest.mark.parametrize("limit", [0, -1, 10**400, "many", 1.5, True, None])
def test_a_limit_the_router_cannot_use_is_left_to_the_engine(limit: Any) -> None:
    assert facts({"model": "m", "prompt": TOKENS, "max_tokens": limit}).max_tokens is None


def test_fields_of_unexpected_types_are_left_to_the_engine() -> None:
    read_facts = facts({"model": "m", "prompt": {"odd": 1}, "stream": "yes", "cache_salt": 9, "messages": 3})
    assert not read_facts.streams


def test_the_clients_request_id_is_kept_and_one_is_made_when_there_is_none() -> None:
    named = facts({"model": "m", "prompt": TOKENS}, FakeHead(fields={b"x-request-id": b"abc-1"}))
    made = {facts({"model": "m", "prompt": TOKENS}).request_id for _ in range(50)}
    assert named.request_id == "abc-1"
    assert len(made) == 50


def test_a_route_without_prefill_needs_no_json() -> None:
    read_facts = facts(b"\x00\x01 not json", FakeHead("/v1/new-thing"))
    assert not read_facts.generates
    assert facts({"model": "m"}, FakeHead("/tokenize")).model == "m"


def test_the_explanation_is_made_on_request() -> None:
    assert facts({"model": "m", "prompt": TOKENS}, FakeHead(fields={b"x-tfirst-explain": b"1"})).explain
    assert not facts({"model": "m", "prompt": TOKENS}).explain


@pytest.mark.parametrize(
    ("body", "own_id"),
    [
        ({"rid": "r-1"}, "r-1"),
        ({"request_id": "q-1"}, "q-1"),
        ({"rid": "r-1", "request_id": "q-1"}, "r-1"),
        ({"rid": ["r-1", "r-2"]}, ""),
        ({"rid": 7}, ""),
        ({"rid": "x" * 1000}, ""),
        ({}, ""),
    ],
)
def test_the_id_that_a_body_gives_its_request_is_known(body: dict[str, Any], own_id: str) -> None:
    assert facts({"prompt": TOKENS, **body}).own_id == own_id


@pytest.mark.parametrize(("said", "continues"), [("resp_1", "resp_1"), (None, ""), (7, ""), ("x" * 1000, "")])
def test_the_response_that_a_request_goes_on_from_is_known(said: object, continues: str) -> None:
    assert facts({"input": "x", "previous_response_id": said}, FakeHead("/v1/responses")).continues == continues


def test_a_prompt_whose_length_matters_to_nobody_is_not_looked_into() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "\u00e9" * 100}], "tools": [{"type": "function"}]}
    read = PromptReader(16, largest_walk=0).facts_of(FakeHead("/v1/chat/completions"), json.dumps(body).encode())
    assert isinstance(read, RequestFacts)
    written = len(json.dumps(body["messages"])) + len(json.dumps(body["tools"]))
    assert (read.prompt_tokens, read.prompt_exact, read.prompt_characters) == (written // 4, False, 0)
