"""Tokenises fixed prompts here and on a replica when that comes up, and compares.

Model     a text, a conversation, and one with a tool, with what tokenizers and templates differ in: scripts, spaces,
          tool definitions. Equal tokens here make equal tokens elsewhere likely, never certain
Valid     replicas with `/tokenize`; one that has none, or wants a key the router lacks, leaves the question open
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from router.prompts.agreement import Agreement
from router.prompts.body import prompts_in
from router.tokenizing.asked import Asked, Form, NoTokens, TokenSource, Unread, Wanted
from router.tokenizing.engine import questions_of, tokenize
from router.tokenizing.messages import Engine

TEXT = "The quick brown fox, 1234 times.\n\n\tdef f(x): return x ** 2  # größer, naïve; 你好，世界！ 🙂"
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "  And now? "},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_encode = msgspec.json.Encoder().encode

log = logging.getLogger(__name__)


def probes(model: str, name: str) -> list[Asked]:
    """What is tokenised on both sides. model, name : as in `Asked`"""
    messages = _encode(CONVERSATION)
    return [
        Asked(Form.TEXT, model, name, prompt=_encode(TEXT)),
        Asked(Form.CHAT, model, name, messages=messages),
        Asked(Form.TOOLS, model, name, messages=messages, tools=_encode([TOOL])),
    ]


class EngineCheck:
    """Compares with each replica that comes up. Owner of the tasks it starts.

    source : tokenises on this side; timeout_s : for each call
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        source: TokenSource,
        agreement: Agreement,
        *,
        engine: Engine,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._source = source
        self._agreement = agreement
        self._engine: Engine = engine
        self._timeout_s = timeout_s
        self._checks: set[asyncio.Task[None]] = set()
        self._told: dict[str, list[str]] = {}  # by replica, the forms it was said to differ in

    def replica_up(self, replica: str, url: str, *, model: str, name: str) -> None:
        """`replica` serves the base model `model` under `name`: compare with it, in a while."""
        check = asyncio.get_running_loop().create_task(self.compare(replica, url, model, name), name="prompt check")
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)

    async def stop(self) -> None:
        """Give up the comparisons under way."""
        for check in list(self._checks):
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    async def compare(self, replica: str, url: str, model: str, name: str) -> None:
        """Compare all probes with one replica, and say once what it differs in."""
        differing = []
        for probe in probes(model, name):
            try:
                agrees = await self._agrees(url, probe)
            except NoTokens as exc:
                log.info("%s cannot be asked whether it agrees on %s: %s", replica, probe.form.value, exc)
                continue
            self._agreement.checked(model, probe.form, replica, agrees)
            if not agrees:
                differing.append(probe.form.value)
        if differing and differing != self._told.get(replica):
            log.warning(
                "%s makes other tokens of the same prompts (%s) than the router: such prompts are placed by load and"
                " length; give the router the engine's tokenizer, template and template arguments",
                *(replica, ", ".join(differing)),
            )
        self._told[replica] = differing

    async def _agrees(self, url: str, probe: Asked) -> bool:
        ours = await self._source.tokens_of(probe, b"", Wanted(root=0, block_tokens=1, ids=True))
        try:
            async with asyncio.timeout(self._timeout_s):
                theirs = await tokenize(self._session, url, questions_of(probe, self._engine)[0])
        except TimeoutError:
            raise NoTokens(Unread.LATE) from None
        return ours.ids is not None and prompts_in(theirs) == prompts_in(ours.ids)
