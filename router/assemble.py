"""Joins policy, estimators and directory into a `Dispatcher`, without touching a socket or a loop.

The gateway and a replay both call it, so a decision seen in one is the decision of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimator
from estimators.hit_probability import HitProbability
from estimators.links import LinkTable
from estimators.prefetch import PrefetchSpace
from estimators.roofline import rates_of
from estimators.routes import Routes
from estimators.shape_costs import costs_of
from estimators.spread import ResidualSpread
from estimators.view import FleetView
from policies.by_load.least_request import LeastRequest
from router.blocks.config import DirectoryConfig
from router.config import RouterConfig
from router.directory import Directory
from router.dispatch import Dispatcher
from router.endings import Keep
from router.experiments import Experiments, unit_field
from router.fleet import Fleet, LinkSpec
from router.holdings import DirectoryHoldings, Holdings
from router.laps import Laps
from router.names import ModelNames
from router.other_tiers import OtherTiers
from router.placing import Replica
from router.plain import PlainDispatcher, reads_estimates
from router.plugins import build_policy
from router.prompts import CharactersPerToken, PromptReader
from router.prompts.reader import LARGEST_WALK
from router.receipts import Receipt
from router.rows import Rows, first_discipline, patience_s, replica_prior, usd_per_hour
from router.signals.looked_up import Answers
from router.signals.written_store import WrittenStore

DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Core:
    """Everything that decides, ready to be driven by a shell."""

    dispatcher: Dispatcher
    directory: Directory
    prompts: PromptReader
    names: ModelNames
    experiments: Experiments
    rows: Rows


def assemble(
    config: RouterConfig,
    fleet: Fleet,
    *,
    on_receipt: Callable[[Receipt], None],
    keep: Keep | None = None,
    epoch_s: float = 0.0,
    block_tokens: int | None = None,
    wrap_estimator: Callable[[Estimator], Estimator] = lambda estimator: estimator,
    answers: Answers | None = None,
    written: WrittenStore | None = None,
    every_candidate: bool = True,
    forecasts: bool = True,
    laps: Laps | None = None,
) -> Core:
    """Build the deciding core of one router. Spare rows of the fleet (`with_spares`) are for replicas that come later.

    keep : given every finished receipt with what more there is to keep of it; see `Endings`
    block_tokens : what the engines report, used when the fleet file does not say
    answers : of a look-up service that knows the store and replicas' tiers, if there is one
    written : what is written through to a store without events, if there is one; kept up to date from here
    every_candidate : receipts name all that was possible, else only what was chosen
    forecasts : somebody reads what was expected, or keeps what is learned; else rules that do not are spared it,
        unless admission reads it
    epoch_s : Unix time at now_s = 0 of the clock that will drive it
    laps : told of the phases of each decision
    wrap_estimator : puts something between estimates and their readers, for experiments

    Raises
    ------
    ConfigError : the policy does not exist or its settings do not fit.
    """
    block_tokens = fleet.block_tokens or block_tokens or DEFAULT_BLOCK_TOKENS
    priors = [replica_prior(fleet, replica) for replica in fleet.replicas]
    view = FleetView(
        names=[replica.name for replica in fleet.replicas],
        rates=[rates_of(prior.shape, prior.card) for prior in priors],
    )
    unknown = [name for name, prior in zip(view.names, priors, strict=True) if not prior.known]
    view.chosen_share = costs_of(priors[0].shape).chosen_share
    view.usd_per_hour[:] = [usd_per_hour(prior) for prior in priors]
    view.disciplines[:] = [first_discipline(fleet)] * view.rows
    view.limit_s[:] = patience_s(fleet)
    view.fresh_s = config.load.fresh_s
    directory = directory_of(config.directory, block_tokens, view.rows)
    names, characters_per_token = ModelNames(), CharactersPerToken()
    estimator = Estimator(
        costs=costs_of(priors[0].shape),
        layers=priors[0].shape.layers,
        rows=view.rows,
        routes=routes_of(fleet),
        space=prefetch_space(fleet),
        minimum_fetch_tokens=max(1, fleet.fetch.minimum_tokens),
        step_tokens=fleet.step_tokens,
        engine_decides=fleet.fetch.by == "engine",
        doubt=Doubt(HitProbability(view.names), ResidualSpread(view.names, uncalibrated=unknown), Conformal(LEVELS)),
    )
    holdings = holdings_of(fleet, directory, answers=answers, written=written)
    experiments = experiments_of(config)
    policy = experiments.usual
    estimated = forecasts or reads_estimates(policy) or config.admission.reads_estimates or experiments.active
    make = Dispatcher if estimated else PlainDispatcher
    dispatcher = make(
        replicas=[Replica(replica.name, replica.url or "") for replica in fleet.replicas],
        view=view,
        holdings=holdings,
        estimator=wrap_estimator(estimator),
        policy=policy,
        policy_name=config.policy.name,
        by_load=LeastRequest(np.random.default_rng(config.seed)),
        on_receipt=on_receipt,
        keep=keep,
        experiments=experiments,
        characters_per_token=characters_per_token,
        max_attempts=config.max_attempts,
        admission=config.admission,
        health=config.health,
        retries=config.retries,
        calibration_spreads=[prior.spread for prior in priors],
        learn_disciplines=fleet.fetch.discipline is None and has_routes(fleet),
        epoch_s=epoch_s,
        every_candidate=every_candidate,
        laps=laps,
    )
    chunks = config.prompts.source == "bytes"
    field = config.admission.tenant_header
    tenant_field = None if field is None else field.lower().encode("ascii")
    prompts = PromptReader(
        block_tokens,
        names,
        characters_per_token,
        chunks=chunks,
        tenant_field=tenant_field,
        largest_walk=LARGEST_WALK if estimated or chunks else 0,
        unit_field=unit_field(config.experiment),
    )
    rows = Rows(fleet, dispatcher=dispatcher, holdings=holdings, names=names)
    return Core(dispatcher, directory, prompts, names, experiments, rows)


def experiments_of(config: RouterConfig) -> Experiments:
    """Every rule that decides. Raises ConfigError when one of them cannot be built."""
    return Experiments(
        config.policy, config.experiment, lambda rule: build_policy(rule.name, rule.settings, config.seed)
    )


def directory_of(config: DirectoryConfig, block_tokens: int, rows: int) -> Directory:
    """A directory within the limits of a configuration."""
    return Directory(
        block_tokens,
        rows,
        source_limit=config.source_blocks,
        memory_limit=config.removed_blocks,
        cap=config.blocks,
        penalty_s=config.missed_s,
        expected_limit=config.expected_blocks,
        expected_s=config.expected_s,
    )


def holdings_of(
    fleet: Fleet, directory: Directory, *, answers: Answers | None = None, written: WrittenStore | None = None
) -> Holdings:
    """The directory, and what else is known of store and tiers, as decisions ask them."""
    # Told to read from a peer, an engine would find nothing of what is still being computed there.
    peers_are_read = fleet.peers is not None and fleet.fetch.by == "directed"
    holdings = DirectoryHoldings(directory, has_tiers=fleet.tiers is not None, ages=True, expects=not peers_are_read)
    if answers is None and written is None:
        return holdings
    return OtherTiers(holdings, answers=answers, written=written)


def has_routes(fleet: Fleet) -> bool:
    """Whether KV state can come from anywhere but HBM."""
    return fleet.store is not None or fleet.tiers is not None or fleet.peers is not None


def routes_of(fleet: Fleet) -> Routes:
    """Links from store, peers and own tiers to each replica: the network is shared, the others each has for itself."""
    links: list[LinkSpec] = []
    shared: dict[str, int] = {}

    def added(name: str) -> int:
        links.append(fleet.links[name])
        return len(links) - 1

    rows = range(len(fleet.replicas))
    own: list[dict[str, int]] = [{} for _ in rows]

    def of_replica(row: int, name: str) -> int:
        """One link of this name for each replica, whatever crosses it."""
        if name not in own[row]:
            own[row][name] = added(name)
        return own[row][name]

    store, tiers, peers = fleet.store, fleet.tiers, fleet.peers
    if store is not None:
        shared[store.network] = added(store.network)
    host = [] if tiers is None else [[of_replica(row, tiers.host.link)] for row in rows]
    disk = (
        [] if tiers is None or tiers.disk is None else [[of_replica(row, tiers.disk.link), *host[row]] for row in rows]
    )
    egress = [] if peers is None else [added(peers.link) for _ in rows]
    routes = Routes(
        store=[] if store is None else [[shared[store.network], of_replica(row, store.host)] for row in rows],
        host=host,
        disk=disk,
        egress=egress,
    )
    if not links:
        return routes
    table = LinkTable(
        bytes_per_s=[link.gb_s * 1e9 * fleet.speed for link in links],
        look_up_s=[link.start_ms / 1000 / fleet.speed for link in links],
    )
    return replace(routes, table=table)


def prefetch_space(fleet: Fleet) -> PrefetchSpace | None:
    """Room for fetches under way on each replica; None where there is no limit."""
    room = fleet.fetch.prefetch_gib
    return None if room is None else PrefetchSpace([room * 2**30] * len(fleet.replicas))
