"""What a client has seen of a stream, kept so that another replica can go on from there.

Model     whole events only are passed on, so that a cut never leaves half of one with the client. Of each its text
          (or its token ids, where the engine sends them) is kept, up to a limit
Valid     /v1/completions and /v1/chat/completions of vLLM and SGLang, one choice
          Tokens are exact with ids. Without, an event counts as one token, which is the least it can be: engines join
          tokens under load, with speculation, and until a character is whole
Costs     an event that comes in two pieces waits for its second; the body can no longer pass with the replica's own
          framing; one small decode for each event
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from router.resume.events import DONE, EventSplitter, data_of
from router.resume.reasons import WhyNot

Bytes = Annotated[int, msgspec.Meta(ge=1)]
_ID_BYTES = 8  # of a token id in the log


class ResumeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `resume`: whether broken streams go on from another replica, and what that may keep."""

    enabled: bool = False  # the body of a request is kept until its answer has ended
    max_log_bytes: Bytes = 256 * 1024  # of one stream's output: some 60,000 tokens; beyond, a break is shown
    max_event_bytes: Bytes = 64 * 1024  # held until it is whole; beyond, the stream passes as it comes
    template_strips: bool = True  # white space around a message, as Llama's do; false for ChatML: more streams go on
    max_resumes: Annotated[int, msgspec.Meta(ge=1)] = 2  # of one stream; each also takes from the retry budget


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    audio: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw()
    created: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    object: str | None = None
    prompt_token_ids: list[int] | None = None


_chunk = msgspec.json.Decoder(_Chunk)


class StreamLog:
    """Fed with a stream's body as it goes to its client, over all replicas that make it.

    `names` are the first event's `id`, `created` and `model`, as JSON; `why_not` is set once going on is impossible,
    and from then on the log is empty and everything passes as it comes.
    """

    __slots__ = (
        *("_bytes", "_config", "_events", "_parts", "_splitter", "_uncounted", "done", "finished"),
        *("names", "prompt_ids", "resumes", "role_sent", "token_ids", "unseen_end", "usage_sent", "why_not"),
    )

    def __init__(self, config: ResumeConfig) -> None:
        self._config = config
        self._splitter = EventSplitter()
        self._parts: list[str] = []
        self._bytes = 0
        self._events = 0  # that carried output
        self._uncounted = False  # some output came without its token ids
        self.names: dict[str, bytes] = {}
        self.token_ids: list[int] = []
        self.prompt_ids: list[int] | None = None  # as the first replica told them
        self.role_sent = False
        self.finished = False  # a finish_reason was sent
        self.unseen_end = False  # by a token without text, which is counted and not part of the text
        self.usage_sent = False
        self.done = False  # [DONE] was sent
        self.resumes = 0
        self.why_not: WhyNot | None = None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def tokens_exact(self) -> bool:
        """Whether `tokens` is a count rather than the least it can be."""
        return not self._uncounted

    @property
    def tokens(self) -> int:
        """Output tokens sent; at least, when not `tokens_exact`."""
        return self._events if self._uncounted else len(self.token_ids)

    @property
    def ids(self) -> list[int] | None:
        """Token ids of all that was sent, without one that only ended it; None when the engine did not tell them."""
        if self._uncounted:
            return None
        return self.token_ids[:-1] if self.unseen_end and self.token_ids else self.token_ids

    def feed(self, piece: bytes) -> bytes:
        """The next bytes of the body without their framing; returns what may go to the client now."""
        if self.why_not is not None:
            return piece
        events = self._splitter.feed(piece)
        for event in events:
            self._note(data_of(event))
            if self.why_not is not None:
                break
        if len(self._splitter.held) > self._config.max_event_bytes:
            self._give_up(WhyNot.OVERFLOW)
        passed = b"".join(events)
        return passed if self.why_not is None else passed + self._take_held()

    def end(self) -> bytes:
        """What is held when the stream ends well, or breaks and does not go on."""
        return self._take_held()

    def broke(self) -> None:
        """Another replica is about to go on: the half event of the dead one is dropped."""
        self._take_held()
        self.resumes += 1

    def _take_held(self) -> bytes:
        held, self._splitter.held = self._splitter.held, b""
        return held

    def _note(self, data: bytes) -> None:
        if not data:
            return
        if data == DONE:
            self.done = True
            return
        try:
            chunk = _chunk.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._give_up(WhyNot.UNREADABLE)
            return
        if chunk.error is not None or chunk.object == "error":
            self._give_up(WhyNot.ENGINE_ERROR)
            return
        self._note_names(chunk)
        self.usage_sent = self.usage_sent or chunk.usage is not None
        for choice in chunk.choices or ():
            self._note_choice(choice)

    def _note_names(self, chunk: _Chunk) -> None:
        if not self.names:
            said = {"id": chunk.id, "created": chunk.created, "model": chunk.model}
            self.names = {key: bytes(value) for key, value in said.items() if bytes(value)}
        if chunk.prompt_token_ids is not None and self.prompt_ids is None:
            self._keep_prompt(chunk.prompt_token_ids)

    def _keep_prompt(self, ids: list[int]) -> None:
        """Not part of the log's limit: the request's own body, which is kept too, is as long."""
        self.prompt_ids = ids

    def _note_choice(self, choice: _Choice) -> None:
        why_not = _why_not(choice)
        if why_not is not None:
            self._give_up(why_not)
            return
        if choice.prompt_token_ids is not None and self.prompt_ids is None:
            self._keep_prompt(choice.prompt_token_ids)
        delta = choice.delta
        self.role_sent = self.role_sent or (delta is not None and delta.role is not None)
        self.finished = self.finished or choice.finish_reason is not None
        text = (choice.text if delta is None else delta.content) or ""
        if not text and choice.finish_reason == "stop":
            self.unseen_end = True
        if text or self.unseen_end:
            self._events += 1
            self._uncounted = self._uncounted or choice.token_ids is None
        self._keep(text, choice.token_ids)

    def _keep(self, text: str, ids: list[int] | None) -> None:
        if text:
            self._parts.append(text)
            self._bytes += len(text.encode("utf-8", "surrogatepass"))
        if ids:
            self.token_ids += ids
            self._bytes += _ID_BYTES * len(ids)
        if self._bytes > self._config.max_log_bytes:
            self._give_up(WhyNot.OVERFLOW)

    def _give_up(self, why_not: WhyNot) -> None:
        self.why_not = why_not
        self._parts.clear()
        self.token_ids = []
        self.prompt_ids = None


def _why_not(choice: _Choice) -> WhyNot | None:
    """What in a choice cannot be continued."""
    if choice.index != 0:
        return WhyNot.SEVERAL_CHOICES
    if choice.logprobs is not None:
        return WhyNot.LOGPROBS
    delta = choice.delta
    if delta is None:
        return None
    if delta.tool_calls or delta.function_call:
        return WhyNot.TOOLS
    if delta.reasoning_content or delta.reasoning:
        return WhyNot.REASONING
    return WhyNot.AUDIO if delta.audio else None
