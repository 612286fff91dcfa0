"""What a replica does about a fetch, learned from its first tokens, and written to the fleet view once it is sure."""

from __future__ import annotations

import random
from math import inf

import pytest

from estimators.first_token import Discipline, Rest, Service, service
from estimators.paths import COLUMN, Path
from estimators.shapes import QWEN3_8B
from router.bookings import Booking
from router.fetch_habits import SURE_AFTER_FETCHES, FetchHabits
from tests.builders import a_request, held
from tests.router.learning_bench import LearningBench

NETWORK_BYTES_PER_S = 2e9
LIMIT_S = 0.2
NOISE = 0.02  # standard deviation of the logarithm of each first token
FETCHED = held([0], 512)


class Bench(LearningBench):
    """The first replica does `truth`. It is asked in pairs: a prompt to compute, and soon after one to fetch."""

    def __init__(
        self, truth: Discipline, *cards: str, believed: Discipline = Discipline.OVERLAPPED, learns: bool = True
    ) -> None:
        super().__init__(
            *cards,
            doubts=False,
            network_bytes_per_s=NETWORK_BYTES_PER_S,
            discipline=believed,
            learn_disciplines=learns,
        )
        self.truth = truth
        self.overlapped = LearningBench(doubts=False)  # C of any prompt, without what a fetch may hold the GPU for
        self.now_s = 0.0
        self.rng = random.Random(11)
        self.reported_tokens: int | None = None  # reuse, as the engine says

    @property
    def believed(self) -> Discipline:
        return self.view.disciplines[0]

    @property
    def habits(self) -> FetchHabits:
        assert self.learning._fetches is not None
        return self.learning._fetches

    def served(self, queue_s: float, stored_blocks: int) -> Service:
        """What the engine makes of a fetched prompt, from the closed forms and not from what the router believes."""
        fetched = stored_blocks * 16
        estimates = self.overlapped.estimate(a_request(), 0.0, held([0], stored_blocks))
        all_s, none_s = (float(estimates.compute_s[COLUMN[path], 0]) for path in (Path.REMOTE, Path.RECOMPUTE))
        bend_s = 0.5 * fetched**2 * float(self.view.attention_s_per_pair[0])
        return service(
            self.truth,
            queue_s=queue_s,
            fetch_s=fetch_s(stored_blocks),
            first_byte_s=0.010,
            rest=Rest(all_s, none_s, bend_s),
            layers=self.estimator.layers,
            limit_s=LIMIT_S,
        )

    def pair(self, now_s: float, *, queue_s: float | None = None, answers: bool = True) -> Booking:
        """A prompt to compute, and one to fetch when `queue_s` of it is left (0: it is over; None: by chance).

        answers : the fetched one gets its first token, else it ends without
        """
        ahead = self.place(now_s, prompt_tokens=self.rng.randint(1000, 9000))
        left_s = self.rng.uniform(0.1, 0.95) * ahead.compute_s if queue_s is None else queue_s
        stored = self.rng.randint(150, 520)
        turn_s = now_s + ahead.compute_s
        arrives_s = turn_s - left_s
        if left_s == 0.0:
            self.first_token(ahead, arrives_s)
        fetches = self.place(arrives_s, path=Path.REMOTE, where=held([0] * self.view.rows, stored))
        if left_s > 0.0:  # an engine that blocks does so in the step that would have ended the prompt before
            held_s = fetch_s(stored) if self.truth is Discipline.BLOCKING else 0.0
            self.first_token(ahead, turn_s + held_s)
        took_s = float(self.served(left_s, stored).first_token_s) * self.rng.lognormvariate(0.0, NOISE)
        if answers:
            self.first_token(fetches, arrives_s + took_s)
        if self.learning._fetches is not None:
            self.habits.answered(fetches, self.reported_tokens)
        for booking in (ahead, fetches):
            self.end(booking, arrives_s + took_s + 1.0)
        return fetches

    def pairs(self, count: int, *, queue_s: float | None = None, answers: bool = True) -> None:
        for _ in range(count):
            self.pair(self.now_s, queue_s=queue_s, answers=answers)
            self.now_s += 100.0


def fetch_s(stored_blocks: int) -> float:
    """Look-up, network, then PCIe, with nothing else on them."""
    size = stored_blocks * 16 * QWEN3_8B.kv_bytes_per_token
    return 0.010 + size / NETWORK_BYTES_PER_S + size / 25e9


@pytest.mark.parametrize("truth", list(Discipline))
def test_the_discipline_of_a_replica_is_learned_from_fetches_behind_a_queue(truth: Discipline) -> None:
    bench = Bench(truth)
    bench.pairs(60)
    verdict = bench.habits.learners[0].verdict()
    assert truth in verdict.alike
    assert bench.believed in verdict.alike
    assert len(verdict.alike) < len(Discipline)


@pytest.mark.parametrize("truth", [Discipline.SERIAL, Discipline.LAYERWISE, Discipline.TWO_ENDS])
def test_a_discipline_unlike_all_others_is_named_whatever_was_believed(truth: Discipline) -> None:
    for believed in (Discipline.OVERLAPPED, Discipline.LAYERWISE_IN_TURN):
        bench = Bench(truth, believed=believed)
        bench.pairs(60)
        assert bench.believed is truth


def test_the_estimate_of_the_next_request_follows_what_was_learned() -> None:
    """Behind a long prompt, what overlaps is ready at its turn, and what is serial begins to fetch then."""
    bench = Bench(Discipline.SERIAL)

    def behind_a_long_prompt(now_s: float) -> tuple[float, float]:
        """T_first of a fetch there, and the sum of its parts."""
        ahead = bench.place(now_s, prompt_tokens=30_000)
        estimates = bench.estimate(a_request(), now_s, FETCHED)
        bench.end(ahead, now_s)
        at = COLUMN[Path.REMOTE], 0
        parts_s = estimates.queue_s[0] + estimates.fetch_s[at] + estimates.compute_s[at]
        return float(estimates.first_token_s[at]), float(parts_s)

    first_s, parts_s = behind_a_long_prompt(0.0)
    assert first_s < parts_s - 0.5
    bench.now_s = 1000.0
    bench.pairs(60)
    first_s, parts_s = behind_a_long_prompt(1e6)
    assert first_s == pytest.approx(parts_s)


def test_patience_is_learned_with_the_discipline_that_has_it() -> None:
    bench = Bench(Discipline.TIME_LIMITED)
    bench.pairs(80)
    assert bench.believed is Discipline.TIME_LIMITED
    assert bench.view.limit_s[0] == LIMIT_S  # one of those tried


def test_nothing_is_believed_before_enough_fetches_were_seen() -> None:
    bench = Bench(Discipline.SERIAL)
    bench.pairs(int(SURE_AFTER_FETCHES) - 1)
    assert bench.habits.learners[0].verdict().discipline is Discipline.SERIAL
    assert bench.believed is Discipline.OVERLAPPED


@pytest.mark.parametrize("believed", [Discipline.OVERLAPPED, Discipline.SERIAL, Discipline.BLOCKING])
def test_what_cannot_be_told_apart_stays_as_it_was_believed(believed: Discipline) -> None:
    """On an idle replica a fetch on arrival and one in turn are the same."""
    bench = Bench(Discipline.SERIAL, believed=believed)
    bench.pairs(60, queue_s=0.0)
    assert {Discipline.OVERLAPPED, Discipline.SERIAL, Discipline.BLOCKING} <= bench.habits.learners[0].verdict().alike
    assert bench.believed is believed


def test_requests_without_a_fetch_and_those_that_ended_before_their_first_token_teach_nothing() -> None:
    bench = Bench(Discipline.SERIAL)
    bench.pairs(60, answers=False)
    for index in range(60):
        booking = bench.place(1e5 + 100.0 * index)
        bench.first_token(booking, 1e5 + 100.0 * index + 3.0)
        bench.habits.answered(booking, None)
        bench.end(booking, 1e5 + 100.0 * index + 4.0)
    assert bench.habits.learners[0].verdict().fetches == 0
    assert bench.believed is Discipline.OVERLAPPED


@pytest.mark.parametrize("facts", [{"streams": False}, {"generates": False}])
def test_answers_that_show_no_first_token_teach_no_discipline(facts: dict[str, bool]) -> None:
    bench = Bench(Discipline.SERIAL)
    for index in range(60):
        now_s = 100.0 * index
        booking = bench.place(now_s, path=Path.REMOTE, where=FETCHED, **facts)
        bench.first_token(booking, now_s + 5.0)
        bench.habits.answered(booking, None)
        bench.end(booking, now_s + 6.0)
    assert bench.habits.learners[0].verdict().fetches == 0


@pytest.mark.parametrize("answers", [True, False])
def test_whatever_ended_is_kept_no_longer(answers: bool) -> None:
    bench = Bench(Discipline.SERIAL)
    bench.pairs(20, answers=answers)
    assert not bench.habits._standing
    assert all(standing.first_token_s < inf for standing in bench.habits._turns[0]._standing)


def test_each_replica_has_a_discipline_of_its_own() -> None:
    """Fetches on the first teach nothing of the second."""
    bench = Bench(Discipline.SERIAL, "A100", "A100")
    bench.pairs(60)
    assert bench.view.disciplines == [Discipline.SERIAL, Discipline.OVERLAPPED]
    assert bench.view.discipline is None


def test_a_configured_discipline_stays_whatever_is_seen() -> None:
    bench = Bench(Discipline.SERIAL, learns=False)
    bench.pairs(60)
    assert bench.believed is Discipline.OVERLAPPED


def test_a_fetch_that_never_happened_says_nothing_of_how_fetches_are_done() -> None:
    bench = Bench(Discipline.SERIAL)
    bench.reported_tokens = 0
    bench.pairs(60)
    assert bench.habits.learners[0].verdict().fetches == 0.0
    assert bench.believed is Discipline.OVERLAPPED


def test_what_was_learned_of_fetches_survives_a_restart() -> None:
    bench, later = Bench(Discipline.SERIAL), Bench(Discipline.SERIAL)
    bench.pairs(60)
    later.habits.restore(0, bench.habits.state(0))
    assert later.believed is bench.believed is not Discipline.OVERLAPPED
    with pytest.raises(ValueError, match="limit_s"):
        later.habits.restore(0, {"discipline": "serial", "limit_s": "long"})
