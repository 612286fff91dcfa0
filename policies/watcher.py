"""What a rule may be told of requests after its choice, so that it can count and learn.

Model     every placement is told, whoever chose it: another arm of an experiment, a retry. Each is ended exactly once;
          a first token is told only where it was seen, before the end
Valid     times in order; `fleet.now_s` is that of the event, and the columns have it already
Blind to  requests that are not placed: refused ones, and those a shadow arm decides about
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from estimators.estimates import Estimates
from estimators.paths import Path
from estimators.request import RequestFacts
from estimators.view import FleetView


class Placed(Protocol):
    """One request on one replica: the same object each time, good as a key of a dictionary. Not to be changed.

    row, path : as chosen
    placed_at_s, first_token_at_s : moments; the second NaN until it was seen
    new_tokens, reused_tokens : prompt tokens expected to be computed, and not
    output_tokens : expected output
    """

    @property
    def request(self) -> RequestFacts: ...
    @property
    def row(self) -> int: ...
    @property
    def path(self) -> Path: ...
    @property
    def placed_at_s(self) -> float: ...
    @property
    def first_token_at_s(self) -> float: ...
    @property
    def new_tokens(self) -> float: ...
    @property
    def reused_tokens(self) -> float: ...
    @property
    def output_tokens(self) -> float: ...


class Watcher:
    """Base of rules that are told. Overrides nothing it does not need.

    A rule can come into use while requests are under way: it is then told of ends whose beginnings it never saw.
    """

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        """`placed` is booked. estimates : what it was chosen from, lent for this call"""
        return

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        """Its first token was seen."""
        return

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        """It is over, whatever the way: answered, failed, cancelled, or tried elsewhere."""
        return


class Several(Watcher):
    """Tells each of `watchers`."""

    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        for watcher in self._watchers:
            watcher.placed(placed, fleet, estimates)

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        for watcher in self._watchers:
            watcher.first_token(placed, fleet)

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        for watcher in self._watchers:
            watcher.ended(placed, fleet)


def watcher_of(*policies: object) -> Watcher | None:
    """One that tells all of `policies` that watch; None when none does."""
    watchers = [policy for policy in policies if isinstance(policy, Watcher)]
    return watchers[0] if len(watchers) == 1 else Several(watchers) if watchers else None
