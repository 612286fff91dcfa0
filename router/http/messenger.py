"""Puts an exchange's questions to the decider, and carries what it answers to whom it is for.

Model     an answer can hold actions for requests that waited: whatever is told can make room. Those for the one who
          asked are returned; the others are given to their exchanges at once, which obey in turn, after the question
          is over. What time alone causes is asked for by a timer, which runs only while somebody waits
Valid     one loop; an exchange is given an action only while it waits, and then hears of it exactly once
Blind to  what the actions say
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Protocol

from router.actions import Action, Hold, Refuse, Send
from router.http.contract import Clock, Decider

_LEAST_S = 0.001  # between two looks: the loop counts whole milliseconds
_AFTER_BUG_S = 1.0  # until the next look after one that raised, so that a mistake costs no processor

_log = logging.getLogger(__name__)


class Waiter(Protocol):
    """An exchange, as far as it waits."""

    def held(self, hold: Hold) -> None:
        """It waits from now on."""

    def granted(self, action: Send | Refuse) -> None:
        """It does not wait any more; `proceed` follows, or its client leaves before."""

    def proceed(self) -> None:
        """Obey what was granted."""


class Messenger:
    """Between all exchanges of a port and their decider. internal_error : told of what the decider raised"""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, decider: Decider, clock: Clock, internal_error: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._decider = decider
        self._clock = clock
        self._internal_error = internal_error
        self._granted: deque[Waiter] = deque()
        self._waiting = 0  # how many are held
        self._carrying = False
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = inf  # when the timer looks

    def ask(self, waiter: Waiter | None, rule: Callable[..., list[Action]], *facts: object) -> list[Action] | None:
        """The decider's answer for the one who asks, a `Hold` left out; None when it raised."""
        actions = self._put(waiter, rule, *facts)
        if self._waiting:
            self._watch()
        return actions

    def leave(self, waiter: Waiter, rule: Callable[..., list[Action]], hold: Hold) -> None:
        """Tell the decider by `rule` that one who waits does not wait any more."""
        self._waiting -= 1
        self.ask(waiter, rule, hold)

    def look(self) -> None:
        """Somebody told the decider of a replica: who waits may go, or has nowhere to go."""
        if self._waiting:
            self._watch()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = None, -inf

    def _put(self, waiter: Waiter | None, rule: Callable[..., list[Action]], *facts: object) -> list[Action] | None:
        try:
            actions = rule(*facts, self._clock())
        except Exception:
            self._internal_error()
            _log.exception("the decider raised")
            return None
        return self._sorted(waiter, actions) if actions else actions

    # -- actions

    def _sorted(self, waiter: Waiter | None, actions: list[Action]) -> list[Action]:
        if len(actions) == 1 and not isinstance(actions[0], Hold) and actions[0].held is None:  # nearly always
            return actions
        own: list[Action] = []
        others = False
        for action in actions:
            if isinstance(action, Hold):
                assert waiter is not None, "only who asks is made to wait"
                action.owner = waiter
                self._waiting += 1
                waiter.held(action)
            elif action.held is None:
                own.append(action)
            else:
                others = True
                owner: Waiter = action.held.owner
                action.held.owner = None  # the action refers to the hold as long as it lives
                self._waiting -= 1
                owner.granted(action)
                self._granted.append(owner)
        if others and not self._carrying:
            self._carrying = True
            self._loop.call_soon(self._carry)
        return own

    def _carry(self) -> None:
        """Let all proceed that were granted something, those included whom that makes room for."""
        try:
            while self._granted:
                self._granted.popleft().proceed()
        finally:
            self._carrying = False
            if self._granted:  # one of them raised: the others must not wait for it
                self._carrying = True
                self._loop.call_soon(self._carry)

    # -- time

    def _watch(self) -> None:
        """See that `due` is asked when it is wanted."""
        due_s = self._decider.next_due_s
        if due_s is None or self._due_s <= due_s:
            return
        self._due_s = due_s
        self._look_in(max(_LEAST_S, due_s - self._clock()))

    def _look_in(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._loop.time() + wait_s, self._fired)

    def _fired(self) -> None:
        self._timer, self._due_s = None, inf
        if self._put(None, self._decider.due) is None:
            self._due_s = -inf
            self._look_in(_AFTER_BUG_S)
        elif self._waiting:
            self._watch()
