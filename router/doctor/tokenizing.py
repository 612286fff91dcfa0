"""Are the router's tokens the engine's? One text through the engine's /tokenize and through a local tokenizer.

Model     the engine's answer is the truth; the local tokenizer must give the same ids, special tokens included
Valid     vLLM's /tokenize; SGLang's /v1/tokenize from 0.5.6
Blind to  chat templates: only a plain prompt is compared
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from router.doctor.ask import Asker, Reply
from router.doctor.facts import Engine, TokenFacts
from router.errors import ConfigError

Encode = Callable[[str], Sequence[int]]

# Letters, digits, white space, other scripts and an emoji: what tokenizers treat differently.
SAMPLE = "Hello, world! 12345 tokens\n\tdéjà vu; 路由器 选择 副本 🙂 end."


def local_tokenizer(directory: Path) -> Encode:
    """The tokenizer in `directory/tokenizer.json`.

    Raises
    ------
    ConfigError : there is none, it cannot be read, or the package that reads it is not installed
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer: there is no {path}")
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError as exc:
        raise ConfigError("--tokenizer needs the package tokenizers: pip install 'tfirst[tokenizers]'") from exc
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for whatever is wrong with a file
        raise ConfigError(f"--tokenizer: {path} cannot be read: {' '.join(str(exc).split())}") from exc

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return encode


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that is not the same, the end of the shorter included; None when all are."""
    pairs = enumerate(zip_longest(one, other))
    return next((place for place, (left, right) in pairs if left != right), None)


async def compare(asker: Asker, encode: Encode | None, *, model: str, engine: Engine | None) -> TokenFacts:
    """Have the engine tokenize `SAMPLE`, and compare."""
    path, reply = await _tokenized(asker, model, engine)
    trouble = reply.json_trouble(path)
    answer = reply.json()
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if trouble is None and (not isinstance(tokens, list) or not all(type(token) is int for token in tokens)):
        trouble = f"{path} answered without a list of tokens"
    if trouble is not None or tokens is None:
        return TokenFacts(trouble=trouble)
    if encode is None:
        return TokenFacts(engine_tokens=len(tokens))
    own = encode(SAMPLE)
    return TokenFacts(engine_tokens=len(tokens), local_tokens=len(own), first_difference=first_difference(tokens, own))


async def _tokenized(asker: Asker, model: str, engine: Engine | None) -> tuple[str, Reply]:
    body: dict[str, Any] = {"model": model, "prompt": SAMPLE}
    if engine == "sglang":
        reply = await asker.post("/v1/tokenize", body)
        if reply.status != 404:
            return "/v1/tokenize", reply
    else:
        body["add_special_tokens"] = True
    return "/tokenize", await asker.post("/tokenize", body)
