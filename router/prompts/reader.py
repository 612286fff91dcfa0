"""Turns a request into facts: model, prompt, limits. The body itself is never changed.

Token ids give an exact chain at once. Text is a question (`Question`) that somebody with a tokenizer answers; without
one its length is guessed from its characters, and its blocks are blocks of text or unknown. The router says "unknown"
rather than guess, and the engine remains the judge of every field not needed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from estimators.request import RequestFacts
from router.actions import Refuse
from router.identity import Identity
from router.names import ModelNames
from router.prompts.body import (
    LONGEST_NAME,
    PROMPT_FIELDS,
    Body,
    continued_by,
    decoded,
    ids_given,
    limit_of,
    model_of,
    own_id_of,
    prompts_in,
    salt_of,
)
from router.prompts.forms import text_parts
from router.prompts.sizes import CharactersPerToken, characters_of
from router.prompts.wishes import Wishes, wishes_of
from router.request_ids import kept_or_made
from router.routes import Route, classify
from router.tokenizing.asked import Form, Tokenised, Wanted, tokenised
from router.tokenizing.chunks import BLOCKS_IN_A_CHUNK, chunk_chain

LARGEST_WALK = 4 * 1024 * 1024  # bytes of JSON that are looked into; above, its length stands for its text
_SAMPLE_BYTES = 64 * 1024


class Head(Protocol):
    """What is read of a request's head."""

    @property
    def path(self) -> str: ...
    @property
    def method(self) -> bytes: ...
    @property
    def client(self) -> str: ...
    def get(self, name: bytes) -> bytes | None: ...


@dataclass(slots=True)
class Question:
    """A generation request whose prompt is still to be turned into blocks.

    base : model whose cache is meant; root : of the chain, made of its identity
    wishes : of its head
    """

    head: Head
    fields: Body
    request_id: str
    model: str
    base: str
    root: int
    wishes: Wishes


class PromptReader:
    """Turns a request into facts.

    block_tokens : tokens in one block of the pool, >= 1
    names : whose cache a model name means
    characters_per_token : how text is sized; somebody else teaches it
    chunks : whether text that nobody tokenises gets blocks of text, see `chunks.py`
    tenant_field : lower-case name of the field that says for whom a request is; None: nobody says
    largest_walk : bytes of JSON that are looked into to size their text; 0 where lengths matter to nobody
    unit_field : likewise of the one that an experiment assigns requests by
    """

    def __init__(
        self,
        block_tokens: int,
        names: ModelNames | None = None,
        characters_per_token: CharactersPerToken | None = None,
        *,
        chunks: bool = False,
        tenant_field: bytes | None = None,
        largest_walk: int = LARGEST_WALK,
        unit_field: bytes | None = None,
    ) -> None:
        self._largest_walk = largest_walk
        self._tenant_field = tenant_field
        self._unit_field = unit_field
        self.block_tokens = block_tokens
        self._names = names or ModelNames()
        self._characters_per_token = characters_per_token or CharactersPerToken()
        self._chunks = chunks

    def facts_of(self, head: Head, body: bytes) -> RequestFacts | Refuse:
        """Facts of one request without a tokenizer, or the refusal of a body that is not JSON."""
        question = self.question_of(head, body)
        if not isinstance(question, Question):
            return question
        ids = ids_given(question.fields)
        return (self.by_ids(question, ids) if ids is not None else None) or self.by_length(question)

    def question_of(self, head: Head, body: bytes) -> Question | RequestFacts | Refuse:
        """What is to be answered about a request; facts at once where it runs no prefill."""
        if classify(head.method, head.path) is not Route.GENERATE:
            return self.without_prompt(head, model_of(body))
        try:
            fields = decoded(body)
        except (ValueError, RecursionError) as exc:
            return not_json(exc)
        return self.question_about(head, fields)

    def question_about(self, head: Head, fields: Body) -> Question | Refuse:
        """The same for a generation whose fields are known."""
        if fields.model is not None and not isinstance(fields.model, str):
            return Refuse(400, "BadRequestError", "`model` must be a string", param="model")
        wishes = wishes_of(head, self._tenant_field, self._unit_field)
        if isinstance(wishes, Refuse):
            return wishes
        model = fields.model or ""
        base, adapter = self._names.resolve(model)
        root = root_of(base, adapter, salt_of(fields), self.block_tokens)
        return Question(head, fields, kept_or_made(head.get(b"x-request-id")), model, base, root, wishes)

    def by_ids(self, question: Question, ids: memoryview) -> RequestFacts | Refuse | None:
        """Facts of a prompt given as token ids; None when they are something else after all."""
        prompts = prompts_in(ids)
        if prompts is None:
            return None
        try:
            return self.by_tokens(question, tokenised(prompts, Wanted(question.root, self.block_tokens)), None)
        except ValueError as exc:
            return bad_prompt(exc)

    def by_tokens(
        self, question: Question, tokens: Tokenised, form: Form | None, *, trusted: bool = True
    ) -> RequestFacts:
        """Facts of a prompt whose tokens are known.

        form : what the router made them of; None when the client gave them
        trusted : whether the engine counts the same tokens; if not, they are no more than a guess of the length
        """
        return self._facts(
            question,
            chain=tokens.blocks if trusted else [],
            prompt_tokens=tokens.tokens,
            prompt_exact=trusted,
            tokenised="" if form is None or tokens.prompts > 1 else form.value,
        )

    def by_length(
        self, question: Question, size: tuple[int, bool] | None = None, *, scored: bool = True
    ) -> RequestFacts:
        """Facts of a prompt whose tokens are not known.

        size : its characters, and whether text is all there is; looked for in the body when None
        scored : whether it may get blocks of text
        """
        characters, pure = size if size is not None else size_of(question.fields, self._largest_walk)
        tokens = self._characters_per_token.tokens_in(characters)
        chain = self._chunks_of(question, tokens) if scored else []
        return self._facts(
            question,
            chain=chain,
            chain_of_text=bool(chain),
            prompt_tokens=tokens,
            prompt_exact=False,
            prompt_characters=characters if pure else 0,
        )

    def by_count(self, question: Question, tokens: int) -> RequestFacts:
        """Facts of a prompt of about that many token ids, which nobody read."""
        return self._facts(question, prompt_tokens=tokens, prompt_exact=False)

    def without_prompt(self, head: Head, model: str) -> RequestFacts:
        """Facts of a request that runs no prefill."""
        return RequestFacts(
            request_id=kept_or_made(head.get(b"x-request-id")),
            model=model,
            generates=False,
            explain=head.get(b"x-tfirst-explain") == b"1",
            path=head.path,
            block_tokens=self.block_tokens,
            session=session_of(head, None),
            client=head.client,
        )

    def _chunks_of(self, question: Question, tokens: int) -> list[int]:
        if not self._chunks:
            return []
        parts = text_parts(question.fields)
        block_tokens = BLOCKS_IN_A_CHUNK * self.block_tokens
        return chunk_chain(question.root, parts, block_tokens=block_tokens, prompt_tokens=tokens)

    def _facts(
        self,
        question: Question,
        *,
        prompt_tokens: int,
        prompt_exact: bool,
        chain: list[int] | None = None,
        chain_of_text: bool = False,
        prompt_characters: int = 0,
        tokenised: str = "",
    ) -> RequestFacts:
        fields, head = question.fields, question.head
        return RequestFacts(
            request_id=question.request_id,
            model=question.model,
            base_model=question.base,
            chain=chain or [],
            chain_of_text=chain_of_text,
            prompt_tokens=prompt_tokens,
            prompt_exact=prompt_exact,
            prompt_characters=prompt_characters,
            tokenised=tokenised,
            max_tokens=limit_of(fields),
            streams=fields.stream is True,
            own_id=own_id_of(fields),
            continues=continued_by(fields),
            explain=head.get(b"x-tfirst-explain") == b"1",
            path=head.path,
            block_tokens=self.block_tokens * (BLOCKS_IN_A_CHUNK if chain_of_text else 1),
            session=session_of(head, fields.session_id),
            client=head.client,
            priority=question.wishes.priority,
            tenant=question.wishes.tenant,
            deadline_s=question.wishes.deadline_s,
            pace_deadline_s=question.wishes.pace_deadline_s,
            policy=question.wishes.policy,
            unit=question.wishes.unit,
        )


def size_of(fields: Body, largest_walk: int = LARGEST_WALK) -> tuple[int, bool]:
    """Characters of text in a prompt, and whether text is all there is.

    largest_walk : bytes of a field that is looked into; a longer one counts by its length
    """
    walked = fields.given(PROMPT_FIELDS)
    if not largest_walk:
        return sum(map(len, walked.values())) + len(fields.raw("tools")), False
    unread = 0
    for name in [name for name, view in walked.items() if len(view) > largest_walk]:
        unread += len(walked.pop(name))
    characters, pure = characters_of(walked, len(fields.raw("tools")) + unread)
    return characters, pure and not unread


@lru_cache(maxsize=1024)
def root_of(model: str, adapter: str, salt: str, block_tokens: int) -> int:
    """`Identity.root` of prompts; few are met again and again."""
    return Identity(model, adapter=adapter, salt=salt, block_tokens=block_tokens).root()


def ids_in_sample(ids: memoryview) -> int:
    """About how many token ids a long JSON list holds, from its beginning."""
    sample = bytes(ids[:_SAMPLE_BYTES])
    return max(1, sample.count(b",") * len(ids) // max(1, len(sample)))


def session_of(head: Head, said: object) -> str | None:
    """What names the conversation: the header, else the body's `session_id` if it is a text."""
    name = text_of(head.get(b"x-session-id")) or (said if isinstance(said, str) else "")
    return name if 0 < len(name) <= LONGEST_NAME else None


def text_of(value: bytes | None) -> str:
    """A header value as text; bytes outside ASCII are kept one to one."""
    return "" if value is None else value.decode("latin-1").strip()


def not_json(exc: Exception) -> Refuse:
    return Refuse(400, "BadRequestError", f"The request body is not a JSON object: {exc}")


def bad_prompt(exc: Exception) -> Refuse:
    return Refuse(400, "BadRequestError", f"`prompt`: {exc}", param="prompt")
