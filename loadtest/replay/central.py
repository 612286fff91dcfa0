"""Late binding: one queue before all replicas, from which a replica takes its next request when it is free.

Model     free is a replica with no prefill waiting or running; decodes may run. It takes its next request between
          two of its steps, if it has blocks for the prompt. Of several free ones a request goes to the one that
          prefills it soonest, a slow one as late as it is, of equal ones to the one with the fewest decodes. One
          global cache with free transfer: what a perfect cache has when a request arrives
          (`bounds.ideal_cached_tokens`) is declared present wherever it runs
Valid     the same engines, steps and output limits as behind a router. A prompt that no replica can ever run is left
          unanswered
Blind to  output lengths: decodes that outgrow the memory preempt as they do behind a router. A request that is
          computed again after that counts as waiting, not as running
Why two   `central_fcfs` takes the oldest request: the yardstick for placement. `central_sjf` takes the one with the
          least ideal prefill: the yardstick for order
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import msgspec
import numpy as np

from loadtest.replay.bounds import Floats, fastest_s, ideal_cached_tokens, prefill_alone_s, prompt_tokens_of
from loadtest.replay.results import Result, blank, room_for_output
from loadtest.traffic import TOKENS_PER_ID, TrafficRow
from sim_backends.fleet import Fleet
from sim_backends.requests import EngineRequest, Output
from sim_backends.world import World, build

ORDERS = ("central_fcfs", "central_sjf")
_FREE = -1


class Central:
    """One run of one order over `rows`, in order of arrival, times as on cards of normal speed."""

    def __init__(
        self,
        fleet: Fleet,
        rows: Sequence[TrafficRow],
        *,
        order: str,
        tokens_per_id: int = TOKENS_PER_ID,
        seed: int = 0,
    ) -> None:
        """`order` is one of ORDERS, `seed` that of the engines.

        Raises
        ------
        ValueError : another order, more than one model, or replicas that only prefill or only decode.
        """
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}, known are {', '.join(ORDERS)}")
        if any(replica.role != "both" for replica in fleet.replicas):
            raise ValueError("late binding is of replicas that prefill and decode, but some of these do only one")
        self._rows = rows
        self._world = _world(fleet, seed)
        self._cached = ideal_cached_tokens(rows, block_tokens=fleet.block_tokens, tokens_per_id=tokens_per_id)
        alone_s = prefill_alone_s(fleet, prompt_tokens=prompt_tokens_of(rows), cached_tokens=self._cached)
        self._replica_of = [row for row, replica in enumerate(fleet.replicas) for _rank in range(replica.ranks)]
        kinds = [(fleet.replicas[row].card, fleet.replicas[row].slow) for row in self._replica_of]
        self._alone_s: list[Floats] = [alone_s[card] * slow for card, slow in kinds]  # by engine
        least_s = fastest_s(fleet, alone_s)
        self._rank: Floats = least_s if order == "central_sjf" else np.arange(len(rows), dtype=np.float64)
        self._block_tokens = fleet.block_tokens
        self._queue: list[tuple[float, int]] = []  # (rank, request): a heap
        self._prefilling = [_FREE] * len(self._replica_of)  # request whose first token has not come yet
        self._result = blank(
            order,
            replicas=[replica.name for replica in fleet.replicas],
            cards=[replica.card for replica in fleet.replicas],
            requests=len(rows),
        )
        for row, engine in enumerate(self._world.engines):
            engine.between_steps = partial(self._between_steps, row)

    @property
    def world(self) -> World:
        """The engines, to be asked for their counters."""
        return self._world

    def run(self, on_progress: Callable[[int], None] | None = None) -> Result:
        """Play everything to the last token. `on_progress` hears how many requests have arrived."""
        began_s = time.process_time()
        for index, row in enumerate(self._rows):
            self._advance_to(row.at_s)
            self._arrive(index, row)
            if index + 1 == len(self._rows) or self._rows[index + 1].at_s > row.at_s:
                self._place_where_free(row.at_s)  # those that arrive together are all there before one is placed
            if on_progress is not None and index % 64 == 63:
                on_progress(index + 1)
        self._advance_to(inf)
        self._result.took_s = time.process_time() - began_s
        return self._result

    # Time

    def _advance_to(self, now_s: float) -> None:
        """Everything due before `now_s`: a step that starts just then comes after the arrival."""
        while (due_s := self._world.next_due_s()) is not None and due_s < now_s:
            for output in self._world.advance(due_s):
                self._note(output)
            self._place_where_free(due_s)

    def _arrive(self, index: int, row: TrafficRow) -> None:
        self._result.arrived_s[index] = row.at_s
        self._result.prompt_tokens[index] = row.input_length
        self._result.wanted_tokens[index] = row.output_length
        if any(self._can_run(replica, index) for replica in range(len(self._prefilling))):
            heapq.heappush(self._queue, (float(self._rank[index]), index))

    def _between_steps(self, row: int, outputs: list[Output]) -> None:
        """A replica has just ended a step: if that freed it, its next step begins with its next request."""
        for output in outputs:
            if int(output.request_id) == self._prefilling[row]:
                self._prefilling[row] = _FREE
                if self._queue and self._is_free(row) and self._has_room(row, self._queue[0][1]):
                    self._world.engines[row].submit(self._take(row), output.at_s)

    # Placing

    def _is_free(self, row: int) -> bool:
        engine = self._world.engines[row]
        return self._prefilling[row] == _FREE and not engine.waiting and engine.running < engine.settings.max_running

    def _can_run(self, row: int, index: int) -> bool:
        """Whether the replica could run the request if it had nothing else to do."""
        return self._rows[index].input_length < self._world.engines[row].max_model_len

    def _has_room(self, row: int, index: int) -> bool:
        """Whether the replica has blocks for the prompt now; a request sent without would wait there."""
        blocks = -(-self._rows[index].input_length // self._block_tokens)
        return blocks <= self._world.engines[row].cache.free_blocks and self._can_run(row, index)

    def _place_where_free(self, now_s: float) -> None:
        """Requests in their order, each on the best of the free replicas, until one finds none."""
        free = [row for row in range(len(self._prefilling)) if self._is_free(row)] if self._queue else []
        while free and self._queue:
            index = self._queue[0][1]
            fit = [row for row in free if self._has_room(row, index)]
            if not fit:
                return
            best = min(fit, key=lambda row: (self._alone_s[row][index], self._world.engines[row].running, row))
            self._world.submit(best, self._take(best), now_s)
            free.remove(best)

    def _take(self, row: int) -> EngineRequest:
        """The head of the queue, for the replica in `row`."""
        index = heapq.heappop(self._queue)[1]
        self._prefilling[row] = index
        self._result.row[index] = self._replica_of[row]
        asked = self._rows[index]
        return EngineRequest(
            request_id=str(index),
            block_ids=list(range(asked.input_length // self._block_tokens)),
            prompt_tokens=asked.input_length,
            max_tokens=room_for_output(self._world.engines[row], asked),
            output_tokens=asked.output_length,
            # Its cache is what is declared and nothing else: work done for another counts only as the ideal has it.
            cache_salt=str(index),
            given_tokens=int(self._cached[index]),
        )

    def _note(self, output: Output) -> None:
        index, result = int(output.request_id), self._result
        after_s = output.at_s - result.arrived_s[index]
        if output.index == 0:
            result.first_token_s[index] = after_s
            result.cached_tokens[index] = output.cached_tokens
        if output.finish_reason is not None:
            result.ended_s[index] = after_s
            result.output_tokens[index] = output.index + 1


def _world(fleet: Fleet, seed: int) -> World:
    """The engines, up from the start and with nothing but their own memory: there is nothing to fetch."""
    replicas = [msgspec.structs.replace(replica, start_s=0.0) for replica in fleet.replicas]
    bare = msgspec.structs.replace(fleet, speed=1.0, replicas=replicas, store=None, tiers=None, peers=None)
    return build(bare, seed=seed, outputs="ends")


def central(
    fleet: Fleet, rows: Sequence[TrafficRow], *, order: str, tokens_per_id: int = TOKENS_PER_ID, seed: int = 0
) -> Result:
    """The result of one order; see `Central`. Columns a router fills alone (predictions, paths) are unknown."""
    return Central(fleet, rows, order=order, tokens_per_id=tokens_per_id, seed=seed).run()
