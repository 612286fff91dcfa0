"""Reads every request's prompt: at once where that is quick, beside the event loop where it is not.

Model     token ids in a small body are read where they are; text goes to the token source; a body over 256 KiB is
          scanned in slices and its prompt read by another process; over 4 MiB, or with an odd field of more than
          64 KiB, only its fields are, and it is placed by length. Whatever goes wrong, the request is placed
Valid     inside a running loop; a read never takes longer than the source's limit and the scan of its body
Blind to  what the engine makes of it: `agreement.py` compares
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine

from estimators.request import RequestFacts
from router.actions import Refuse
from router.http.contract import Rewritten
from router.prompts.agreement import Agreement, State
from router.prompts.body import Body, ids_at_top, ids_given, salt_of
from router.prompts.forms import asked_of, text_parts
from router.prompts.reader import LARGEST_WALK, Head, PromptReader, Question, bad_prompt, ids_in_sample, not_json
from router.prompts.scan import Span, body_at, in_slices, left_out, spans_of
from router.routes import Route, classify
from router.tokenizing.asked import Asked, Form, NoTokens, TokenSource, Unread, Wanted
from router.tokenizing.workers import LARGE_BYTES, BadIds, Workers

Read = RequestFacts | Refuse | Rewritten
Told = Callable[[RequestFacts, bytes | memoryview, str], object]
SCANS_AT_ONCE = 4  # each takes about a millisecond of the loop, then lets others

_WORTH_A_WARNING = {
    Unread.UNAUTHORISED: "the engine's tokenizer wants a key (api_key_env)",
    Unread.NO_TOKENIZER: "no tokenizer is configured for a model that is asked for (prompts.tokenizer)",
    Unread.FAILED: "the engine's tokenizer fails at some prompts",
    Unread.TEMPLATE: "the chat template refuses conversations, or there is none",
    Unread.WORKER_LOST: "a process that reads prompts was lost",
    Unread.BUSY: "more prompts wait to be tokenised than may (prompts.most_waiting)",
}

log = logging.getLogger(__name__)


class PromptReading:
    """Turns bytes into facts, with whatever tokenizer there is.

    reader : the rules; workers : for what is too heavy for the loop
    source : who tokenises text; None: nobody
    agreement : whose tokens may be believed
    forwards : whether text of completions goes on as token ids
    took_s : told how long each read beside the loop took
    told : told the facts of each prompt whose tokens are known, their ids as JSON, and its salt
    """

    def __init__(
        self,
        reader: PromptReader,
        workers: Workers,
        *,
        source: TokenSource | None,
        agreement: Agreement,
        clock: Callable[[], float],
        forwards: bool = False,
        took_s: Callable[[float], object] = lambda seconds: None,
        told: Told | None = None,
    ) -> None:
        self._reader = reader
        self._workers = workers
        self._source = source
        self._agreement = agreement
        self._clock = clock
        self._forwards = forwards
        self._took_s = took_s
        self._told = told
        self._scanning = asyncio.Semaphore(SCANS_AT_ONCE)
        self._reads: set[asyncio.Task[Read]] = set()
        self._warned: set[Unread] = set()
        self.counts: Counter[str] = Counter()  # prompts by how they were read, or why not

    @property
    def under_way(self) -> int:
        """Requests that wait for their prompt to be read."""
        return len(self._reads)

    def read(self, head: Head, body: bytes) -> Read | asyncio.Task[Read]:
        """Facts of one request, a refusal, or the task that will have one of them. Cancel it when nobody waits."""
        if len(body) > LARGE_BYTES:
            return self._beside(self._read_large(head, body))
        question = self._reader.question_of(head, body)
        if not isinstance(question, Question):
            return question
        ids = ids_given(question.fields)
        facts = self._reader.by_ids(question, ids) if ids is not None else None
        if facts is not None:
            self.counts["ids"] += 1
            self._tell(question, facts, ids)
            return facts
        asked = self._asked(question)
        if isinstance(asked, Asked):
            return self._beside(self._read_text(question, asked, body))
        return self._by_length(question, asked)

    def _tell(self, question: Question, facts: RequestFacts | Refuse, ids: bytes | memoryview | None) -> None:
        if self._told is not None and ids is not None and isinstance(facts, RequestFacts):
            self._told(facts, ids, salt_of(question.fields))

    async def stop(self) -> None:
        """Give up every read under way."""
        for task in list(self._reads):
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)

    # Text

    def _asked(self, question: Question) -> Asked | Unread | None:
        """What to ask the source, why not, or None without a source."""
        if self._source is None:
            return None
        return asked_of(question.head.path, question.fields, model=question.base, name=question.model)

    async def _read_text(
        self, question: Question, asked: Asked, body: bytes, spans: dict[str, Span] | None = None
    ) -> Read:
        assert self._source is not None, "text is asked for where there is a source"
        state = self._agreement.state(asked.model, asked.form, self._clock())
        forwards = self._forwards and state is State.AGREES and may_forward(question.fields, asked)
        authorization = question.head.get(b"authorization")
        wanted = Wanted(
            question.root,
            self._reader.block_tokens,
            ids=forwards or self._told is not None,
            authorization="" if authorization is None else authorization.decode("latin-1"),
            size_bytes=len(body),
        )
        try:
            tokens = await self._source.tokens_of(asked, body, wanted)
        except NoTokens as exc:
            return await self._without_tokens(question, exc.why, body)
        except Exception:  # whatever goes wrong, the request is placed
            log.exception("a prompt could not be tokenised")
            return await self._without_tokens(question, Unread.FAILED, body)
        trusted = state is not State.DISAGREES
        self.counts["tokenised" if trusted else Unread.DISAGREES.value] += 1
        facts = self._reader.by_tokens(question, tokens, asked.form, trusted=trusted)
        self._tell(question, facts, tokens.ids)
        if forwards and tokens.ids is not None:
            return await self._with_ids(facts, body, tokens.ids, spans)
        return facts

    async def _with_ids(self, facts: RequestFacts, body: bytes, ids: bytes, spans: dict[str, Span] | None) -> Read:
        """The body with its `prompt` replaced by token ids, and not a byte else."""
        try:
            start, end = (spans or await self._spans_of(body))["prompt"]
        except ValueError:  # JSON in another encoding than UTF-8, which Python reads too: it goes on as it is
            return facts
        return Rewritten(facts, b"".join((body[:start], ids, body[end:])))

    async def _without_tokens(self, question: Question, why: Unread | None, body: bytes) -> RequestFacts:
        """Facts by length, which takes another process where the body is large."""
        if len(body) <= LARGE_BYTES:
            return self._by_length(question, why)
        fields = {str(at): bytes(part) for at, part in enumerate(text_parts(question.fields))}
        try:
            size = await self._workers.measure(fields, 0, len(body))
        except NoTokens:
            size = sum(map(len, fields.values())), False
        return self._by_length(question, why, size)

    def _by_length(self, question: Question, why: Unread | None, size: tuple[int, bool] | None = None) -> RequestFacts:
        facts = self._reader.by_length(question, size)
        self._count(why, "chunks" if facts.chain_of_text else "length")
        return facts

    def _count(self, why: Unread | None, otherwise: str) -> None:
        self.counts[otherwise if why is None else why.value] += 1
        if why in _WORTH_A_WARNING and why not in self._warned:
            self._warned.add(why)
            log.warning("some prompts are placed by load and length: %s", _WORTH_A_WARNING[why])

    # Large bodies

    async def _read_large(self, head: Head, body: bytes) -> Read:
        try:
            spans = await self._spans_of(body)
            fields = body_at(body, spans)
        except ValueError as exc:
            if classify(head.method, head.path) is Route.GENERATE:
                return not_json(exc)
            return self._reader.without_prompt(head, "")
        if classify(head.method, head.path) is not Route.GENERATE:
            return self._reader.without_prompt(head, fields.model if isinstance(fields.model, str) else "")
        question = self._reader.question_about(head, fields)
        if isinstance(question, Refuse):
            return question
        if len(body) > LARGEST_WALK or left_out(spans):
            return self._too_large(question)
        ids = ids_given(fields)
        if ids is not None:
            facts = await self._read_long_ids(question, ids, body)
            if facts is not None:
                return facts
        asked = self._asked(question)
        if isinstance(asked, Asked):
            return await self._read_text(question, asked, body, spans)
        return await self._without_tokens(question, asked, body)

    async def _spans_of(self, body: bytes) -> dict[str, Span]:
        """Where the fields lie; others get the loop after each slice. Raises `ValueError`.

        Only large bodies wait for each other: a small one is a few slices, and must not wait for seconds of theirs.
        """
        if len(body) <= LARGE_BYTES:
            return await in_slices(spans_of(body))
        async with self._scanning:
            return await in_slices(spans_of(body))

    async def _read_long_ids(self, question: Question, ids: memoryview, body: bytes) -> Read | None:
        wanted = Wanted(question.root, self._reader.block_tokens, size_bytes=len(body))
        try:
            tokens = await self._workers.read_ids(bytes(ids), wanted)
        except BadIds as exc:
            return bad_prompt(exc)
        except NoTokens as exc:
            if exc.why is Unread.FORM:
                return None
            self._count(exc.why, "")
            return self._reader.by_count(question, ids_in_sample(ids))
        self.counts["ids"] += 1
        facts = self._reader.by_tokens(question, tokens, None)
        self._tell(question, facts, ids)
        return facts

    def _too_large(self, question: Question) -> RequestFacts:
        self._count(Unread.TOO_LARGE, "")
        ids = ids_at_top(question.fields)
        if ids is not None:
            return self._reader.by_count(question, ids_in_sample(ids))
        length = sum(map(len, text_parts(question.fields)))
        return self._reader.by_length(question, (length, False), scored=False)

    # Tasks

    def _beside(self, read: Coroutine[object, object, Read]) -> asyncio.Task[Read]:
        task = asyncio.get_running_loop().create_task(self._timed(read), name="prompt")
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        return task

    async def _timed(self, read: Coroutine[object, object, Read]) -> Read:
        began_s = self._clock()
        try:
            return await read
        finally:
            self._took_s(self._clock() - began_s)


def may_forward(fields: Body, asked: Asked) -> bool:
    """Whether ids in place of this text make no other difference to the answer: one text, not echoed."""
    return (
        asked.form is Form.TEXT and asked.prompt.startswith(b'"') and not fields.echo and len(fields.raw("prompt")) > 0
    )
