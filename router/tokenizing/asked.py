"""What is asked of a tokenizer, what it answers, and why it may have no answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from router.errors import RouterError
from router.identity import chain

_encode = msgspec.json.Encoder().encode


class Form(Enum):
    """How a prompt is put into words. Engines treat each in a way of their own, so each agrees or not by itself."""

    TEXT = "text"  # completions: one text, or several
    CHAT = "chat"
    TOOLS = "tools"  # chat with tool definitions
    RESPONSES = "responses"
    MESSAGES = "messages"


class Unread(Enum):
    """Why a prompt is placed without its tokens. A closed set: each becomes a metric label."""

    FORM = "form"  # a shape the router does not turn into the engine's text
    MEDIA = "media"  # images, sound, embeddings: more than tokens decides about their state
    OWN_TEMPLATE = "own_template"  # the client brought its own chat template
    TRUNCATED = "truncated"  # the engine was asked to cut the prompt
    STORED = "stored"  # part of the prompt lies with the engine
    TOO_LARGE = "too_large"  # its body, or a field in it, is over the limit for cache scoring
    NO_TOKENIZER = "no_tokenizer"  # none is configured for this model
    TEMPLATE = "template"  # the chat template refused it, or there is none
    LATE = "late"  # not tokenised within its time
    BUSY = "busy"  # too many prompts wait already
    WORKER_LOST = "worker_lost"  # the process that tokenises ended
    UNAVAILABLE = "unavailable"  # the engine's tokenizer does not answer, or nonsense
    FAILED = "failed"  # the engine's tokenizer, or the router's, fails at this very prompt
    UNAUTHORISED = "unauthorised"  # it wants a key
    DISAGREES = "disagrees"  # the engine counts other tokens than the router does


class NoTokens(RouterError):
    """A prompt whose tokens the router does not know; it is placed by load and length."""

    def __init__(self, why: Unread, detail: str = "") -> None:
        super().__init__(f"{why.value}: {detail}" if detail else why.value)
        self.why = why
        self.detail = detail


class Asked(msgspec.Struct, frozen=True):
    """One request's prompt, in the JSON it came in.

    model : base model, whose tokenizer is meant; name : the name an engine knows it by
    prompt : a text or a list of texts; system : `system` or `instructions`
    options : other fields that change the tokens, as decoded
    """

    form: Form
    model: str
    name: str
    prompt: bytes = b""
    messages: bytes = b""
    system: bytes = b""
    tools: bytes = b""
    options: dict[str, Any] = {}


class Tokenised(msgspec.Struct, frozen=True):
    """A prompt as the engine sees it.

    tokens : of all its prompts together; prompts : how many those are
    blocks : chain of the longest, whose state is worth most
    ids : JSON list of its tokens, when they were asked for and it is the only one
    """

    tokens: int
    blocks: list[int]
    prompts: int = 1
    ids: bytes | None = None


class Wanted(msgspec.Struct, frozen=True):
    """What is to be made of the tokens.

    root : of the chain, see `Identity`
    ids : whether the tokens themselves are wanted
    authorization : the client's own, for calls made on its behalf
    size_bytes : of the body; decides on time limit and worker
    """

    root: int
    block_tokens: int
    ids: bool = False
    authorization: str = ""
    size_bytes: int = 0


class TokenSource(Protocol):
    """Turns prompts into tokens, off the event loop."""

    async def tokens_of(self, asked: Asked, body: bytes, wanted: Wanted) -> Tokenised:
        """Tokens of one request. Raises `NoTokens`; never takes longer than its time."""
        ...


def tokenised(prompts: Sequence[Sequence[int]], wanted: Wanted) -> Tokenised:
    """Blocks of one prompt or several.

    An engine always computes the last token, so a block that ends with it is never reused.

    Raises
    ------
    ValueError : a token id is not an integer from 0 to 2**32-1
    """
    longest = max(prompts, key=len)
    for other in prompts:
        if other is not longest:
            chain(0, other, max(1, len(other)))  # every id is checked
    whole = array("I", longest) if isinstance(longest, array) else longest
    return Tokenised(
        tokens=sum(map(len, prompts)),
        blocks=chain(wanted.root, whole[:-1], wanted.block_tokens),
        prompts=len(prompts),
        ids=_encode(list(longest)) if wanted.ids and len(prompts) == 1 else None,
    )
