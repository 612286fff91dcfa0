"""The chat template of a model, rendered as the `transformers` library does it.

Model     Jinja in an immutable sandbox, blocks trimmed, loop controls, `{% generation %}` passed over, `tojson` without
          HTML escapes, `raise_exception` and `strftime_now`
Valid     templates of `tokenizer_config.json` or `chat_template.jinja`; a list of named ones uses `tool_use` with tools
Blind to  encoders that are code rather than a template (Harmony, Mistral's own): the engine then counts other tokens,
          which the check against it shows
Source    transformers 4.57, utils/chat_template_utils.py
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any

from router.tokenizing.asked import NoTokens, Unread

_PROBE = "a text to look for"


class TakesTooLong(Exception):
    """Raised by a `limited` block whose time is up."""


class ChatTemplate:
    """One model's templates.

    sources : by name; "default" is one of them, or none renders without tools
    special_tokens : bos_token, eos_token and the like, which templates name
    now : wall clock, for templates that write the date
    limited : made anew for each rendering, which happens inside it; raises `TakesTooLong` there when that never ends
    """

    def __init__(
        self,
        sources: dict[str, str],
        special_tokens: dict[str, str],
        now: Callable[[], datetime] = datetime.now,
        *,
        limited: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._limited = limited
        environment = _environment(now)
        self._error: type[Exception] = importlib.import_module("jinja2").TemplateError
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._special_tokens = special_tokens
        self.text = "\n".join(sources.values())
        self.takes_parts = self._renders_parts()

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> str:
        """The text of a conversation.

        Raises
        ------
        NoTokens : there is no template, or it refused the conversation
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise NoTokens(Unread.TEMPLATE, "the tokenizer has no chat template")
        fields = {"documents": None, **self._special_tokens, **options}
        try:
            with self._limited():
                return str(template.render(messages=messages, tools=tools, **fields))
        except TakesTooLong:
            raise NoTokens(Unread.TEMPLATE, "it does not come to an end") from None
        except (self._error, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as exc:
            raise NoTokens(Unread.TEMPLATE, str(exc)) from exc

    def _renders_parts(self) -> bool:
        """Whether it loops over content parts, rather than print their list or leave them out."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            rendered = self.render([message], None, add_generation_prompt=True)
        except NoTokens:
            return False
        return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered


def _environment(now: Callable[[], datetime]) -> Any:
    """The sandbox a template runs in."""
    sandbox = importlib.import_module("jinja2.sandbox")
    nodes = importlib.import_module("jinja2.nodes")
    extensions = importlib.import_module("jinja2.ext")

    def parse(self: Any, parser: Any) -> Any:
        """Take `{% generation %}`, which marks what to train on, for what is in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)

    generation = type("Generation", (extensions.Extension,), {"tags": {"generation"}, "parse": parse})
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, extensions.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise importlib.import_module("jinja2").TemplateError(message)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
