"""A model's own tokenizer and chat template, read from a directory as it comes from the model's publisher.

Model     completions get the tokenizer's own beginning and end (BOS), which for some classes the settings say and not
          the file; conversations get only what the template writes
Valid     `tokenizer.json` of Hugging Face `tokenizers`, `tokenizer_config.json` and, where there is one,
          `chat_template.jinja`; fields the engine's server was given as defaults have to be configured here too
Blind to  tokenizers in another form (tekken, tiktoken files); limits on length, which the engine enforces
Source    transformers 4.57; engines' own preparations are in `messages.py`
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from router.tokenizing.asked import Asked, Form, NoTokens, Unread
from router.tokenizing.messages import Engine, as_engine_does, conversation_of
from router.tokenizing.segments import AddedToken, Pieces, places_to_cut
from router.tokenizing.template import ChatTemplate

PACKAGES = ("tokenizers", "jinja2")
_PROBES = ("a b", "x, y")
_ENDS_BY_SETTINGS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
_AROUND_A_CUT = (("the end", "user\nThe"), (" ", " next"), ("\n", "\n\n"), ("Größe 好", "é 1"))


def missing_packages() -> list[str]:
    """Packages a local tokenizer needs and this installation lacks."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


class LocalTokenizer:
    """Tokens of prompts, as the engine makes them of the same prompts.

    directory : of the model's tokenizer
    engine : whose preparations of a conversation are followed
    defaults : template arguments the engine's server was started with
    limit_bytes : what kept pieces may take
    limited : see `ChatTemplate`

    Raises
    ------
    ValueError : a file is missing or cannot be read; one sentence
    """

    def __init__(
        self,
        directory: Path,
        *,
        engine: Engine,
        defaults: dict[str, Any],
        limit_bytes: int,
        limited: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._tokenizer = _load(directory / "tokenizer.json")
        self._engine: Engine = engine
        self._defaults = defaults
        settings = _settings(directory)
        named = _special_tokens(settings)
        self._template = ChatTemplate(_templates(directory, settings), named, limited=limited)
        added = [_added(token) for token in self._tokenizer.get_added_tokens_decoder().values()]
        cuts = places_to_cut(added, self._template.text)
        self.pieces = Pieces(self._encode, cuts if self._may_cut(cuts) else [], limit_bytes=limit_bytes)
        self._ends = self._ends_by_settings(settings, named) or self._ends_of_a_text()

    def prompts_of(self, asked: Asked) -> list[array[int]]:
        """Tokens of each prompt of a request.

        Raises
        ------
        NoTokens : the router does not know what the engine makes of it
        """
        if asked.form is Form.TEXT:
            whole = asked.options.get("add_special_tokens") is not False
            return [self._text(text, whole) for text in _texts(asked)]
        return [self.pieces.tokens_of(self.rendered(asked)) if self._adds_nothing(asked) else self._whole(asked)]

    def rendered(self, asked: Asked) -> str:
        """The text of a conversation."""
        said = conversation_of(asked)
        options = {**self._defaults, **_arguments(asked)}
        going_on = options.pop("continue_final_message", False) is True
        choice = asked.options.get("tool_choice")
        made = as_engine_does(said, self._engine, takes_parts=self._template.takes_parts, tool_choice=choice)
        render = self._template.render
        if not going_on or made.messages[-1]["role"] != "assistant":
            return render(made.messages, made.tools, **options)
        last = made.messages[-1]["content"]
        if not isinstance(last, str):
            raise NoTokens(Unread.FORM, "a message in parts that goes on")
        if self._engine == "sglang":
            return render(made.messages[:-1], made.tools, **options) + last
        return _cut_behind(render(made.messages, made.tools, **options), last)

    def _adds_nothing(self, asked: Asked) -> bool:
        return asked.options.get("add_special_tokens") is not True

    def _whole(self, asked: Asked) -> array[int]:
        return self._text(self.rendered(asked), True)

    def _text(self, text: str, whole: bool) -> array[int]:
        if not whole:
            return self.pieces.tokens_of(text)
        if self._ends is None:
            return array("I", self._tokenizer.encode(text, add_special_tokens=True).ids)
        before, after = self._ends
        return before + self.pieces.tokens_of(text) + after

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return (encoding.ids for encoding in encodings)

    def _may_cut(self, cuts: list[str]) -> bool:
        """Whether this tokenizer does treat the pieces of a text alone, on a text with every place to cut."""
        text = "".join(f"{lead}{cut}{trail}" for cut in cuts for lead, trail in _AROUND_A_CUT)
        pieces = Pieces(self._encode, cuts, limit_bytes=0)
        return pieces.tokens_of(text) == array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _ends_by_settings(
        self, settings: dict[str, Any], named: dict[str, str]
    ) -> tuple[array[int], array[int]] | None:
        """The same where the class that reads the file puts what the settings say in place of what the file says."""
        if str(settings.get("tokenizer_class")).removesuffix("Fast") not in _ENDS_BY_SETTINGS:
            return None
        before, after = array("I"), array("I")
        for end, key, usual in ((before, "bos_token", True), (after, "eos_token", False)):
            if settings.get(f"add_{key}", usual):
                number = self._tokenizer.token_to_id(named.get(key, ""))
                if number is None:
                    return None  # the class would not load this; the file says what there is
                end.append(number)
        return before, after

    def _ends_of_a_text(self) -> tuple[array[int], array[int]] | None:
        """Tokens put before and after a text; None when that cannot be said of all texts."""
        found = set()
        for probe in _PROBES:
            whole = tuple(self._tokenizer.encode(probe, add_special_tokens=True).ids)
            plain = tuple(self._tokenizer.encode(probe, add_special_tokens=False).ids)
            starts = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
            if not starts:
                return None
            found.add((whole[: starts[0]], whole[starts[0] + len(plain) :]))
        if len(found) > 1:
            return None
        before, after = found.pop()
        return array("I", before), array("I", after)


def _arguments(asked: Asked) -> dict[str, Any]:
    """What the request itself hands to the template."""
    given = asked.options
    made: dict[str, Any] = {"add_generation_prompt": given.get("add_generation_prompt") is not False}
    for key in ("continue_final_message", "reasoning_effort"):
        if key in given:
            made[key] = given[key]
    own = given.get("chat_template_kwargs")
    return {**made, **own} if isinstance(own, dict) else made


def _texts(asked: Asked) -> list[str]:
    texts = json.loads(asked.prompt)
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise NoTokens(Unread.FORM, "a prompt that is neither text nor a list of texts")
    return texts


def _cut_behind(rendered: str, last: str) -> str:
    """The text up to the end of its last message, so that the model goes on with it."""
    stripped = last.strip()
    at = rendered.rfind(stripped)
    if not stripped or at < 0:
        raise NoTokens(Unread.TEMPLATE, "the template changes the message that goes on")
    if rendered[at : at + len(last.lstrip())] == last:  # sic: a message with space before it loses the space behind it
        return rendered[: at + len(last.lstrip())]
    return rendered[: at + len(stripped)]


# Files


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no tokenizer.json")
    tokenizers = importlib.import_module("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises the bare class
        raise ValueError(f"{path} cannot be read: {exc}") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _settings(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json` over `special_tokens_map.json`; either may be missing."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            try:
                read = json.loads(path.read_bytes())
            except ValueError as exc:
                raise ValueError(f"{path} cannot be read: {exc}") from exc
            settings |= read if isinstance(read, dict) else {}
    return settings


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    given = settings.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given if isinstance(entry, dict)}
    return {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The named special tokens as text; they are written as text or as an object around one."""
    made: dict[str, str] = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            made[key] = text
    return made


def _added(token: Any) -> AddedToken:
    return AddedToken(
        content=token.content,
        special=token.special,
        normalized=token.normalized,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )
