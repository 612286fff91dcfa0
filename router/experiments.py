"""Which rule decides about a request: the usual one, that of an arm of an experiment, or one a client asked for.

Model     a unit (a session, client, tenant or the value of a header) goes to the arm with the smallest
          -ln(h) / weight, h a hash of the experiment, the arm and the unit in (0, 1): each arm gets its weight's share
          of units, a unit stays where it is, and a changed weight or a new arm moves only units that must move.
          Shadow arms are asked at the same moments and have no effect. What is learned of replicas belongs to the
          router, not to an arm: all arms choose from the same estimates, and a reload keeps every rule whose settings
          stay the same
Valid     a request without a unit is one by itself. Retries of a request stay in its arm,
          unless arms are reloaded between: receipts name the rule that decided last
Source    weighted rendezvous hashing: Thaler and Ravishankar 1998; Schindelhauer and Schomaker 2005
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from typing import Any

import msgspec
import xxhash

from estimators.estimates import Estimates
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Policy
from policies.watcher import Placed, Watcher
from router.config import ExperimentConfig, PolicyConfig
from router.errors import ConfigError, RouterError
from router.receipts import Receipt, Shadow
from router.telling import Telling, telling

logger = logging.getLogger(__name__)

Build = Callable[[PolicyConfig], Policy]


class OverrideRefused(RouterError):
    """A client asked for a policy that it may not have, or that does not exist. status : of the answer"""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Arm:
    """One rule. name : "" outside an experiment; share : of all units that it is meant to get"""

    name: str
    policy_name: str
    policy: Policy
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Assigned:
    """unit : what it was assigned by, "" without an experiment; override : its client asked for the policy"""

    arm: Arm
    unit: str = ""
    override: bool = False


class Experiments:
    """Owner of every rule that decides. Reads only what `RequestFacts` say.

    usual : the rule where there is no experiment; build : makes a rule, or raises ConfigError
    """

    def __init__(self, usual: PolicyConfig, config: ExperimentConfig | None, build: Build) -> None:
        self._build = build
        self._built: dict[bytes, Policy] = {}  # by name and settings
        self._watcher = _Forward()
        self.shadow_failures = 0
        self._usual_settings = usual
        self._last: tuple[RequestFacts, Assigned] | None = None
        self._set(config)

    @property
    def active(self) -> bool:
        """Whether there is an experiment."""
        return self._config is not None

    @property
    def usual(self) -> Policy:
        """The rule where there is no experiment."""
        return self._usual.arm.policy

    def assigned(self, request: RequestFacts) -> Assigned:
        """The arm of a request: always the same for the same unit, until it is reloaded.

        Raises
        ------
        OverrideRefused : it asks for a policy it cannot have.
        """
        if self._last is not None and self._last[0] is request:  # asked several times for one decision
            return self._last[1]
        found = self._found(request)
        self._last = request, found
        return found

    def rule(self, request: RequestFacts) -> Policy:
        """What decides about a request that was let in."""
        try:
            return self.assigned(request).arm.policy
        except OverrideRefused:  # its client was trusted when it was let in
            return self.usual

    def note(self, receipt: Receipt, request: RequestFacts) -> None:
        """Write down whose request it is. Raises OverrideRefused as `assigned` does."""
        self._write(receipt, self.assigned(request))

    def decided(self, receipt: Receipt, request: RequestFacts) -> None:
        """Write down whose rule did decide: after a reload, that of a request let in before may be another."""
        try:
            self.note(receipt, request)
        except OverrideRefused:  # as in `rule`
            self._write(receipt, self._usual)

    def _write(self, receipt: Receipt, assigned: Assigned) -> None:
        arm = assigned.arm
        receipt.policy, receipt.override = arm.policy_name, assigned.override
        receipt.arm = arm.name or None
        receipt.arm_share = None if assigned.override or not arm.name else arm.share

    def unit(self, request: RequestFacts) -> str | None:
        """What it was assigned by; without an experiment its session, None without either."""
        config = self._config
        return (request.session or None) if config is None else unit_of(request, config.assign_by)

    def _found(self, request: RequestFacts) -> Assigned:
        if request.policy:
            return self._asked_for(request)
        config = self._config
        if config is None or not request.generates:
            return self._usual
        unit = unit_of(request, config.assign_by)
        return Assigned(arm_for(unit, self._with_traffic, config.name), unit)

    @property
    def watcher(self) -> Watcher:
        """To be told of every booking; tells the rules that watch, whichever they are at the time."""
        return self._watcher

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms; none without an experiment."""
        return tuple(arm.name for arm in self._arms)

    @property
    def policies(self) -> Iterator[Policy]:
        """Every rule in use, shadows included."""
        yield self._usual.arm.policy
        for arm in (*self._arms, *self._shadows):
            yield arm.policy

    def shadows(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> list[Shadow]:
        """What each shadow arm would take. A rule that fails is counted, and the request goes on."""
        told: list[Shadow] = []
        for arm in self._shadows:
            try:
                choice = arm.policy.choose(request, fleet, estimates)
            except Exception:  # a rule can be anybody's, and this one decides nothing
                self.shadow_failures += 1
                if self.shadow_failures == 1:
                    logger.exception("shadow arm %s failed; further failures are counted", arm.name)
                continue
            told.append(Shadow(arm.name, fleet.names[choice.row], choice.path.value))
        return told

    def report(self) -> dict[str, Any] | None:
        """Name, arms and shadows, as plain values; None without an experiment."""
        if self._config is None:
            return None
        return {
            "name": self._config.name,
            "assign_by": self._config.assign_by,
            "arms": {arm.name: {"policy": arm.policy_name, "share": arm.share} for arm in self._arms},
            "shadows": {arm.name: arm.policy_name for arm in self._shadows},
            "shadow_failures": self.shadow_failures,
        }

    def reload(self, config: ExperimentConfig | None) -> None:
        """Take over other arms, from the next decision on. Rules whose name and settings stay keep what they counted.

        Raises
        ------
        ConfigError : a rule cannot be built, or it would take a restart; then nothing has changed.
        """
        if (config is None) != (self._config is None):
            raise ConfigError("experiment: to begin or end one takes a restart; one that runs can be changed")
        if config is not None and self._config is not None and config.assign_by != self._config.assign_by:
            raise ConfigError("experiment.assign_by: to assign by something else takes a restart")
        self._set(config)

    def _set(self, config: ExperimentConfig | None) -> None:
        built: dict[bytes, Policy] = {}

        def rule(settings: PolicyConfig) -> Policy:
            key = msgspec.json.encode(settings, order="deterministic")
            built[key] = built.get(key) or self._built.get(key) or self._build(settings)
            return built[key]

        usual = self._usual_settings
        plain = Assigned(Arm("", usual.name, rule(usual)))
        arms: list[Arm] = []
        shadows: list[Arm] = []
        if config is not None:
            total = sum(arm.weight for arm in config.arms.values())
            if not total > 0.0:
                raise ConfigError("experiment.arms: no arm has a weight above 0, so nobody could get any")
            arms = [
                Arm(name, arm.policy.name, rule(arm.policy), arm.weight / total) for name, arm in config.arms.items()
            ]
            shadows = [Arm(name, settings.name, rule(settings)) for name, settings in config.shadows.items()]
        self._usual, self._config, self._built = plain, config, built
        self._arms, self._with_traffic = tuple(arms), tuple(arm for arm in arms if arm.share > 0.0)
        self._shadows = tuple(shadows)
        self._overrides: dict[str, Arm] = {}
        self._last = None
        self._tell_all()

    def _asked_for(self, request: RequestFacts) -> Assigned:
        trusted = () if self._config is None else self._config.trusted
        if not request.client or request.client not in trusted:
            raise OverrideRefused(403, "this client may not choose the policy (x-tfirst-policy)")
        name = request.policy
        if name not in self._overrides:
            by_arm = next((arm for arm in self._arms if arm.name == name), None)
            try:
                policy = by_arm.policy if by_arm is not None else self._build(PolicyConfig(name=name))
            except ConfigError as exc:
                raise OverrideRefused(400, f"x-tfirst-policy: {exc}") from exc
            self._overrides[name] = by_arm or Arm(name, name, policy)
            self._tell_all()
        return Assigned(self._overrides[name], override=True)

    def _tell_all(self) -> None:
        rules = {id(policy): policy for policy in self.policies}
        rules |= {id(arm.policy): arm.policy for arm in self._overrides.values()}
        self._watcher.to = telling(*rules.values())


class _Forward(Watcher):
    """Tells whoever is in use at the time."""

    def __init__(self) -> None:
        self.to: Telling | None = None

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        if self.to is not None:
            self.to.placed(placed, fleet, estimates)

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        if self.to is not None:
            self.to.first_token(placed, fleet)

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        if self.to is not None:
            self.to.ended(placed, fleet)


def unit_of(request: RequestFacts, assign_by: str) -> str:
    """What a request is assigned by; its own id where it has nothing of the kind."""
    if assign_by == "session":
        unit = request.session or ""
    elif assign_by == "client":
        unit = request.client
    elif assign_by == "tenant":
        unit = request.tenant
    else:
        unit = request.unit
    return unit or request.request_id


def unit_field(config: ExperimentConfig | None) -> bytes | None:
    """Name of the header that units are assigned by, in lower case; None where it is something else."""
    kind, _, name = ("" if config is None else config.assign_by).partition(":")
    return name.lower().encode("ascii") if kind == "header" else None


def arm_for(unit: str, arms: tuple[Arm, ...], experiment: str) -> Arm:
    """The arm a unit belongs to. arms : at least one, shares > 0; by their names, in no particular order"""
    return min(arms, key=lambda arm: _distance(f"{experiment}\0{arm.name}\0{unit}") / arm.share)


def _distance(text: str) -> float:
    """-ln of a hash in (0, 1): exponentially distributed over texts."""
    return -log((xxhash.xxh3_64_intdigest(text.encode()) + 0.5) / 2**64)
