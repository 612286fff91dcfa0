"""How a running router reads prompts: everything a configuration asks for, joined, started and stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client import CollectorRegistry

from estimators.request import RequestFacts
from router.actions import Ended
from router.errors import ConfigError
from router.prompts.agreement import Agreement, State
from router.prompts.checking import EngineCheck
from router.prompts.reader import Head, PromptReader
from router.prompts.reading import PromptReading, Read, Told
from router.prompts.shown import PromptMetrics, PromptReport
from router.tokenizing.asked import Form, TokenSource
from router.tokenizing.engine import EngineTokens
from router.tokenizing.local import missing_packages
from router.tokenizing.worker import Load
from router.tokenizing.workers import Workers

if TYPE_CHECKING:
    from router.config import PromptConfig

_MIB = 1024 * 1024

log = logging.getLogger(__name__)


class Prompts:
    """One router's way of reading prompts. Made inside a running loop; `start` it before the first request.

    url_of : base URL of a replica that serves a base model and is up
    has_key : whether `session` carries a key of the router's own
    told : see `PromptReading`
    """

    def __init__(
        self,
        config: PromptConfig,
        reader: PromptReader,
        session: aiohttp.ClientSession,
        *,
        url_of: Callable[[str], str | None],
        has_key: bool,
        clock: Callable[[], float],
        registry: CollectorRegistry,
        told: Told | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._agreement = Agreement()
        self._told: set[tuple[str, Form]] = set()  # disagreements that were logged
        self._workers = Workers(load_of(config), timeout_s=config.timeout_s, most_waiting=config.most_waiting)
        self._engine: EngineTokens | None = None
        if config.source in ("tokenize", "render"):
            self._engine = EngineTokens(
                session,
                url_of if config.url is None else lambda model: config.url,
                self._workers,
                way="render" if config.source == "render" else "tokenize",
                engine=config.engine,
                has_key=has_key,
                clock=clock,
                most_waiting=config.most_waiting,
            )
        source = self._source()
        self._check: EngineCheck | None = None
        if source is not None and config.check and (self._engine is None or config.url is not None):
            self._check = EngineCheck(
                session, source, self._agreement, engine=config.engine, timeout_s=max(5.0, config.timeout_s)
            )
        metrics = PromptMetrics(registry, self.report)
        self._reading = PromptReading(
            reader,
            self._workers,
            source=source,
            agreement=self._agreement,
            clock=clock,
            forwards=config.forward_tokens,
            took_s=metrics.took_s,
            told=told,
        )

    async def start(self) -> None:
        """Start what the first prompt would otherwise wait for.

        Raises
        ------
        ConfigError : a package or a file of the tokenizer is missing
        """
        check_prompts(self._config)
        if self._config.source == "local":
            await self._workers.start()

    async def stop(self) -> None:
        """End reads, comparisons and processes."""
        await self._reading.stop()
        if self._check is not None:
            await self._check.stop()
        await self._workers.stop()

    def read(self, head: Head, body: bytes) -> Read | asyncio.Task[Read]:
        """Facts of one request, a refusal, or the task that will have one of them."""
        return self._reading.read(head, body)

    def replica_up(self, replica: str, url: str, *, model: str, name: str) -> None:
        """`replica` serves the base model `model` under `name`."""
        if self._check is not None and name:
            self._check.replica_up(replica, url, model=model, name=name)

    def answered(self, request: RequestFacts, ended: Ended, promised_tokens: float) -> None:
        """A request was answered; `promised_tokens` of its prompt were expected to be reused."""
        if not request.tokenised or not 200 <= ended.status < 300 or ended.stream_error:
            return
        model, form = request.base_model, Form(request.tokenised)
        self._agreement.observed(
            model,
            form,
            ours=request.prompt_tokens,
            reported=ended.prompt_tokens,
            promised_tokens=promised_tokens,
            cached=ended.cached_tokens,
            now_s=self._clock(),
        )
        key = (model, form)
        disagrees = self._agreement.state(*key, self._clock()) is State.DISAGREES
        if disagrees and key not in self._told:
            self._told.add(key)
            log.warning(
                "answers of %s contradict the router's tokens of %s prompts (%d counted here, the engine says %s, and"
                " reused %s of %d): such prompts are placed by load and length",
                *(model or "a model", form.value, request.prompt_tokens, ended.prompt_tokens),
                *(ended.cached_tokens, promised_tokens),
            )
        elif not disagrees and key in self._told:
            self._told.discard(key)
            log.info("answers of %s agree with the router's tokens of %s prompts again", model or "a model", form.value)

    def report(self) -> PromptReport:
        """What operators see."""
        return PromptReport(
            source=self._config.source,
            up=None if self._engine is None else self._engine.up,
            read=dict(self._reading.counts),
            states=self._agreement.states(self._clock()),
            differing=self._agreement.differing(),
            waiting=self._reading.under_way,
            lost_workers=self._workers.lost,
        )

    def _source(self) -> TokenSource | None:
        return self._workers if self._config.source == "local" else self._engine


def check_prompts(config: PromptConfig) -> None:
    """Raises ConfigError where prompts are to be tokenised here, and a package or the tokenizer's name is missing."""
    missing = missing_packages() if config.source == "local" else []
    if missing:
        raise ConfigError(
            f"prompts.source is local, which needs {' and '.join(missing)}: pip install 'tfirst[tokenizers]'"
        )
    load_of(config)


def load_of(config: PromptConfig) -> Load:
    """What the reading processes load."""
    if config.source != "local":
        return Load()
    named = config.tokenizer
    if not named:
        raise ConfigError("prompts.source is local: name the model's directory in prompts.tokenizer")
    directories = {"": named} if isinstance(named, str) else named
    return Load(
        directories={model: str(Path(directory).absolute()) for model, directory in directories.items()},
        engine=config.engine,
        defaults=config.template_arguments,
        limit_bytes=config.cache_mib * _MIB,
    )
