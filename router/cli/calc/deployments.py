"""`tfirst calc deployments` and `cost`: one load on one set of cards, served in every way they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import msgspec

from estimators.cost import fleet_per_thousand_usd
from estimators.planning.backlog import StartUp
from estimators.planning.deployments import CardKind, Deployment, Facts, Organisation, RequestKind, deployment
from estimators.planning.plan import Assessment, Question, Targets, assess, copies, limits
from estimators.planning.pools import Work, resident_bytes
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Input, Scalar, Table, Value
from router.cli.calc.inputs import MOST_SEQUENCES, CardsOfAKind, cards, count, model, number, numbers

GB, GIB = 1e9, 2.0**30


def _prefill(text: str) -> tuple[int, ...] | None:
    """None: the best split."""
    if text == "best":
        return None
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ValueError("best, or a whole number for each kind of card with commas between")
    return tuple(int(part) for part in parts)


INPUTS = (
    model(),
    model("qwen3-8b", "state-model", "whose state is handed over"),
    cards("cards", "4xA100,4xH20", "cards"),
    number("arrival-rps", 3.5, "requests/s", "that come", above=True),
    count("input-tokens", 8192, "tokens", "prompt", low=1),
    count("cached-tokens", 0, "tokens", "of it that the replica which computes it has"),
    count("output-tokens", 1025, "tokens", "answer", low=1),
    count("reuses", 0, "times", "the prompt comes again, at a replica that only a store can help"),
    count("batch", 32, "sequences", "in a decode step at most", low=1, high=MOST_SEQUENCES),
    number("link-gb-s", 25, "GB/s", "that all states share", above=True),
    number("pool-gib", 64, "GiB", "of the shared store", above=True),
    number("ready-s", 10, "s", "from the start until it serves"),
    number("by-s", 60, "s", "after the start, when the backlog is to be gone", above=True),
    number("price-per-hour", 8, "", "of all cards together, in any money"),
    Input("prefill", "best", "", "replicas of each kind of card that prefill: best, or for example 4,0", _prefill),
)


def question_of(
    *,
    model: ModelShape,
    state_model: ModelShape,
    cards: Sequence[CardsOfAKind],
    arrival_rps: float,
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    reuses: int,
    batch: int,
    link_gb_s: float,
    ready_s: float,
    by_s: float,
    price_per_hour: float,
) -> Question:
    """The load as kinds of requests; each reuse is one request more, so `arrival_rps` counts the first ones."""
    each = price_per_hour / sum(one.count for one in cards)
    kind = RequestKind(input_tokens=input_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)
    kinds = [kind]
    if reuses:
        kinds.append(replace(kind, stored_tokens=input_tokens - cached_tokens, share=float(reuses)))
    facts = Facts(
        shape=model,
        kinds=tuple(kinds),
        cards=tuple(
            CardKind(one.kind.name, msgspec.structs.replace(one.kind.card, usd_per_hour=each), one.count)
            for one in cards
        ),
        batch=batch,
        network_bytes_per_s=link_gb_s * GB,
        store=True,
        state_shape=None if state_model == model else state_model,
    )
    targets = Targets(drained_by_s=by_s)
    return Question(facts=facts, arrival_rps=arrival_rps * (1 + reuses), ready_s=ready_s, targets=targets)


def answer(
    *,
    model: ModelShape,
    state_model: ModelShape,
    cards: Sequence[CardsOfAKind],
    arrival_rps: float,
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    reuses: int,
    batch: int,
    link_gb_s: float,
    pool_gib: float,
    ready_s: float,
    by_s: float,
    price_per_hour: float,
    prefill: tuple[int, ...] | None,
) -> Answer:
    asked = question_of(
        model=model,
        state_model=state_model,
        cards=cards,
        arrival_rps=arrival_rps,
        input_tokens=input_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        reuses=reuses,
        batch=batch,
        link_gb_s=link_gb_s,
        ready_s=ready_s,
        by_s=by_s,
        price_per_hour=price_per_hour,
    )
    found = [assess(asked, one) for one in _ways(asked.facts, prefill)]
    chosen = next((one for one in found if one.deployment.organisation is Organisation.SPLIT), found[0])
    bounds, many = limits(asked, chosen.deployment), copies(asked, chosen)
    facts, kind = asked.facts, asked.facts.kinds[0]
    state = float(facts.state_costs.kv_bytes(float(input_tokens)))
    work = Work(new_tokens=input_tokens, output_tokens=kind.output_tokens, batch=batch)
    values = [
        *(Value(f"{_key(one)}_per_s", one.deployment.per_s / (1 + reuses), _unit(reuses)) for one in found),
        *(Value(f"{_key(one)}_drained_at_s", _or_never(one.drained_at_s), "s") for one in found),
        *(Value(f"{_key(one)}_backlog_then", _backlog(asked, one, by_s), f"requests at {by_s:g} s") for one in found),
        *(
            Value(f"{_key(one)}_link_per_s", rate / (1 + reuses), _unit(reuses))
            for one in found
            if (rate := one.deployment.rates_rps.get("link", inf)) < inf
        ),
        Value("needed_per_s", asked.needed_rps / (1 + reuses), _unit(reuses)),
        Value("split_prefill", list(chosen.deployment.prefill), "replicas of each kind of card"),
        Value("most_arrivals_per_s", bounds.arrival_rps / (1 + reuses), _unit(reuses)),
        Value("least_speed", bounds.speed, "of what the cards are taken to reach"),
        Value("least_link_gb_s", bounds.link_bytes_per_s / GB, "GB/s"),
        Value("longest_start_s", bounds.ready_s, "s"),
        Value("copies_steady", many.steady, "times these cards, to keep up"),
        Value("copies_in_time", many.in_time, "times these cards, to clear the start in time"),
        Value("resident_gib", resident_bytes(facts.shape, work) / GIB, "GiB: weights, a full batch, one arriving"),
        Value("batch_states_gib", _batch_states(facts, kind) / GIB, "GiB: states of a full batch, one arriving"),
        Value("state_gib", state / GIB, "GiB handed over"),
        Value("pool_states", int(pool_gib * GIB // state), "states in the store"),
    ]
    return Answer(values, [_table(asked, found, reuses)])


def _batch_states(facts: Facts, kind: RequestKind) -> float:
    """Bytes of a full batch at its longest and of one arriving, in the state that is handed over."""
    costs = facts.state_costs
    longest = float(costs.kv_bytes(float(kind.input_tokens + kind.output_tokens - 1)))
    return facts.batch * longest + float(costs.kv_bytes(float(kind.input_tokens)))


def _ways(facts: Facts, prefill: tuple[int, ...] | None) -> list[Deployment]:
    """All cards in each organisation; a store beside replicas only where something can be found in it."""
    if prefill is not None and len(prefill) != len(facts.cards):
        raise ValueError(f"--prefill names {len(prefill)} kinds of cards and --cards {len(facts.cards)}")
    if prefill is not None and not 0 < sum(prefill) < sum(one.count for one in facts.cards):
        raise ValueError(f"--prefill takes {sum(prefill)} of the cards; at least one has to prefill and one to decode")
    found = [
        deployment(facts, organisation, prefill=prefill if organisation.splits else None)
        for organisation in Organisation
    ]
    has_stored = any(kind.stored_tokens for kind in facts.kinds)
    return [
        one for one in found if one is not None and (has_stored or one.organisation is not Organisation.REPLICAS_STORE)
    ]


def _key(one: Assessment) -> str:
    return one.deployment.organisation.name.lower()


def _unit(reuses: int) -> str:
    return f"groups of {1 + reuses} requests/s" if reuses else "requests/s"


def _or_never(seconds: float) -> float | str:
    return seconds if seconds < inf else "never"


def _backlog(asked: Question, one: Assessment, at_s: float) -> float:
    return StartUp(asked.arrival_rps, one.deployment.per_s, asked.ready_s).backlog(at_s)


def _table(asked: Question, found: Sequence[Assessment], reuses: int) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for one in found:
        rates, moved = one.deployment.rates_rps, one.deployment.moved_bytes * (1 + reuses)
        compute_rps = min(rate for name, rate in rates.items() if name != "link")
        link_rps = rates.get("link", inf)
        finished = min(asked.arrival_rps, one.deployment.per_s)
        rows.append(
            (
                one.deployment.organisation.value,
                moved / GIB,
                compute_rps / (1 + reuses),
                link_rps / (1 + reuses) if link_rps < inf else "-",
                one.deployment.limited_by,
                one.idle_first_token_s,
                _or_never(one.drained_at_s),
                fleet_per_thousand_usd(usd_per_hour=one.usd_per_hour, finished_rps=finished)
                if one.usd_per_hour > 0
                else "-",
            )
        )
    what = _unit(reuses)
    columns = (
        "all cards as",
        "moved, GiB",
        f"cards, {what}",
        f"link, {what}",
        "limited by",
        "idle first token, s",
        "start cleared, s",
        "price of 1000",
    )
    return Table("Ways to serve", columns, rows)


COST_INPUTS = (
    number("price-per-hour", 8, "", "of all cards, in any money", above=True),
    numbers("finished-rps", "3.5,3.02,4.55", "requests/s", "that are finished, not that could be", above=True),
    number("good-share", 1.0, "", "of them that count", high=1, above=True),
)


def answer_cost(*, price_per_hour: float, finished_rps: Sequence[float], good_share: float) -> Answer:
    prices = [
        fleet_per_thousand_usd(usd_per_hour=price_per_hour, finished_rps=rate, good_share=good_share)
        for rate in finished_rps
    ]
    rows = [(rate, rate * good_share, price) for rate, price in zip(finished_rps, prices, strict=True)]
    table = Table("What a thousand good answers cost", ("finished, requests/s", "good, requests/s", "price"), rows)
    return Answer([Value("per_thousand_good", prices, "of the money per hour")], [table])


DEPLOYMENTS = (
    Calculator("deployments", "one load on one set of cards, served in every way they allow", INPUTS, answer),
    Calculator("cost", "what a thousand good answers cost", COST_INPUTS, answer_cost),
)
