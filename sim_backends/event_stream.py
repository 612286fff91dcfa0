"""All that one replica announces: its engine's batches in their wire form, disturbed if its faults say so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sim_backends.cache_events import Cleared, EventBatch, Said
from sim_backends.event_wire import EventEncoder
from sim_backends.faults import Detour, FaultPlan
from sim_backends.publisher import ReplayingPublisher


class EventStream:
    """Owns its publisher and at most one timer.

    new_encoder : makes the encoder of a new process, which knows of nothing said before
    unix_offset_s : Unix time minus the engine's time
    announces_start : a new process first says that all is cleared, as SGLang's does
    """

    def __init__(
        self,
        publisher: ReplayingPublisher,
        plan: FaultPlan,
        *,
        new_encoder: Callable[[], EventEncoder],
        unix_offset_s: float,
        announces_start: bool,
    ) -> None:
        self.publisher = publisher
        self._plan = plan
        self._new_encoder = new_encoder
        self._encoder = new_encoder()
        self._unix_offset_s = unix_offset_s
        self._announces_start = announces_start
        self._loop = asyncio.get_running_loop()
        self._detour = Detour()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[EventBatch] | None = None  # while the publisher restarts

    def start(self, now_s: float) -> None:
        """Begin to answer replays; `now_s` in the engine's time."""
        self.publisher.start()
        self._open(now_s)

    def publish(self, batches: Sequence[EventBatch]) -> None:
        """Announce these, oldest first."""
        if self._waiting is not None:
            self._waiting.extend(batches)
            return
        for batch in batches:
            self._encode_and_send(batch.events, batch.at_s)

    async def restart(self, now_s: float) -> None:
        """What a new process does, after the engine has lost everything and its batches were thrown away."""
        self._waiting = []
        self._drop_held()
        self._encoder = self._new_encoder()
        await self.publisher.restart()
        waiting, self._waiting = self._waiting, None
        self._open(now_s)
        self.publish(waiting)

    async def close(self) -> None:
        self._drop_held()
        await self.publisher.close()

    def _open(self, now_s: float) -> None:
        if self._announces_start:
            self._encode_and_send([Cleared()], now_s)

    def _drop_held(self) -> None:
        self._detour.drop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _encode_and_send(self, events: Sequence[Said], at_s: float) -> None:
        unix_s = at_s + self._unix_offset_s + self._plan.faults.clock_skew_s
        payload = self._encoder.encode(events, unix_s=unix_s)
        if payload is None:
            return
        if self._plan.disturbs_events or self._timer is not None:  # those held back go first
            self._send_disturbed(payload)
        else:
            self.publisher.publish(payload)

    def _send_disturbed(self, payload: bytes) -> None:
        faults, now_s = self._plan.faults, self._loop.time()
        if self._plan.loses_batch():
            self.publisher.number(payload, replayable=not faults.event_loss_for_good)
            return
        held_s = faults.event_reorder_s if self._plan.holds_batch() else 0.0
        seq = self.publisher.number(payload)
        self._detour.put(seq, payload, now_s=now_s, delay_s=faults.event_delay_s, held_s=held_s)
        self._send_due()

    def _send_due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for seq, payload in self._detour.take_due(self._loop.time()):
            self.publisher.send(seq, payload)
        if self._detour.due_s < float("inf"):
            self._timer = self._loop.call_at(self._detour.due_s, self._send_due)
