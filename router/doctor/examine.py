"""Asks one server everything, listens to its events, and returns the facts. The order in which that happens.

Model     first what it serves: a server that cannot say that is asked nothing more. Then every route at once, then the
          event sources those name, then the probe, which needs somebody listening
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from router.doctor import pages
from router.doctor.ask import Asker, Reply
from router.doctor.facts import Facts, LoadFacts, ProbeFacts, SourceFacts
from router.doctor.listen import Ears
from router.doctor.probe import probe, probe_prompt
from router.doctor.tokenizing import Encode, compare
from router.signals.discovery import sglang_load, sglang_sources, vllm_sources
from router.signals.load import Load, together
from router.signals.load_answers import loads_of_get_load, loads_of_v1
from router.signals.poller import Listed, models_in
from router.signals.prometheus_text import loads_of
from router.signals.subscriber import Source

_ROUTES = ("/health", "/version", "/metrics", "/kv_event_sources", "/server_info", "/v1/loads", "/get_load")
_NO_SUCH_ROUTE = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What to examine.

    sources : addresses given to us, in place of those it names
    listed, block_tokens : as `Facts` has them, the latter as `configured_tokens`
    """

    url: str
    sources: tuple[Source, ...] = ()
    listed: int = 1
    block_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to examine. wait_s : for events, > 0; use_probe : send completions; encode : the local tokenizer."""

    wait_s: float = 3.0
    use_probe: bool = False
    encode: Encode | None = None


Replies = dict[str, Reply]


async def examine(asker: Asker, server: Server, plan: Plan, rng: random.Random) -> Facts:
    """All facts about one server. Never raises for what a server or a network can do."""
    models = await asker.get("/v1/models")
    names, parents, _ = models_in(models.body) if models.trouble is None else Listed()
    trouble = models.json_trouble("/v1/models")
    if trouble is not None:
        return Facts(url=server.url, listed=server.listed, trouble=trouble, wants_key=models.wants_key)
    replies = await _ask_all(asker)
    facts = facts_of(server, models.json(), replies)
    facts = replace(facts, models=tuple(name for name in names if name not in parents), adapters=dict(parents))
    sources, raw = server.sources or named_sources(server.url, replies)[0], pages.said_addresses(_sources(replies))
    model = facts.models[0] if facts.models else ""
    heard, probed = await _listen(asker, facts, plan, sources, {} if server.sources else raw, model, rng)
    tokens = await compare(asker, plan.encode, model=model, engine=facts.engine) if model else None
    return replace(facts, sources=heard, probe=probed, tokens=tokens)


async def _ask_all(asker: Asker) -> Replies:
    replies = dict(zip(_ROUTES, await asyncio.gather(*map(asker.get, _ROUTES)), strict=True))
    if replies["/server_info"].status in _NO_SUCH_ROUTE:
        replies["/server_info"] = await asker.get("/get_server_info")  # the older name
    return replies


async def _listen(
    asker: Asker,
    facts: Facts,
    plan: Plan,
    sources: Sequence[Source],
    raw: dict[int, str],
    model: str,
    rng: random.Random,
) -> tuple[tuple[SourceFacts, ...], ProbeFacts | None]:
    block_tokens = facts.router_tokens
    async with AsyncExitStack() as stack:
        ears = None
        if sources:
            ears = await stack.enter_async_context(Ears(sources, raw, model=model, block_tokens=block_tokens))
            await ears.settled(plan.wait_s, connected_is_enough=plan.use_probe)
        probed = None
        if plan.use_probe and model:
            prompt = probe_prompt(rng, max(block_tokens, facts.block_tokens or 1))  # whole blocks of both, if they fit
            ranks = max(facts.listed, len(sources))
            rank = None if ranks < 2 else (sources[0].rank or 0) if sources else 0
            probed = await probe(asker, ears, model=model, prompt=prompt, rank=rank, wait_s=plan.wait_s)
        return () if ears is None else ears.facts(), probed


# Plain from here on


def facts_of(server: Server, models: Any, replies: Replies) -> Facts:
    """What the answers alone say, before anybody has listened."""
    page, info = replies["/metrics"].text, replies["/server_info"].json()
    version, loads = replies["/version"].json(), replies["/v1/loads"].json()
    total = _total(loads_of(page))
    size = total.block_size or pages.page_size_in(info)
    blocks = None if total.num_gpu_blocks is None else int(total.num_gpu_blocks)
    tokens = total.max_tokens if blocks is None or size is None else blocks * size
    route = named_sources(server.url, replies)[1]
    said = _sources(replies)
    return Facts(
        url=server.url,
        listed=server.listed,
        engine=pages.engine_of(
            models,
            page,
            has_version=version is not None,
            has_server_info=isinstance(info, dict) and "kv_events" in info,
        ),
        version=pages.version_in(version, info, loads),
        health_trouble=None if replies["/health"].status in _NO_SUCH_ROUTE else replies["/health"].trouble,
        block_tokens=size,
        configured_tokens=server.block_tokens,
        block_tokens_from=None if size is None else "/metrics" if total.block_size else "/server_info",
        blocks=blocks,
        capacity_tokens=None if tokens is None else int(tokens),
        caching=pages.prefix_caching(page),
        sources_route=None if server.sources else route,
        switched_off=route is None and (isinstance(said, dict) or _is_sglang_info(info)),
        load=_load_facts(server.url, replies, total),
    )


def named_sources(url: str, replies: Replies) -> tuple[tuple[Source, ...], str | None]:
    """Event sources the server names, and the route that named them."""
    host = urlsplit(url).hostname or ""
    said, info = _sources(replies), replies["/server_info"].json()
    if isinstance(said, dict):
        entries = {rank: entry for rank, entry in said.items() if not _is_off(entry)}
        found = vllm_sources(entries, host)
        if found:
            return tuple(found), "/kv_event_sources"
    if isinstance(info, dict):
        found = sglang_sources(info, host)
        if found:
            return tuple(found), "/server_info"
    return (), None


def _sources(replies: Replies) -> Any:
    return replies["/kv_event_sources"].json()


def _is_off(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("enable_kv_cache_events") is False


def _is_sglang_info(info: Any) -> bool:
    """Whether this is SGLang's answer, of a release that can name event sources: null there means none."""
    return isinstance(info, dict) and "kv_events" in info


def _total(loads: dict[str, Load]) -> Load:
    return together(list(loads.values()))


def _load_facts(url: str, replies: Replies, page: Load) -> LoadFacts:
    """Where load comes from, in the order in which the router looks."""
    text = replies["/metrics"].text
    names = pages.load_names(text)
    total, says = page, page.says_something()
    routes = {"/v1/loads": loads_of_v1, "/get_load": loads_of_get_load}
    if not says or any(name.startswith("sglang:") for name in names):
        for route, read in routes.items():
            reply = replies[route]
            loads = read(reply.body) if reply.trouble is None else {}
            if any(load.says_something() for load in loads.values()):
                names, total = (route,), _total(loads)
                break
    info = replies["/server_info"].json()
    sockets = sglang_load(info, urlsplit(url).hostname or "")[0] if isinstance(info, dict) else ()
    return LoadFacts(
        names=names,
        total=total,
        page_trouble=replies["/metrics"].trouble,
        page_says_load=says,
        sockets=len(sockets),
    )
