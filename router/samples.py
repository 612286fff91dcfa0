"""Turns first tokens into samples of how long a replica takes for prefill work.

Model     a first-come engine computes prompts in steps of a fixed number of tokens, one prompt after the other, and
          fills a step with the start of the next prompt. A first token comes at the end of a step, so the time from
          one to the next is a whole number of steps whose tokens are known: of the prompts that ended in them, what
          earlier steps had left, and whatever else filled the last one. First tokens that come closer to each other
          than any step lasts came out of one
Valid     requests whose computed tokens are known: reported by the engine, whose word counts, or counted from a token
          prompt and its expected reuse. An answer that is not streamed shows no first token; its prefill was over
          when the next request behind it got one
Blind to  a start that a fetch decided, a request that left or was overtaken, whatever else holds up a replica, and who
          came just when the last step began: no sample rather than a wrong one
Source    service times of a work-conserving queue are the gaps between its departures
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil, isnan, nan, sqrt

import numpy as np
import numpy.typing as npt

from estimators.prefill_features import Beside, prefill_features
from estimators.queueing import decode_step_one_s
from estimators.view import FleetView
from router.bookings import Booking

UNSURE_SHARE = 0.3  # of a step: how much longer or shorter it may be than its tokens say
UNLIKE_TOKENS = 64.0  # computed more or less than booked by this: another amount filled the step than was thought


@dataclass(frozen=True, slots=True)
class Computed:
    """What an engine really did for one prompt, tokens."""

    new_tokens: float
    reused_tokens: float


@dataclass(slots=True, eq=False)
class Turn:
    """A booking whose prefill is not known to be over.

    done_tokens : of its prompt, in steps that are accounted for; doubt_tokens : standard deviation of that
    """

    booking: Booking
    done_tokens: float = 0.0
    doubt_tokens: float = 0.0

    @property
    def left_tokens(self) -> float:
        return max(1.0, self.booking.new_tokens - self.done_tokens)

    @property
    def queued_at_s(self) -> float:
        """When the engine could have taken it: it had come, and what it fetches was there."""
        return max(self.booking.placed_at_s, self.booking.ready_at_s)


@dataclass(slots=True, eq=False)
class Stretch:
    """The steps from one first token to the next. Void: teaches nothing.

    turns : prefills that ended with it; computed has an entry for each booking that is over, None where unknown
    fill : starts of later prefills in its last step: booking, tokens done before, tokens done here
    open : more first tokens may still come out of its last step
    """

    starts_at_s: float
    ends_at_s: float
    blur_s: float
    beside: Beside
    void: bool
    open: bool = True
    turns: list[Turn] = field(default_factory=list)
    fill: list[tuple[Booking, float, float]] = field(default_factory=list)
    computed: dict[Booking, Computed | None] = field(default_factory=dict)


@dataclass(slots=True)
class Lane:
    """One replica's prefills.

    waiting : in order of placing
    free_at_s : moment from which the GPU works on the first of them, NaN unknown; blur_s : its standard deviation
    beside : what steps held then
    """

    waiting: OrderedDict[Booking, Turn] = field(default_factory=OrderedDict)
    free_at_s: float = nan
    blur_s: float = 0.0
    beside: Beside | None = None
    last: Stretch | None = None


# row, features, seconds taken, standard deviation of what is not known of them
OnSample = Callable[[int, npt.NDArray[np.float64], float, float], None]


class PrefillSamples:
    """Samples of a whole fleet. For each booking `placed`, `first_token` before the ledger hears of it, and `ended`.

    work_s : (linear, attention) seconds of row, new tokens and tokens before them; the output head not included
    beside : what each step on a row holds besides a prefill, as of now
    disturbed : whether something else than the router's bookings may hold up prefills on a row, as of now
    """

    def __init__(
        self,
        view: FleetView,
        *,
        work_s: Callable[[int, float, float], tuple[float, float]],
        beside: Callable[[int], Beside],
        step_tokens: int,
        on_sample: OnSample,
        disturbed: Callable[[int], bool] = lambda row: False,
    ) -> None:
        self._view = view
        self._work_s = work_s
        self._beside = beside
        self._step_tokens = step_tokens
        self._on_sample = on_sample
        self._disturbed = disturbed
        self._lanes = [Lane() for _ in range(view.rows)]
        self._stretch_of: dict[Booking, Stretch] = {}

    def renew(self, row: int) -> None:
        """`row` is that of another replica; nothing is booked there."""
        self._lanes[row] = Lane()

    def placed(self, booking: Booking, now_s: float) -> None:
        """`booking` was given to its replica."""
        if not booking.request.generates:
            return
        lane = self._lanes[booking.row]
        if not any(turn.queued_at_s <= now_s for turn in lane.waiting.values()):
            self._free(lane, booking, now_s)
        lane.waiting[booking] = Turn(booking)

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The first token of `booking` came at `now_s`."""
        lane = self._lanes[booking.row]
        if booking not in lane.waiting:
            return
        stretch = lane.last
        if stretch is None or not stretch.open or self._is_later(booking.row, stretch, now_s):
            self._close(lane)
            stretch = lane.last = self._stretch_to(now_s, lane, booking.row)
        for turn in self._over_with(booking, lane, stretch):
            del lane.waiting[turn.booking]
            stretch.turns.append(turn)
            self._stretch_of[turn.booking] = stretch

    def ended(self, booking: Booking, computed: Computed | None, now_s: float) -> None:
        """`booking` ended; None when what was computed for it is not known. Once more for the same one does nothing."""
        lane = self._lanes[booking.row]
        if lane.waiting.pop(booking, None) is not None:  # nobody saw whether its prefill was over, or had begun
            lane.free_at_s = nan
        stretch = self._stretch_of.pop(booking, None)
        if stretch is None:
            return
        stretch.computed[booking] = computed
        if stretch.open and self._is_later(booking.row, stretch, now_s):
            self._close(lane)
        else:
            self._observe(stretch)

    def _free(self, lane: Lane, booking: Booking, now_s: float) -> None:
        """The GPU takes `booking` next: at the end of the step in progress, if it is there then."""
        beside = self._beside(booking.row)
        pace = float(self._view.pace_scale[booking.row])
        step_s = pace * decode_step_one_s(self._view, booking.row, beside) if beside.decodes > 0 else 0.0
        lane.free_at_s = now_s + step_s / 2 if booking.ready_at_s <= now_s else nan
        lane.blur_s = step_s / sqrt(12)  # of a moment that is anywhere in the step
        lane.beside = beside

    def _is_later(self, row: int, stretch: Stretch, now_s: float) -> bool:
        """Whether what comes out now is of another step than the stretch's last: none is as short as half a pass."""
        return now_s - stretch.ends_at_s > 0.5 * float(self._view.pace_scale[row] * self._view.weights_s[row])

    def _stretch_to(self, now_s: float, lane: Lane, row: int) -> Stretch:
        """What has lasted until now; the next stretch begins now."""
        now = self._beside(row)
        void = isnan(lane.free_at_s) or now_s <= lane.free_at_s or self._disturbed(row)
        stretch = Stretch(lane.free_at_s, now_s, lane.blur_s, mean_of(lane.beside or now, now), void)
        lane.free_at_s, lane.blur_s, lane.beside = now_s, 0.0, now
        return stretch

    def _over_with(self, booking: Booking, lane: Lane, stretch: Stretch) -> list[Turn]:
        """Whose prefill is over once `booking` has its first token: its own, and silent ones that were before it."""
        over: list[Turn] = []
        for turn in lane.waiting.values():
            if turn.booking is booking:
                over.append(turn)
                break
            if turn.queued_at_s < stretch.ends_at_s:
                if turn.booking.request.streams:
                    stretch.void = True  # overtaken, and nobody knows how long it had the GPU
                else:
                    over.append(turn)
        return over

    def _close(self, lane: Lane) -> None:
        """Nothing more comes out of the last stretch: account for what else its last step held."""
        stretch = lane.last
        if stretch is None or not stretch.open:
            return
        stretch.open = False
        # A fetch that held the GPU, or of which a part was used, is in the time and not in the work.
        stretch.void |= not never_idle(stretch) or any(turn.booking.held_s > 0 for turn in stretch.turns)
        room = max(1.0, self._step_tokens - float(stretch.beside.decodes))
        tokens = sum(turn.left_tokens for turn in stretch.turns)
        steps = ceil(tokens / room)
        doubt = sqrt(sum(turn.doubt_tokens**2 for turn in stretch.turns))
        spare = steps * room - tokens
        if doubt > 0:
            if min(spare, room - spare) <= 2.0 * doubt:
                doubt = room  # it may be a step more or less
            self._blur(stretch, doubt)
        began_s = self._last_began_s(stretch, steps=steps, room=room, tokens=tokens)
        self._fill(stretch, lane, spare_tokens=spare, doubt_tokens=doubt, began_s=began_s)
        self._observe(stretch)

    def _blur(self, stretch: Stretch, doubt_tokens: float) -> None:
        """Its work is not known to `doubt_tokens` tokens."""
        if doubt_tokens > 0:
            row = stretch.turns[0].booking.row
            doubt_s = doubt_tokens * float(self._view.linear_s_per_token[row] * self._view.coefficients[row, 0])
            stretch.blur_s = sqrt(stretch.blur_s**2 + doubt_s**2)

    def _last_began_s(self, stretch: Stretch, *, steps: int, room: float, tokens: float) -> tuple[float, float]:
        """Earliest and latest moment at which the last step can have begun."""
        row = stretch.turns[0].booking.row
        token_s, fixed_s = float(self._view.linear_s_per_token[row]), float(self._view.weights_s[row])
        full_s = room * token_s + fixed_s
        if stretch.void:  # no time to go by but the expected one
            return stretch.ends_at_s - 2.0 * full_s * float(self._view.coefficients[row, 0]), stretch.ends_at_s
        if steps == 1:
            return stretch.starts_at_s - stretch.blur_s * sqrt(3), stretch.starts_at_s + stretch.blur_s * sqrt(3)
        partial_s = (tokens - (steps - 1) * room) * token_s + fixed_s
        took_s = stretch.ends_at_s - stretch.starts_at_s
        longest_s = (1.0 + UNSURE_SHARE) * took_s / steps  # it was full
        shortest_s = (1.0 - UNSURE_SHARE) * took_s * partial_s / ((steps - 1) * full_s + partial_s)  # nobody else in it
        return stretch.ends_at_s - longest_s, stretch.ends_at_s - shortest_s

    def _fill(
        self, stretch: Stretch, lane: Lane, *, spare_tokens: float, doubt_tokens: float, began_s: tuple[float, float]
    ) -> None:
        """Give what the last step had to spare to those who were waiting when it began.

        Who may or may not have been there has half of it, give or take as much. It was no whole prompt: that would
        have had its first token.
        """
        earliest_s, latest_s = began_s
        for turn in lane.waiting.values():
            if (spare_tokens <= 0 and doubt_tokens <= 0) or turn.booking.placed_at_s > latest_s:
                return
            if turn.queued_at_s > latest_s:
                continue
            taken = min(spare_tokens, turn.left_tokens)
            spare_tokens -= taken
            self._blur(stretch, turn.doubt_tokens)
            if turn.queued_at_s > earliest_s or taken >= turn.left_tokens:
                stretch.void = True
                taken /= 2
                turn.doubt_tokens = max(turn.doubt_tokens, taken)
            turn.doubt_tokens = max(turn.doubt_tokens, min(doubt_tokens, turn.left_tokens))
            if taken > 0:
                stretch.fill.append((turn.booking, turn.done_tokens, taken))
                turn.done_tokens += taken
            if spare_tokens <= 0:
                return

    def _observe(self, stretch: Stretch) -> None:
        """Hand a stretch over, once, as soon as all is known about it."""
        if stretch.open or stretch.void or len(stretch.computed) < len(stretch.turns):
            return
        stretch.void = True
        parts = list(parts_of(stretch))
        if not parts:
            return
        row = stretch.turns[0].booking.row
        works = [self._work_s(row, tokens, before) for tokens, before in parts]
        features = prefill_features(
            linear_s=sum(linear_s for linear_s, _ in works) + len(stretch.turns) * float(self._view.head_s[row]),
            attention_s=sum(attention_s for _, attention_s in works),
            new_tokens=sum(tokens for tokens, _ in parts),
            beside=stretch.beside,
            step_tokens=self._step_tokens,
        )
        self._on_sample(row, features, stretch.ends_at_s - stretch.starts_at_s, stretch.blur_s)


def never_idle(stretch: Stretch) -> bool:
    """Whether the GPU had one of the stretch's prompts all the time, as far as can be told.

    What came out of the last step was there when that began. Of what was computed before it nobody saw the end, so
    who came behind must have come in the first half of the part of the time that its tokens can have taken.
    """
    took_s = stretch.ends_at_s - stretch.starts_at_s
    total = sum(turn.left_tokens for turn in stretch.turns)
    before = 0.0
    for turn in stretch.turns:
        if not turn.queued_at_s <= stretch.starts_at_s + 0.5 * took_s * before / total:
            return False
        if turn.booking.request.streams:
            return True
        before += turn.left_tokens
    return False  # nothing in it was seen


def parts_of(stretch: Stretch) -> Iterator[tuple[float, float]]:
    """(Tokens computed in a stretch, tokens before them), prompt by prompt; nothing when that is not known."""
    ended: list[tuple[float, float]] = []
    for turn in stretch.turns:
        computed = stretch.computed[turn.booking]
        if computed is None or computed.new_tokens <= turn.done_tokens:
            return
        if stretch.fill and abs(computed.new_tokens - turn.booking.new_tokens) > UNLIKE_TOKENS:
            return
        ended.append((computed.new_tokens - turn.done_tokens, computed.reused_tokens + turn.done_tokens))
    yield from ended
    for booking, done_tokens, tokens in stretch.fill:
        yield tokens, booking.reused_tokens + done_tokens


def mean_of(one: Beside, other: Beside) -> Beside:
    """What steps held on average between two moments of one replica."""
    return Beside(
        decodes=(one.decodes + other.decodes) / 2,
        linear_s=(one.linear_s + other.linear_s) / 2,
        attention_s=(one.attention_s + other.attention_s) / 2,
        memory_s=(one.memory_s + other.memory_s) / 2,
        weights_s=one.weights_s,
    )
