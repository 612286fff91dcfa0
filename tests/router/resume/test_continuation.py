"""Whether a stream could go on elsewhere, and what the next replica is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.request import RequestFacts
from router.resume.continuation import (
    CHAT,
    COMPLETIONS,
    Continuation,
    Rest,
    continuation,
    why_not_of_request,
    why_not_of_sent,
)
from router.resume.log import ResumeConfig, StreamLog
from router.resume.placement import rest_as_request
from router.resume.reasons import WhyNot
from tests.router.resume.streams import DONE, chunk, delta, text


def a_log(*events: bytes) -> StreamLog:
    log = StreamLog(ResumeConfig())
    log.feed(b"".join(events))
    return log


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "p", "stream": True} | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "p"}], "stream": True} | fields).encode()


@pytest.mark.parametrize(
    ("fields", "why_not"),
    [
        ({"stream": False}, WhyNot.NOT_A_STREAM),
        ({"stream": None}, WhyNot.NOT_A_STREAM),
        ({"tools": [{"type": "function"}]}, WhyNot.TOOLS),
        ({"functions": [{}]}, WhyNot.TOOLS),
        ({"logprobs": 0}, WhyNot.LOGPROBS),
        ({"logprobs": True}, WhyNot.LOGPROBS),
        ({"prompt_logprobs": 0}, WhyNot.LOGPROBS),
        ({"n": 2}, WhyNot.SEVERAL_CHOICES),
        ({"best_of": 3}, WhyNot.SEVERAL_CHOICES),
        ({"use_beam_search": True}, WhyNot.SEVERAL_CHOICES),
        ({"response_format": {"type": "json_object"}}, WhyNot.STRUCTURED),
        ({"guided_regex": "a+"}, WhyNot.STRUCTURED),
        ({"structured_outputs": {"choice": ["a"]}}, WhyNot.STRUCTURED),
        ({"regex": "a+"}, WhyNot.STRUCTURED),
        ({"echo": True}, WhyNot.ECHO),
        ({"suffix": "x"}, WhyNot.SUFFIX),
        ({"audio": {"voice": "x"}}, WhyNot.AUDIO),
        ({"modalities": ["text", "audio"]}, WhyNot.AUDIO),
        ({"stream_options": {"continuous_usage_stats": True}}, WhyNot.RUNNING_USAGE),
        ({"truncate_prompt_tokens": 100}, WhyNot.TRUNCATION),
        ({"presence_penalty": 0.5}, WhyNot.PENALTIES),
        ({"kv_transfer_params": {"do_remote_decode": True}}, WhyNot.TRANSFER),
        ({"continue_final_message": True}, WhyNot.CONTINUES),
        ({"add_generation_prompt": False}, WhyNot.CONTINUES),
        ({"max_tokens": "9"}, WhyNot.BODY),
        ({"max_tokens": 9.0}, WhyNot.BODY),
        ({"min_tokens": True}, WhyNot.BODY),
        ({"stop_regex": "a+"}, WhyNot.STOP_AT_CUT),
        ({"prompt_embeds": "AA"}, WhyNot.PROMPT_FORM),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(fields: dict[str, Any], why_not: WhyNot) -> None:
    assert why_not_of_request(COMPLETIONS, completion(**fields)) is why_not
    assert why_not_of_request(CHAT, chat(**fields)) is why_not


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1, "temperature": 1.0, "top_p": 0.5, "repetition_penalty": 1.1},
        {"n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "stop": ["x"]},
        {"tools": [], "response_format": {"type": "text"}, "presence_penalty": 0.0},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": False}},
    ],
)
def test_sampling_and_defaults_written_out_are_no_reason(fields: dict[str, Any]) -> None:
    assert why_not_of_request(COMPLETIONS, completion(**fields)) is None
    assert why_not_of_request(CHAT, chat(**fields)) is None


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [[1], [2]], [[1]], [], None, 7, {"a": 1}])
def test_one_text_or_one_list_of_ids_is_a_prompt(prompt: Any) -> None:
    assert why_not_of_request(COMPLETIONS, completion(prompt=prompt)) is WhyNot.PROMPT_FORM
    assert why_not_of_request(COMPLETIONS, completion(prompt=[1, 2])) is None


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/generate", ""])
def test_other_interfaces_are_not_continued(path: str) -> None:
    assert why_not_of_request(path, completion()) is WhyNot.API


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"a":' + b"[" * 9999, b'{"stream":true}'])
def test_a_body_that_cannot_be_read_is_a_reason_and_no_error(body: bytes) -> None:
    assert why_not_of_request(CHAT, body) is WhyNot.BODY
    assert why_not_of_request(COMPLETIONS, body) in (WhyNot.BODY, WhyNot.PROMPT_FORM)


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"), min_size=1))
def test_sent_text_stands_behind_the_prompt_whatever_it_is(prompt: str, sent: str) -> None:
    asked = continuation(COMPLETIONS, completion(prompt=prompt), a_log(text(sent)))
    assert json.loads(asked.body) == {"max_tokens": 15, "prompt": prompt + sent, "stream": True}


def test_every_other_byte_of_a_completion_stays() -> None:
    body = b'{ "x": 1e400,\t"prompt" :"a\\u00e9" , "max_tokens": 9 , "stream":true}'
    expected = body.replace(b"9 ", b"7 ").replace(b'e9"', b'e9b\\"c"')
    assert continuation(COMPLETIONS, body, a_log(text("b"), text('"c'))) == Continuation(expected, Rest.TEXT)


def test_a_least_length_that_is_reached_asks_for_nothing_more() -> None:
    log = a_log(text("a"), text("b"))
    assert json.loads(continuation(COMPLETIONS, completion(min_tokens=1), log).body)["min_tokens"] == 0


def test_of_equal_keys_the_last_one_counts_for_engines_and_here() -> None:
    body = b'{"max_tokens":3,"prompt":"x","prompt":"p","max_tokens":9,"stream":true}'
    expected = b'{"max_tokens":3,"prompt":"x","prompt":"pb","max_tokens":8,"stream":true}'
    assert continuation(COMPLETIONS, body, a_log(text("b"))).body == expected


def test_ids_stand_behind_ids() -> None:
    body = completion(prompt=[1, 2], max_tokens=9)
    asked = json.loads(continuation(COMPLETIONS, body, a_log(text("a", token_ids=[7, 8]))).body)
    assert (asked["prompt"], asked["max_tokens"]) == ([1, 2, 7, 8], 7)


def test_a_text_whose_ids_the_engine_told_goes_on_from_ids() -> None:
    log = a_log(text("a", token_ids=[7], prompt_token_ids=[1, 2]))
    assert json.loads(continuation(COMPLETIONS, completion(), log).body)["prompt"] == [1, 2, 7]


def test_a_prompt_of_ids_needs_the_ids_that_were_sent() -> None:
    body = completion(prompt=[1, 2])
    assert why_not_of_sent(COMPLETIONS, body, a_log(text("a"))) is WhyNot.IDS_UNKNOWN
    assert why_not_of_sent(COMPLETIONS, body, a_log(text("a", token_ids=[7]))) is None
    assert why_not_of_sent(COMPLETIONS, body, a_log()) is None


def test_a_conversation_goes_on_in_the_assistants_message() -> None:
    body = chat(max_completion_tokens=9, min_tokens=4, add_generation_prompt=True)
    log = a_log(delta({"role": "assistant", "content": ""}), delta({"content": "A"}), delta({"content": "b"}))
    asked = json.loads(continuation(CHAT, body, log).body)
    assert asked == {
        "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "Ab"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "stream": True,
    }


def test_before_any_output_the_body_is_asked_as_it_is() -> None:
    role = delta({"role": "assistant", "content": ""})
    assert continuation(CHAT, chat(max_tokens=5, min_tokens=2), a_log(role)).body == chat(max_tokens=5, min_tokens=2)


def test_of_a_finished_answer_only_what_is_missing_is_asked() -> None:
    wanting = completion(stream_options={"include_usage": True}, max_tokens=50)
    finished, usage = text("a", finish="stop"), chunk([], usage={"prompt_tokens": 1})
    assert continuation(COMPLETIONS, completion(), a_log(finished)) == Continuation(b"", Rest.DONE)
    assert continuation(COMPLETIONS, wanting, a_log(finished, usage)) == Continuation(b"", Rest.DONE)
    assert continuation(COMPLETIONS, wanting, a_log(finished, usage, DONE)) == Continuation(b"", Rest.NOTHING)
    asked = continuation(COMPLETIONS, wanting, a_log(finished))
    assert (asked.rest, json.loads(asked.body)["max_tokens"]) == (Rest.USAGE, 1)


def test_at_the_limit_one_token_is_asked_for_the_end() -> None:
    asked = continuation(COMPLETIONS, completion(max_tokens=2, min_tokens=2), a_log(text("a"), text("b")))
    assert asked.rest is Rest.FINISH
    assert json.loads(asked.body) == {"prompt": "pab", "stream": True, "max_tokens": 1, "min_tokens": 0}


@pytest.mark.parametrize(
    ("stop", "sent", "straddles"),
    [
        ("\n\n", "a\n", True),
        ("\n\n", "a", False),
        (["x", "END"], "aEN", True),
        (["END"], "END.", False),
        (7, "a", False),
    ],
)
def test_a_stop_string_that_may_straddle_the_cut_is_refused(stop: Any, sent: str, straddles: bool) -> None:
    why_not = why_not_of_sent(COMPLETIONS, completion(stop=stop), a_log(text(sent)))
    assert why_not is (WhyNot.STOP_AT_CUT if straddles else None)


@pytest.mark.parametrize(
    ("sent", "why_not"),
    [("a\n", WhyNot.SPACE_AT_EDGE), (" a", WhyNot.SPACE_AT_EDGE), ("<think>a", WhyNot.REASONING), ("a b", None)],
)
def test_what_a_template_would_change_is_refused(sent: str, why_not: WhyNot | None) -> None:
    assert why_not_of_sent(CHAT, chat(), a_log(delta({"content": sent}))) is why_not
    assert why_not_of_sent(COMPLETIONS, completion(), a_log(text(sent))) is None


def test_white_space_is_no_reason_where_the_template_keeps_it() -> None:
    assert why_not_of_sent(CHAT, chat(), a_log(delta({"content": " a\n"})), template_strips=False) is None


def test_the_rest_is_placed_by_its_own_prompt_and_for_the_same_client() -> None:
    first = RequestFacts("r", "m", prompt_tokens=32, chain=[1], tenant="t", session="s", deadline_s=0.5, max_tokens=99)
    read = RequestFacts("other", "m", prompt_tokens=64, chain=[1, 2, 3], max_tokens=67)
    placed = rest_as_request(first, read, Rest.TEXT, sent_tokens=3)
    assert (placed.request_id, placed.tenant, placed.session, placed.deadline_s) == ("r", "t", "s", None)
    assert (placed.prompt_tokens, placed.chain, placed.max_tokens) == (64, [1, 2, 3], 67)
    assert rest_as_request(first, read, Rest.FINISH, sent_tokens=3).max_tokens == 1
