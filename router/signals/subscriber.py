"""One event source over ZMQ: subscribe, replay what was missed, apply in order, notice gaps and restarts.

Model     SUB for the live stream, a DEALER for each replay. Live batches wait in the SUB queue while a replay
          runs; `Sequence` judges each of them afterwards, so order is the publisher's own.
Valid     publishers that number batches per process; replay replies with or without a topic frame
Blind to  several publishers behind one bound address: use one address for each
Source    vLLM's `ZmqEventPublisher` and SGLang's: frames [topic, seq, payload], replay [empty, start] -> ... -> end

A view that lost history is cleared and shown as degraded: it may miss hits, it never believes a block that
could have been removed meanwhile. It is whole again when the source clears itself or a replay starts at its
first batch. A source that stays disconnected is forgotten too: what it removes meanwhile is not heard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.signals.sequence import Sequence, State, Verdict
from router.signals.stream import Stream, StreamCounts
from router.signals.wire import BadFrame, Batch, frame

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
_END_SEQ = (1 << 64) - 1
_SLICE_S = 0.0005  # longest stretch of applying batches before other tasks get the loop
_MAX_MESSAGE_BYTES = 256 << 20  # a peer that sends more is cut off by ZMQ; real batches stay far below
_LOOK_AGAIN_S = 1.0  # idle sockets are looked at this often even if no wake-up came
_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_LOST = zmq.Event.DISCONNECTED


@dataclass(frozen=True, slots=True)
class Source:
    """Where one publisher is.

    events : ZMQ address of its PUB socket; an address with `*` is bound here and the engine connects
    replay : ZMQ address of its replay ROUTER, None when it has none
    topic : prefix of the topics wanted
    rank : data-parallel rank it speaks for, None when there is only one
    first_seq : number of a new process's first batch
    one_copy : see `Directory.add_source`
    """

    events: str
    replay: str | None = None
    topic: str = ""
    rank: int | None = None
    first_seq: int = 0
    one_copy: bool = False


def has_input(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


async def readable(deadline_s: float, *sockets: Socket) -> None:
    """Wait until one of the sockets has a message.

    Plain sockets and their file descriptors, since an asyncio receive costs more than applying a batch.
    A descriptor only says "look again": it is watched while nothing else reads the socket, and each look at
    EVENTS rearms it.

    Raises
    ------
    TimeoutError : nothing came within `deadline_s`
    """
    if any(map(has_input, sockets)):
        return
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    for socket in sockets:
        loop.add_reader(socket.fileno(), woken.set)
    try:
        async with asyncio.timeout(deadline_s):
            while not any(map(has_input, sockets)):
                await woken.wait()
                woken.clear()
    finally:
        for socket in sockets:
            loop.remove_reader(socket.fileno())


def open_subscription(context: zmq.Context[Socket], address: str, topic: str) -> Socket:
    """A SUB socket that loses nothing on its side, not attached yet."""
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, 0)
    sub.setsockopt(zmq.LINGER, 0)
    sub.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    sub.setsockopt(zmq.IPV6, int("[" in address))
    # Dead peers (a host gone without FIN) are noticed in seconds instead of never.
    sub.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
    sub.setsockopt_string(zmq.SUBSCRIBE, topic)
    return sub


def attach(sub: Socket, address: str) -> None:
    """Bind where `address` has a wildcard, as engines that dial their router need it; else connect."""
    if "*" in address:
        sub.bind(address)
    else:
        sub.connect(address)


class EventSubscriber:
    """Owner of one subscription. `start` inside a running loop, `stop` before the loop ends.

    Parameters
    ----------
    source : where to listen
    apply : called with each batch in the publisher's order; must not await
    cleared : called when everything heard so far must be forgotten
    replay_deadline_s : longest silence during a replay, > 0
    forget_after_s : how long the view of a publisher that is not connected is still believed, > 0
    retry_s : pause before the loop is restarted after an unexpected error, > 0
    context : ZMQ context to share; by default one of its own
    """

    def __init__(
        self,
        source: Source,
        apply: Callable[[Batch], object],
        cleared: Callable[[], object],
        *,
        replay_deadline_s: float = 5.0,
        forget_after_s: float = 10.0,
        retry_s: float = 1.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not min(replay_deadline_s, forget_after_s, retry_s) > 0:
            raise ValueError("replay_deadline_s, forget_after_s and retry_s must be positive")
        self.source = source
        self.stream = Stream(source.events, apply, cleared, first_seq=source.first_seq, clock=clock)
        self.address: str | None = None  # as bound or connected; tells the port a wildcard became
        self._replay_deadline_s = replay_deadline_s
        self._forget_after_s = forget_after_s
        self._retry_s = retry_s
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._slice_start_s = 0.0
        self._last_payload = b""
        self._peers = 0
        self._alone_since_s: float | None = None  # when the last peer went away
        self._starts_over = False

    @property
    def sequence(self) -> Sequence:
        return self.stream.sequence

    @property
    def counts(self) -> StreamCounts:
        return self.stream.counts

    @property
    def state(self) -> State:
        return self.sequence.state

    def start(self) -> None:
        """Begin listening; the publisher need not exist yet."""
        assert self._task is None, "start is called once"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"events {self.source.events}")

    def start_over(self) -> None:
        """The publisher is another process, by evidence that did not come this way.

        Nothing is believed from now on, and its history is read from the first batch as soon as the loop gets there,
        within a second. Until then it is degraded.
        """
        self.stream.forget()
        self.sequence.history_lost()
        self._starts_over = True

    async def stop(self) -> None:
        """End the task and close its sockets. What was applied stays applied."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._own_context:
            self._context.destroy(linger=0)

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except Exception:
                self.counts.errors += 1
                log.exception("event source %s failed; retrying in %g s", self.source.events, self._retry_s)
                self.stream.forget()  # the failed batch is lost, so the view cannot be trusted
                self.sequence.connected = False
                self.sequence.history_lost()
                await asyncio.sleep(self._retry_s)

    async def _listen(self) -> None:
        self._peers, self._alone_since_s = 0, None
        sub = open_subscription(self._context, self.source.events, self.source.topic)
        monitor = sub.get_monitor_socket(_CONNECTED | _LOST)
        try:
            attach(sub, self.source.events)
            self.address = sub.getsockopt_string(zmq.LAST_ENDPOINT)
            await self._serve(sub, monitor)
        finally:
            sub.disable_monitor()
            monitor.close(linger=0)
            sub.close(linger=0)

    async def _serve(self, sub: Socket, monitor: Socket) -> None:
        look_again_s = min(_LOOK_AGAIN_S, self._forget_after_s)
        while True:
            with suppress(TimeoutError):
                await readable(look_again_s, sub, monitor)
            self._slice_start_s = self._clock()
            if self._starts_over:
                await self._hear_from_the_first()
            # Connection news first: a batch of the next process must not be judged by the old cursor.
            while has_input(monitor):
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
                await self._connection_changed(event == _CONNECTED)
            while has_input(sub) and not (has_input(monitor) or self._starts_over):
                await self._live(sub.recv_multipart(zmq.NOBLOCK))
                await self._breathe()  # also when none of them took effect
            self._forget_the_departed()

    async def _connection_changed(self, connected: bool) -> None:
        self._peers = max(0, self._peers + (1 if connected else -1))
        self.sequence.connected = self._peers > 0
        self._alone_since_s = None if self._peers else self._clock()
        if not connected:
            return
        if self.sequence.last is None:
            await self._replay(self.sequence.first)
        else:
            self.counts.reconnects += 1
            await self._resume()

    def _forget_the_departed(self) -> None:
        alone_s = 0.0 if self._alone_since_s is None else self._clock() - self._alone_since_s
        if alone_s > self._forget_after_s and self.sequence.last is not None:
            self.stream.forget()
            self.sequence.history_lost()

    async def _live(self, frames: list[bytes]) -> None:
        try:
            seq, payload = frame(frames)
        except BadFrame:
            self.counts.bad_frames += 1
            return
        batch = self.stream.decoded(payload)
        ts_s = 0.0 if batch is None else batch.ts_s
        verdict = self.sequence.feed(seq, ts_s)
        answered = False
        if verdict is Verdict.RESTART:
            self.stream.forget()
            answered = await self._replay(self.sequence.first)
            verdict = self.sequence.judge(seq)
        elif verdict is Verdict.GAP:
            self.sequence.gap(seq)
            answered = await self._replay(self.sequence.expected)
            verdict = self.sequence.judge(seq)
        if verdict is Verdict.GAP:
            if answered and self.sequence.is_older(ts_s):
                self.sequence.stray()  # not in the publisher's history, and older than what is
                return
            self.stream.lose_history()
        if verdict is not Verdict.STALE:
            await self._take(seq, payload, batch)

    async def _take(self, seq: int, payload: bytes, batch: Batch | None) -> None:
        self.stream.take(seq, batch)
        self._last_payload = payload
        await self._breathe()

    async def _breathe(self) -> None:
        if self._clock() - self._slice_start_s > _SLICE_S:
            await asyncio.sleep(0)
            self._slice_start_s = self._clock()

    async def _replay(self, start: int) -> bool:
        """Apply what the publisher still has from `start` on. True when it sent all of it, up to the end marker."""
        if self.source.replay is None:
            return False
        self.sequence.replaying(True)
        self.counts.replays += 1
        try:
            async with aclosing(self._history(self.source.replay, start)) as history:
                async for seq, payload in history:
                    if self.sequence.judge(seq) is Verdict.GAP:  # the window has passed `start`
                        self.stream.lose_history()
                    await self._take(seq, payload, self.stream.decoded(payload))
        except TimeoutError:
            self.counts.replays_failed += 1
            return False
        finally:
            self.sequence.replaying(False)
        return True

    async def _resume(self) -> None:
        """After a reconnect: the last batch comes again unchanged if the process is still the same one."""
        last = self.sequence.last
        assert last is not None, "resume follows a first connection"
        if self.source.replay is None:
            return
        if await self._continues(self.source.replay, last):
            await self._replay(last + 1)
        else:
            await self._hear_from_the_first()

    async def _hear_from_the_first(self) -> None:
        self._starts_over = False
        self.stream.forget()
        if not await self._replay(self.sequence.first):
            self.sequence.history_lost()

    async def _continues(self, address: str, last: int) -> bool:
        with suppress(TimeoutError):
            async with aclosing(self._history(address, last)) as history:
                async for seq, payload in history:
                    return seq == last and payload == self._last_payload
        return False

    async def _history(self, address: str, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Batches from `start` as the publisher replays them, each number once and rising.

        Raises
        ------
        TimeoutError : nothing came for the deadline, end marker included
        """
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.RCVHWM, 0)  # with the default, a slow reader loses the end marker
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.IPV6, int("[" in address))
            dealer.connect(address)
            dealer.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
            reached = start - 1
            while True:
                await readable(self._replay_deadline_s, dealer)
                try:
                    seq, payload = frame(dealer.recv_multipart(zmq.NOBLOCK))
                except BadFrame:
                    self.counts.bad_frames += 1
                    continue
                if not payload or seq == _END_SEQ:
                    return
                if seq > reached:
                    reached = seq
                    yield seq, payload
        finally:
            dealer.close(linger=0)
