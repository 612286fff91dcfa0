from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.tokenizing.asked import Asked, Form, NoTokens, Unread
from router.tokenizing.local import LocalTokenizer, missing_packages
from router.tokenizing.messages import Engine
from tests.router.tokenizing.small import CHATML, a_directory, a_tokenizer

HI = [{"role": "user", "content": "the quick <|im_end|> brown fox"}]


def local(
    folder: Path, kind: str = "bytes", engine: Engine = "vllm", defaults: dict[str, Any] | None = None, **settings: Any
) -> LocalTokenizer:
    return LocalTokenizer(
        a_directory(folder, kind, **settings), engine=engine, defaults=defaults or {}, limit_bytes=1 << 20
    )


def text(prompt: Any, **options: Any) -> Asked:
    return Asked(Form.TEXT, "m", "m", prompt=json.dumps(prompt).encode(), options=options)


def chat(messages: Any, tools: Any = None, **options: Any) -> Asked:
    raw = b"" if tools is None else json.dumps(tools).encode()
    form = Form.TOOLS if tools else Form.CHAT
    return Asked(form, "m", "m", messages=json.dumps(messages).encode(), tools=raw, options=options)


def plain(kind: str, prompt: str, *, special: bool) -> list[int]:
    """The library itself, on the whole text."""
    return list(a_tokenizer(kind).encode(prompt, add_special_tokens=special).ids)


@pytest.mark.parametrize("kind", ["bytes", "bos", "spaces"])
@pytest.mark.parametrize("prompt", ["the quick brown fox", "", " a<|im_start|>b ", "你好\n\n🙂"])
def test_a_completion_gets_the_tokenizers_own_beginning(tmp_path: Path, kind: str, prompt: str) -> None:
    made = local(tmp_path, kind)
    assert made.prompts_of(text(prompt))[0].tolist() == plain(kind, prompt, special=True)
    assert made.prompts_of(text(prompt, add_special_tokens=False))[0].tolist() == plain(kind, prompt, special=False)


@pytest.mark.parametrize("kind", ["bytes", "bos", "spaces"])
def test_a_conversation_gets_only_what_its_template_writes(tmp_path: Path, kind: str) -> None:
    written = "<|im_start|>user\nthe quick <|im_end|> brown fox<|im_end|>\n<|im_start|>assistant\n"
    made = local(tmp_path, kind)
    assert made.rendered(chat(HI)) == written
    assert made.prompts_of(chat(HI))[0].tolist() == plain(kind, written, special=False)
    assert made.prompts_of(chat(HI, add_special_tokens=True))[0].tolist() == plain(kind, written, special=True)


def test_several_texts_are_several_prompts(tmp_path: Path) -> None:
    made = local(tmp_path, "bos").prompts_of(text(["one", "two"]))
    assert [ids.tolist() for ids in made] == [plain("bos", "one", special=True), plain("bos", "two", special=True)]


def test_tools_and_template_arguments_change_the_text_and_the_servers_defaults_count(tmp_path: Path) -> None:
    made = local(tmp_path, defaults={"enable_thinking": False})
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    assert "# Tools" in made.rendered(chat(HI, [tool]))
    assert made.rendered(chat(HI)).endswith("<think></think>")
    assert not made.rendered(chat(HI, chat_template_kwargs={"enable_thinking": True})).endswith("<think></think>")
    assert not made.rendered(chat(HI, add_generation_prompt=False)).endswith("assistant\n")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_message_that_goes_on_has_no_end(tmp_path: Path, engine: Engine) -> None:
    going_on = [*HI, {"role": "assistant", "content": "Once upon"}]
    options = {"continue_final_message": True, "add_generation_prompt": engine == "sglang"}
    written = local(tmp_path, engine=engine).rendered(chat(going_on, **options))
    assert written.endswith("<|im_start|>assistant\nOnce upon")


@pytest.mark.parametrize(
    ("last", "kept"),
    [("Once ", "Once "), (" Once", "Once"), (" Once ", "Once"), ("Once\n\n", "Once\n\n"), ("a user", "a user")],
)
def test_a_message_that_goes_on_keeps_the_spaces_transformers_leaves_it(tmp_path: Path, last: str, kept: str) -> None:
    """Space behind it stays, unless there is space before it too: then the library cuts both."""
    options = {"continue_final_message": True, "add_generation_prompt": False}
    written = local(tmp_path).rendered(chat([*HI, {"role": "assistant", "content": last}], **options))
    before = "" if last == last.lstrip() else " "
    assert written.endswith("<|im_start|>assistant\n" + before + kept)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content | upper }}"])
@pytest.mark.parametrize("last", ["Once upon", "", "  "])
def test_a_message_that_goes_on_but_is_not_in_the_text_has_no_tokens(tmp_path: Path, template: str, last: str) -> None:
    going_on = [*HI, {"role": "assistant", "content": last}]
    with pytest.raises(NoTokens) as caught:
        local(tmp_path, template=template).rendered(chat(going_on, continue_final_message=True))
    assert caught.value.why is Unread.TEMPLATE


@pytest.mark.parametrize("kind", ["bytes", "bos"])
@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, True, False),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True}, True, True),
        ({"tokenizer_class": "GemmaTokenizerFast", "add_bos_token": False}, False, False),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<nowhere>"}, None, False),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": None}, None, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, None, False),
        ({"add_bos_token": False, "tokenizer_class": None}, None, False),
    ],
)
def test_classes_that_add_a_beginning_by_settings_do_so_whatever_the_file_says(
    tmp_path: Path, kind: str, settings: dict[str, Any], before: bool | None, after: bool
) -> None:
    """`before` None: the settings do not count, and the file adds its own beginning where it has one."""
    made = local(tmp_path, kind, **settings)
    number = a_tokenizer().token_to_id
    begins = before if before is not None else kind == "bos"
    expected = [number("<s>")] * begins + plain(kind, "the quick", special=False) + [number("<|im_end|>")] * after
    assert made.prompts_of(text("the quick"))[0].tolist() == expected
    assert made.prompts_of(text("the quick", add_special_tokens=False))[0].tolist() == plain(
        kind, "the quick", special=False
    )


@pytest.mark.parametrize("kind", ["bytes", "bos", "spaces"])
def test_a_template_that_writes_the_beginning_gets_no_second_one(tmp_path: Path, kind: str) -> None:
    made = local(tmp_path, kind, template="{{ bos_token }}" + CHATML, tokenizer_class="LlamaTokenizerFast")
    ids = made.prompts_of(chat(HI))[0].tolist()
    assert (ids[0], ids.count(ids[0])) == (a_tokenizer(kind).token_to_id("<s>"), 1)


def test_a_template_beside_the_tokenizer_counts_before_the_one_in_its_settings(tmp_path: Path) -> None:
    folder = a_directory(tmp_path, template="in settings")
    (folder / "chat_template.jinja").write_text("in a file")
    assert LocalTokenizer(folder, engine="vllm", defaults={}, limit_bytes=0).rendered(chat(HI)) == "in a file"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert local(tmp_path / "named", template=named).rendered(chat(HI, [{"function": {}}])) == "tools"


def test_pieces_are_cut_where_this_tokenizer_allows_it(tmp_path: Path) -> None:
    made = local(tmp_path)
    made.prompts_of(chat(HI))
    once = made.pieces.encoded_tokens
    made.prompts_of(chat([*HI, {"role": "assistant", "content": "no"}]))
    assert made.pieces.reused_tokens >= once - 5  # all but the beginning of an answer
    assert made.pieces.split("a<|im_start|>b") == ["a", "<|im_start|>b"]


def test_a_model_without_a_chat_template_still_takes_completions(tmp_path: Path) -> None:
    made = local(tmp_path, template=None)
    assert made.prompts_of(text("one"))
    with pytest.raises(NoTokens) as caught:
        made.prompts_of(chat(HI))
    assert caught.value.why is Unread.TEMPLATE


@pytest.mark.parametrize("prompt", [5, [], ["one", 2], {"a": 1}])
def test_a_prompt_that_is_no_text_has_no_tokens(tmp_path: Path, prompt: Any) -> None:
    with pytest.raises(NoTokens):
        local(tmp_path).prompts_of(text(prompt))


def test_a_directory_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    def loaded() -> LocalTokenizer:
        return LocalTokenizer(tmp_path, engine="vllm", defaults={}, limit_bytes=0)

    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        loaded()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        loaded()
    a_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        loaded()


def test_nothing_is_missing_where_these_tests_run() -> None:
    assert missing_packages() == []
    assert "im_start" in CHATML
