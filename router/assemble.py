"""Joins policy, estimators and directory into a `Dispatcher`, without touching a socket or a loop.

The gateway and a replay both call it, so a decision seen in one is the decision of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from estimators.estimates import Estimator, Held
from estimators.links import Link
from estimators.roofline import Rates, rates_of
from estimators.shapes import QWEN3_8B, ModelShape
from estimators.view import FleetView
from policies.least_request import LeastRequest
from router.config import RouterConfig
from router.directory import Directory
from router.dispatch import Dispatcher, Replica
from router.fleet import Fleet
from router.names import ModelNames
from router.plugins import build_policy
from router.prompts import CharactersPerToken, PromptReader
from router.receipts import Receipt

NEUTRAL_CARD = "A100"  # what an unknown card is priced as until it has been observed
DEFAULT_BLOCK_TOKENS = 16
KNOWN_SPREAD, UNKNOWN_SPREAD = 0.5, 2.0  # how far the truth may be from the start values, relative


@dataclass(frozen=True, slots=True)
class Core:
    """Everything that decides, ready to be driven by a shell."""

    dispatcher: Dispatcher
    directory: Directory
    prompts: PromptReader
    names: ModelNames


class DirectoryHoldings:
    """The directory as the dispatcher asks it."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def held(self, chain: list[int]) -> Held:
        match = self._directory.match(chain)
        return Held(local_blocks=match.hbm_blocks, store_blocks=match.store_blocks)


def assemble(
    config: RouterConfig,
    fleet: Fleet,
    *,
    on_receipt: Callable[[Receipt], None],
    epoch_s: float = 0.0,
    block_tokens: int | None = None,
    wrap_estimator: Callable[[Estimator], Estimator] = lambda estimator: estimator,
) -> Core:
    """Build the deciding core of one router.

    block_tokens : what the engines report, used when the fleet file does not say
    epoch_s : Unix time at now_s = 0 of the clock that will drive it
    wrap_estimator : puts something between estimates and their readers, for experiments

    Raises
    ------
    ConfigError : the policy does not exist or its settings do not fit.
    """
    block_tokens = fleet.block_tokens or block_tokens or DEFAULT_BLOCK_TOKENS
    shape = fleet.model or QWEN3_8B
    known = fleet.model is not None and all(replica.card is not None for replica in fleet.replicas)
    view = FleetView(
        names=[replica.name for replica in fleet.replicas],
        rates=[rates_of_replica(fleet, shape, replica.card) for replica in fleet.replicas],
    )
    directory = Directory(block_tokens, view.rows)
    names, characters_per_token = ModelNames(), CharactersPerToken()
    estimator = Estimator(
        kv_bytes_per_token=shape.kv_bytes_per_token,
        layers=shape.layers,
        stages=fetch_stages(fleet),
        discipline=fleet.fetch.discipline,
        minimum_fetch_tokens=max(1, fleet.fetch.minimum_tokens),
        step_tokens=fleet.step_tokens,
        engine_decides=fleet.fetch.by == "engine",
    )
    dispatcher = Dispatcher(
        replicas=[Replica(replica.name, replica.url or "") for replica in fleet.replicas],
        view=view,
        holdings=DirectoryHoldings(directory),
        estimator=wrap_estimator(estimator),
        policy=build_policy(config.policy.name, config.policy.settings, config.seed),
        policy_name=config.policy.name,
        by_load=LeastRequest(np.random.default_rng(config.seed)),
        on_receipt=on_receipt,
        characters_per_token=characters_per_token,
        max_attempts=config.max_attempts,
        calibration_spread=KNOWN_SPREAD if known else UNKNOWN_SPREAD,
        epoch_s=epoch_s,
    )
    chunks = config.prompts.source == "bytes"
    prompts = PromptReader(block_tokens, names, characters_per_token, chunks=chunks)
    return Core(dispatcher, directory, prompts, names)


def rates_of_replica(fleet: Fleet, shape: ModelShape, card: str | None) -> Rates:
    """Roofline of one replica; an unknown card gets the neutral one."""
    return rates_of(shape, fleet.card(card or NEUTRAL_CARD))


def fetch_stages(fleet: Fleet) -> list[list[Link]]:
    """Links a fetch crosses on each replica: the shared network, then the replica's own host link. Empty: no store."""
    if fleet.store is None:
        return []
    network = link_of(fleet, fleet.store.network)
    return [[network, link_of(fleet, fleet.store.host)] for _ in fleet.replicas]


def link_of(fleet: Fleet, name: str) -> Link:
    """A new `Link` as the fleet file describes it, at the fleet's speed."""
    spec = fleet.links[name]
    return Link(bytes_per_s=spec.gb_s * 1e9 * fleet.speed, start_s=spec.start_ms / 1000 / fleet.speed)
