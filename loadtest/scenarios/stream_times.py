"""When the pieces of one streamed answer came, and whether it was a whole one.

Model     server-sent events, line by line, each with the moment it was read. The first token is the first event with
          text, reasoning or a tool call in it: a comment, a role alone, usage or an error is none
Valid     chat and plain completions of one choice. Moments are any clock's that never goes back
Blind to  several tokens in one event: without `usage` each event counts as one
Source    the streams of vLLM and SGLang: an error after the first byte is an event, and [DONE] ends a whole answer
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

DATA, DONE = b"data:", b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class StreamTimes:
    """Fed with lines; `began_s` and all moments are of one clock. What did not come is None.

    pieces : events with a token in them
    longest_gap_s : most seconds between two of them
    text : what was answered, in pieces
    error : why this is no answer
    """

    began_s: float
    first_s: float | None = None
    last_s: float | None = None
    longest_gap_s: float | None = None
    pieces: int = 0
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    done: bool = False
    error: str | None = None

    def line(self, line: bytes, now_s: float) -> None:
        """One line, with or without its end. Rubbish is an error of this answer, never an exception."""
        if not line.startswith(DATA):
            return
        payload = line[len(DATA) :].strip()
        if payload == DONE:
            self.done = True
            return
        try:
            event = _EVENT.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.error = self.error or f"an event that cannot be read: {payload[:80].decode(errors='replace')}"
            return
        if event.error is not None and bytes(event.error) != b"null":
            self.error = self.error or f"an error in the stream: {bytes(event.error)[:200].decode(errors='replace')}"
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices or ():
            self._take(choice, now_s)

    def _take(self, choice: _Choice, now_s: float) -> None:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
        if text:
            self.text.append(text)
        elif delta is None or not delta.tool_calls:
            return
        self.pieces += 1
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.longest_gap_s = max(self.longest_gap_s or 0.0, now_s - self.last_s)
        self.last_s = now_s

    def _count(self, usage: _Usage) -> None:
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the beginning to the first token."""
        return None if self.first_s is None else self.first_s - self.began_s

    @property
    def output_tokens(self) -> int:
        """As the engine counted them, else as many as events came with a token."""
        return self.pieces if self.completion_tokens is None else self.completion_tokens

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds from one output token to the next; None under two tokens."""
        if self.first_s is None or self.last_s is None or min(self.output_tokens, self.pieces) < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    def ended(self) -> None:
        """Judge the stream once nothing more comes: an answer has a token and ends with [DONE]."""
        if self.error is None and not self.done:
            self.error = "the stream ended without [DONE]"
        if self.error is None and self.output_tokens == 0:
            self.error = "the stream ended without a token"
