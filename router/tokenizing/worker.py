"""A process that does the heavy reading, so that the event loop never waits: `python -m router.tokenizing.worker`.

Model     frames on standard input and output, each a length (4 bytes, little-endian) and a MessagePack job or answer;
          one job at a time, answered in order. The first frame says what to load, and its answer whether that went well
Valid     for one parent; the end of standard input ends the process
          A template that does not come to an end is ended here, so that it costs no process
Blind to  time otherwise: the parent leaves a job that takes too long, and the pieces it made are kept for the next one
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from router.prompts.body import prompts_in
from router.prompts.sizes import characters_of
from router.tokenizing.asked import Asked, NoTokens, Unread, Wanted, tokenised
from router.tokenizing.local import LocalTokenizer
from router.tokenizing.messages import Engine
from router.tokenizing.template import TakesTooLong

NICENESS = 5  # where cores are few the event loop goes first
RENDER_S = 1.0  # processor time for one conversation; templates take a millisecond for a hundred messages
LONGEST_DETAIL = 500  # characters


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first job: what to be ready for. directories : of tokenizers, by base model; "" is any other model"""

    directories: dict[str, str] = {}
    engine: Engine = "vllm"
    defaults: dict[str, Any] = {}
    limit_bytes: int = 0


class Tokenise(msgspec.Struct, frozen=True, tag=True):
    """Turn a text prompt into blocks."""

    asked: Asked
    wanted: Wanted


class ReadIds(msgspec.Struct, frozen=True, tag=True):
    """Turn a JSON list of token ids, or of such lists, into blocks."""

    ids: bytes
    wanted: Wanted


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Count the characters of a prompt. fields, tools_bytes : as in `characters_of`"""

    fields: dict[str, bytes]
    tools_bytes: int


Job = Load | Tokenise | ReadIds | Measure


class Answer(msgspec.Struct, frozen=True):
    """What became of a job.

    why, detail : set when it came to nothing; refused : a sentence for the client, whose mistake it was
    blocks : 64-bit words of this machine; ids : JSON
    """

    why: Unread | None = None
    detail: str = ""
    refused: str = ""
    tokens: int = 0
    prompts: int = 0
    blocks: bytes = b""
    ids: bytes | None = None
    characters: int = 0
    pure: bool = True


class Desk:
    """Does jobs, one after the other."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, LocalTokenizer] = {}

    def do(self, job: Job) -> Answer:
        """The answer to one job, whatever is in it."""
        try:
            return self._do(job)
        except NoTokens as exc:
            return Answer(why=exc.why, detail=_plain(exc.detail))
        except Exception as exc:  # a prompt no step was made for must not end the process
            return Answer(why=Unread.FORM, detail=_plain(f"{type(exc).__name__}: {exc}"))

    def _do(self, job: Job) -> Answer:
        if isinstance(job, Load):
            return self._load(job)
        if isinstance(job, Measure):
            characters, pure = characters_of(job.fields, job.tools_bytes)
            return Answer(characters=characters, pure=pure)
        if isinstance(job, ReadIds):
            prompts = prompts_in(job.ids)
            if prompts is None:
                raise NoTokens(Unread.FORM, "a list of more than token ids")
            return _answer(prompts, job.wanted)
        tokenizer = self._tokenizers.get(job.asked.model) or self._tokenizers.get("")
        if tokenizer is None:
            raise NoTokens(Unread.NO_TOKENIZER, f"none for the model {job.asked.model!r}")
        return _answer(tokenizer.prompts_of(job.asked), job.wanted)

    def _load(self, job: Load) -> Answer:
        read: dict[str, LocalTokenizer] = {}
        for model, directory in job.directories.items():
            if directory not in read:
                try:
                    read[directory] = LocalTokenizer(
                        Path(directory),
                        engine=job.engine,
                        defaults=job.defaults,
                        limit_bytes=job.limit_bytes,
                        limited=ended_in_time,
                    )
                except (ValueError, OSError) as exc:
                    return Answer(why=Unread.NO_TOKENIZER, detail=str(exc))
            self._tokenizers[model] = read[directory]
        return Answer()


@contextlib.contextmanager
def ended_in_time() -> Iterator[None]:
    """Raise `TakesTooLong` inside when it has taken `RENDER_S`. In the main thread only."""

    def over(number: int, frame: object) -> None:
        raise TakesTooLong

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _plain(detail: str) -> str:
    """A sentence that can be sent: prompts may hold halves of surrogate pairs, and be long."""
    return detail[:LONGEST_DETAIL].encode("utf-8", "backslashreplace").decode()


def _answer(prompts: list[list[int]] | list[array[int]], wanted: Wanted) -> Answer:
    try:
        made = tokenised(prompts, wanted)
    except ValueError as exc:
        return Answer(why=Unread.FORM, refused=str(exc))
    return Answer(
        tokens=made.tokens,
        prompts=made.prompts,
        blocks=array("Q", made.blocks).tobytes(),
        ids=made.ids,
    )


_jobs = msgspec.msgpack.Decoder(Job)
_encode = msgspec.msgpack.Encoder().encode


def framed(message: object) -> bytes:
    """A job or an answer with its length before it."""
    data = _encode(message)
    return len(data).to_bytes(4, "little") + data


def serve(taken: BinaryIO, given: BinaryIO) -> None:
    """Answer jobs until there are no more."""
    desk = Desk()
    while len(head := taken.read(4)) == 4:
        given.write(framed(desk.do(_jobs.decode(taken.read(int.from_bytes(head, "little"))))))
        given.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act on
    os.nice(NICENESS)
    with os.fdopen(os.dup(1), "wb") as given, contextlib.suppress(BrokenPipeError):
        os.dup2(2, 1)  # what a library prints must not come between the answers
        serve(sys.stdin.buffer, given)


if __name__ == "__main__":
    main()
