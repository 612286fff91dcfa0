"""Which deployment holds a load, keeps its targets and costs least.

Model     rates as in `deployments`, every card equally busy. First token: a wait for prefill, for the link and for a
          place in a decode batch, each as M/G/c, then prefill and handoff; in time with the probability that the wait
          leaves. Pace: one step of the batch that the load keeps running (whole replicas: stretched by the prefills
          between steps). Backlog of a start as in `backlog`. Cost: all cards in use, idle or not, over what is in time
Valid     steady state; deployments compared under the same batch limit and the same shares of the peaks
Blind to  bursts, evictions, a policy's imbalance between replicas, a prefill that chunks slow down; see `--simulate`
Source    AI Infra textbook, section 9.7; queues as in `waits`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf, nan

from estimators.cost import SECONDS_PER_HOUR
from estimators.hardware import Card
from estimators.planning.backlog import StartUp, service_to_drain_rps, start_to_drain_s
from estimators.planning.deployments import (
    CardKind,
    Deployment,
    Facts,
    Organisation,
    RequestKind,
    all_deployments,
    batch_on,
    link_bytes_per_s,
    mean_times,
    moved_bytes,
    times_on,
)
from estimators.planning.waits import NONE, Wait, one_after_another, wait
from estimators.ranges import require
from estimators.roofline import Roofline
from estimators.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is asked of a deployment; inf, or for shares 0 and 1, where nothing is. All > 0.

    first_token_s : of a request, from its arrival
    good_share : of the requests that must have it in time, 0..1
    pace_s : between two tokens of an answer
    drained_by_s : after the start, when the backlog of the start must be gone
    most_busy : share of what it carries that may be asked of it, up to 1; near 1 every queue is long
    """

    first_token_s: float = inf
    good_share: float = 0.9
    pace_s: float = inf
    drained_by_s: float = inf
    most_busy: float = 1.0

    def __post_init__(self) -> None:
        for name in ("first_token_s", "pace_s", "drained_by_s"):
            require(getattr(self, name) > 0, name, getattr(self, name))
        require(0 <= self.good_share <= 1, "good_share", self.good_share)
        require(0 < self.most_busy <= 1, "most_busy", self.most_busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """arrival_rps : requests a second, > 0; ready_s : from the start until it serves, >= 0"""

    facts: Facts
    arrival_rps: float
    ready_s: float = 0.0
    targets: Targets = Targets()

    def __post_init__(self) -> None:
        require(0 < self.arrival_rps < inf, "arrival_rps", self.arrival_rps)
        require(0 <= self.ready_s < inf, "ready_s", self.ready_s)
        by_s = self.targets.drained_by_s
        require(self.ready_s < by_s, "ready_s", self.ready_s, f"not before {by_s:g} s, when the backlog is to be gone")

    @property
    def needed_rps(self) -> float:
        """What a deployment must carry: the arrivals and what they may not fill, or more to clear a start in time."""
        by_s = self.targets.drained_by_s
        steady_rps = self.arrival_rps / self.targets.most_busy
        if by_s == inf or self.ready_s == 0:
            return steady_rps
        return max(steady_rps, service_to_drain_rps(arrival_rps=self.arrival_rps, ready_s=self.ready_s, by_s=by_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """One deployment under a question. Seconds; NaN where there is no steady state.

    idle_first_token_s : without any wait; first_token_s, first_token_p90_s : mean and 90 % quantile with waits
    good_share : of the requests, first token in time; 0 where the queue grows for ever
    drained_at_s : after the start; inf where never
    cards : in use, all cards of all replicas
    usd_per_hour, usd_per_thousand_good : NaN where a card has no price
    misses : targets it does not meet, by a word (rate, start, first token, pace), and how; empty when it holds
    """

    deployment: Deployment
    idle_first_token_s: float
    first_token_s: float
    first_token_p90_s: float
    good_share: float
    pace_s: float
    drained_at_s: float
    cards: int
    usd_per_hour: float
    usd_per_thousand_good: float
    misses: dict[str, str]

    @property
    def holds(self) -> bool:
        return not self.misses


def assess(question: Question, chosen: Deployment) -> Assessment:
    """What `chosen` does with the load of `question`."""
    facts, arrival_rps = question.facts, question.arrival_rps
    keeps_up = chosen.per_s > arrival_rps
    fixed_s = _fixed_s(facts, chosen)
    queue = _wait(question, chosen)
    good = _in_time(facts, fixed_s, queue, question.targets.first_token_s) if keeps_up else 0.0
    idle_s = sum(share * one for share, one in zip(facts.shares, fixed_s, strict=True))
    cards = sum(chosen.counts) * facts.cards_each
    usd = _usd_per_hour(facts, chosen)
    finished = min(arrival_rps, chosen.per_s)
    found = Assessment(
        deployment=chosen,
        idle_first_token_s=idle_s,
        first_token_s=idle_s + queue.mean_s if keeps_up else nan,
        first_token_p90_s=_first_token_s(facts, fixed_s, queue, 0.9) if keeps_up else nan,
        good_share=good,
        pace_s=_pace_s(question, chosen),
        drained_at_s=StartUp(arrival_rps, chosen.per_s, question.ready_s).drained_at_s if keeps_up else inf,
        cards=cards,
        usd_per_hour=usd,
        usd_per_thousand_good=1000 * usd / (SECONDS_PER_HOUR * finished * good) if good else nan if usd != usd else inf,
        misses={},
    )
    return replace(found, misses=dict(_misses(question, found)))


def _in_time(facts: Facts, fixed_s: Sequence[float], queue: Wait, limit_s: float) -> float:
    """Share of all requests whose first token comes within `limit_s`."""
    late = [queue.longer_than(limit_s - one) for one in fixed_s]
    return 1.0 - sum(share * one for share, one in zip(facts.shares, late, strict=True))


def _first_token_s(facts: Facts, fixed_s: Sequence[float], queue: Wait, q: float) -> float:
    """Quantile `q` of the first token over all kinds, by halving: within a millionth of the longest looked at."""
    if queue.mean_s == inf:
        return inf
    low_s, high_s = min(fixed_s), max(fixed_s) + 100.0 * queue.mean_s + 1e-9
    while _in_time(facts, fixed_s, queue, high_s) < q:
        high_s *= 2.0
    for _ in range(40):
        middle_s = 0.5 * (low_s + high_s)
        if _in_time(facts, fixed_s, queue, middle_s) < q:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s


def _misses(question: Question, found: Assessment) -> Iterator[tuple[str, str]]:
    targets = question.targets
    if found.deployment.per_s <= question.arrival_rps:
        yield "rate", f"carries {found.deployment.per_s:.3g} of {question.arrival_rps:.3g} requests/s"
        return
    busy = question.arrival_rps / found.deployment.per_s
    if busy > targets.most_busy:
        yield "rate", f"{busy:.1%} busy, not {targets.most_busy:.0%} at most"
    if found.drained_at_s > targets.drained_by_s * (1 + 1e-9):
        yield "start", f"backlog gone after {found.drained_at_s:.1f} s, not {targets.drained_by_s:g} s"
    if found.good_share < targets.good_share:
        yield "first token", f"{found.good_share:.0%} of first tokens in time, not {targets.good_share:.0%}"
    if not found.pace_s <= targets.pace_s:
        yield "pace", f"{found.pace_s * 1e3:.0f} ms a token, not {targets.pace_s * 1e3:.0f} ms"


def _fixed_s(facts: Facts, chosen: Deployment) -> list[float]:
    """First token of each kind of request without a wait: prefill on the mean card, and handoff."""
    organisation = chosen.organisation
    seconds = [0.0] * len(facts.kinds)
    used = [(kind, count) for kind, count in zip(facts.cards, chosen.prefill, strict=True) if count]
    speed = [count / _work_s(facts, kind, chosen) for kind, count in used]
    for (kind, _count), part in zip(used, speed, strict=True):
        for index, times in enumerate(times_on(facts, kind.card, organisation)):
            seconds[index] += part / sum(speed) * times.prefill_s
    rate = link_bytes_per_s(facts, organisation)
    return [one + _on_way_bytes(facts, kind, chosen) / rate for one, kind in zip(seconds, facts.kinds, strict=True)]


def _on_way_bytes(facts: Facts, kind: RequestKind, chosen: Deployment) -> float:
    """Bytes that must move before the first token: a store that only keeps what was new delays nobody."""
    if chosen.organisation is not Organisation.REPLICAS_STORE:
        return moved_bytes(facts, kind, chosen.organisation)
    costs = facts.state_costs
    return float(costs.kv_bytes_between(float(kind.cached_tokens), float(kind.found_tokens(store=True))))


def _work_s(facts: Facts, kind: CardKind, chosen: Deployment) -> float:
    """GPU-seconds of the mean request on one card that prefills: work is shared in proportion to its inverse."""
    times = mean_times(times_on(facts, kind.card, chosen.organisation), facts.shares)
    return max(times.prefill_s if chosen.organisation.splits else times.colocated_s, 1e-12)


def _wait(question: Question, chosen: Deployment) -> Wait:
    """For prefill, then for the link, then for a place in a batch."""
    facts, arrival_rps = question.facts, question.arrival_rps
    queue = _prefill_wait(question, chosen)
    link_rps = chosen.rates_rps.get("link", inf)
    if link_rps < inf:
        queue = one_after_another(queue, wait(servers=1, utilisation=arrival_rps / link_rps, service_s=1.0 / link_rps))
    slots, hold_s = _slots(facts, chosen)
    if not slots:
        return queue
    decode_rps = chosen.rates_rps.get("decode pool", chosen.rates_rps.get("cards", inf))
    return one_after_another(queue, wait(servers=slots, utilisation=arrival_rps / decode_rps, service_s=hold_s))


def _prefill_wait(question: Question, chosen: Deployment) -> Wait:
    """As if all who prefill were alike: as fast as their mean, and so many."""
    facts = question.facts
    servers = sum(chosen.prefill)
    rates = [0.0] * len(facts.kinds)  # of all cards together, for each kind of request alone
    for kind, count in zip(facts.cards, chosen.prefill, strict=True):
        if count:
            for index, times in enumerate(times_on(facts, kind.card, chosen.organisation)):
                rates[index] += count / times.prefill_s if times.prefill_s > 0 else inf
    seconds = [servers / rate for rate in rates]
    mean_s = sum(share * one for share, one in zip(facts.shares, seconds, strict=True))
    if mean_s == 0:
        return NONE
    squared = sum(share * one**2 for share, one in zip(facts.shares, seconds, strict=True))
    cv2 = max(0.0, squared / mean_s**2 - 1.0)
    return wait(servers=servers, utilisation=question.arrival_rps * mean_s / servers, service_s=mean_s, cv2=cv2)


def _slots(facts: Facts, chosen: Deployment) -> tuple[int, float]:
    """Places in decode batches, and how long a request keeps one when all are taken, seconds."""
    slots, busy = 0, 0.0
    for kind, count in zip(facts.cards, chosen.decode, strict=True):
        if not count:
            continue
        batch = batch_on(facts, kind.card)
        times = mean_times(times_on(facts, kind.card, chosen.organisation), facts.shares)
        each_s = times.decode_s if chosen.organisation.splits else times.colocated_s
        slots += count * batch
        busy += count / each_s if each_s > 0 else 0.0
    return slots, slots / busy if busy else 0.0


def _pace_s(question: Question, chosen: Deployment) -> float:
    """Seconds between tokens on the slowest card in use, at the load it gets; NaN where it cannot keep up."""
    facts = question.facts
    calls = sum(share * (kind.output_tokens - 1) for share, kind in zip(facts.shares, facts.kinds, strict=True))
    if calls == 0:
        return 0.0
    if chosen.per_s <= question.arrival_rps:
        return nan
    pool_rps = chosen.rates_rps.get("decode pool", chosen.rates_rps.get("cards", inf))
    busy = question.arrival_rps / pool_rps
    return max(
        _card_pace_s(facts, kind, chosen, busy=busy, calls=calls)
        for kind, count in zip(facts.cards, chosen.decode, strict=True)
        if count
    )


def _card_pace_s(facts: Facts, kind: CardKind, chosen: Deployment, *, busy: float, calls: float) -> float:
    """The smallest batch that makes as many calls a second as come is the one that runs."""
    times = mean_times(times_on(facts, kind.card, chosen.organisation), facts.shares)
    each_s = {
        Organisation.REPLICAS: times.colocated_s,
        Organisation.REPLICAS_STORE: times.colocated_s,
        Organisation.CHUNKED: times.piggyback_s,
    }.get(chosen.organisation, times.decode_s)
    card_rps = busy / each_s
    stops = chosen.organisation in (Organisation.REPLICAS, Organisation.REPLICAS_STORE)
    left = 1.0 - card_rps * times.prefill_s if stops else 1.0  # of the time, for decode steps
    roofline = _roofline(facts.shape, kind.card)
    context = _mean_context(facts)

    def pace_s(running: int) -> float:
        return roofline.decode_step_s([context] * running) / left

    low, high = 0, batch_on(facts, kind.card)  # `low` makes too few calls a second
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle / pace_s(middle) >= card_rps * calls else (middle, high)
    return pace_s(high)


@lru_cache(maxsize=64)
def _roofline(shape: ModelShape, card: Card) -> Roofline:
    return Roofline.of(shape, card)


def _mean_context(facts: Facts) -> float:
    """Tokens a decode call sees, over all calls."""
    calls = [share * (kind.output_tokens - 1) for share, kind in zip(facts.shares, facts.kinds, strict=True)]
    contexts = [kind.input_tokens + (kind.output_tokens - 1) / 2 for kind in facts.kinds]
    return sum(many * context for many, context in zip(calls, contexts, strict=True)) / sum(calls)


def _usd_per_hour(facts: Facts, chosen: Deployment) -> float:
    """Rent of the cards in use; NaN where one of them has no price."""
    usd = 0.0
    for kind, count in zip(facts.cards, chosen.counts, strict=True):
        if count:
            price = kind.card.usd_per_hour
            usd += count * facts.cards_each * (nan if price is None else price)
    return usd


# The answer


def ranked(question: Question) -> list[Assessment]:
    """All deployments, best first: those that hold, by cost of a thousand good requests where all prices are known,
    else by cards, then by first token; then the others, by what they carry. Upper bounds come last: nobody can count
    on them."""
    found = [assess(question, one) for one in all_deployments(question.facts)]
    return sorted(found, key=_order)


def _order(one: Assessment) -> tuple[bool, bool, float, float, float]:
    chosen = one.deployment
    is_bound = chosen.organisation is Organisation.CHUNKED
    if not one.holds:
        falls_behind = one.first_token_s != one.first_token_s
        return (is_bound, True, inf if falls_behind else len(one.misses), -chosen.per_s, one.cards)
    usd = one.usd_per_thousand_good
    price = one.cards if usd != usd else round(usd, 9)
    return (is_bound, False, price, round(one.first_token_s, 9), chosen.moved_bytes)


MOST_COPIES = 1024  # of a deployment; a request hardly ever meets another there


@dataclass(frozen=True, slots=True)
class Copies:
    """How often a deployment must stand beside itself. steady : to carry the arrivals; in_time : to meet the targets
    of rate and start; cards : of the latter"""

    steady: int
    in_time: int
    cards: int


def copies(question: Question, one: Assessment) -> Copies:
    """Whole copies of a deployment's cards, each with a link of its own."""
    per_s_each = one.deployment.per_s
    steady = _least_above(question.arrival_rps, per_s_each)
    in_time = max(steady, ceil(question.needed_rps / per_s_each - 1e-9))
    return Copies(steady, in_time, in_time * one.cards)


def copies_that_hold(question: Question, one: Assessment) -> int | None:
    """Whole copies of a deployment's cards, with an equal part of the load each, that meet all targets.

    None where `MOST_COPIES` do not: what is missed then is not for want of cards. More copies never miss more.
    """
    few, enough = 0, MOST_COPIES
    if misses_of_copies(question, one, enough):
        return None
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (middle, enough) if misses_of_copies(question, one, middle) else (few, middle)
    return enough


def misses_of_copies(question: Question, one: Assessment, many: int) -> dict[str, str]:
    """What `many` (>= 1) copies of a deployment miss, each with an equal part of the load."""
    return assess(replace(question, arrival_rps=question.arrival_rps / many), one.deployment).misses


def _least_above(arrival_rps: float, per_s_each: float) -> int:
    """A rate that is only just reached is not kept up with."""
    return int(arrival_rps / per_s_each + 1e-9) + 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to where a deployment still carries the load and clears the start, everything else as it is.

    arrival_rps, ready_s : at most; speed : share of all cards' assumed speed, at least; link_bytes_per_s : at least
    """

    arrival_rps: float
    speed: float
    link_bytes_per_s: float
    ready_s: float


def limits(question: Question, one: Deployment) -> Limits:
    """Where the answer changes for `one`."""
    by_s = question.targets.drained_by_s
    compute_rps = min((rate for name, rate in one.rates_rps.items() if name != "link"), default=inf)
    spare = question.targets.most_busy if by_s == inf else (by_s - question.ready_s) / by_s
    longest_s = (
        inf if by_s == inf else start_to_drain_s(arrival_rps=question.arrival_rps, service_rps=one.per_s, by_s=by_s)
    )
    return Limits(
        arrival_rps=one.per_s * min(spare, question.targets.most_busy),
        speed=question.needed_rps / compute_rps,
        link_bytes_per_s=question.needed_rps * one.moved_bytes,
        ready_s=longest_s,
    )
