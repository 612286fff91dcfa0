from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from router.tokenizing.asked import NoTokens, Unread
from router.tokenizing.template import ChatTemplate, TakesTooLong
from tests.router.tokenizing.small import CHATML

HI = [{"role": "user", "content": "hi"}]


def a_template(source: str | dict[str, str], **special: str) -> ChatTemplate:
    sources = {"default": source} if isinstance(source, str) else source
    return ChatTemplate(sources, special, now=lambda: datetime(2026, 3, 4))


def rendered(source: str | dict[str, str], messages: Any = HI, tools: Any = None, **options: Any) -> str:
    return a_template(source).render(messages, tools, **options)


def test_a_conversation_is_written_as_its_template_says() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert rendered(CHATML, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_arguments_and_special_tokens_reach_the_template() -> None:
    assert rendered(CHATML, add_generation_prompt=True, enable_thinking=False).endswith("<think></think>")
    assert a_template("{{ bos_token }}{{ x }}", bos_token="<s>").render(HI, None, x=3) == "<s>3"


def test_json_is_written_without_html_escapes_and_in_the_order_it_came() -> None:
    assert rendered("{{ tools | tojson }}", tools=[{"b": "<ä'>", "a": 1}]) == '[{"b": "<ä\'>", "a": 1}]'
    assert rendered("{{ tools | tojson(indent=1) }}", tools=[1]) == "[\n 1\n]"


def test_blocks_are_trimmed_loops_can_be_left_and_training_marks_are_passed_over() -> None:
    source = "{% for m in [1, 2, 3] %}\n  {% if m == 2 %}{% break %}{% endif %}\n{{ m }}\n{% endfor %}"
    assert rendered(source) == "1\n"
    assert rendered("{% generation %}said{% endgeneration %}") == "said"


def test_the_date_is_that_of_the_clock_it_was_given() -> None:
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "04 Mar 2026"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.there }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox
        "{{ messages.append(1) }}",  # and that it is immutable
    ],
)
def test_a_template_that_refuses_or_misbehaves_gives_no_tokens(source: str) -> None:
    with pytest.raises(NoTokens) as caught:
        rendered(source)
    assert caught.value.why is Unread.TEMPLATE


def test_a_rendering_whose_time_is_up_gives_no_tokens() -> None:
    @contextmanager
    def limited() -> Iterator[None]:
        yield
        raise TakesTooLong

    template = ChatTemplate({"default": "said"}, {}, limited=limited)
    with pytest.raises(NoTokens, match="does not come to an end") as caught:
        template.render(HI, None)
    assert caught.value.why is Unread.TEMPLATE


def test_without_a_template_there_are_no_tokens() -> None:
    with pytest.raises(NoTokens, match="no chat template"):
        rendered({})


def test_tools_have_a_template_of_their_own_where_there_is_one() -> None:
    sources = {"default": "plain", "tool_use": "with tools"}
    assert rendered(sources, tools=[{}]) == "with tools"
    assert rendered(sources) == "plain"


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (CHATML, False),
        ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{{ raise_exception('never') }}", False),
    ],
)
def test_whether_a_template_loops_over_parts_is_found_out(source: str, takes_parts: bool) -> None:
    assert a_template(source).takes_parts is takes_parts
