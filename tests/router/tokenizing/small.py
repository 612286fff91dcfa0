"""A small tokenizer and a chat template, trained and written here; nothing is downloaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
pytest.importorskip("jinja2", reason="the package jinja2 is not installed")

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CORPUS = [
    "the quick brown fox jumps over the lazy dog. user assistant system\n",
    "def f(x): return x ** 2  # größer, naïve; 你好，世界\n",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {}}}\n',
] * 30
CHATML = """
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}"""


@cache
def _trained(kind: str) -> str:
    """`tokenizer.json` of a byte-level tokenizer, one that begins texts with BOS, or one with `▁` for spaces."""
    models, pre, trainers = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.trainers
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "spaces", unk_token=None))
    alphabet: list[str] = []
    if kind == "spaces":
        tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first")
    else:
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "bos":
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return str(tokenizer.to_str())


def a_tokenizer(kind: str = "bytes", **added: dict[str, Any]) -> Any:
    """A new tokenizer of one kind. added : tokens on top, with their flags"""
    tokenizer = tokenizers.Tokenizer.from_str(_trained(kind))
    tokenizer.add_tokens([tokenizers.AddedToken(flags.pop("content"), **flags) for flags in added.values()])
    return tokenizer


def a_directory(folder: Path, kind: str = "bytes", template: Any = CHATML, **settings: Any) -> Path:
    """A model's directory as its publisher ships it."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(kind), encoding="utf-8")
    config = {"chat_template": template, "eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
