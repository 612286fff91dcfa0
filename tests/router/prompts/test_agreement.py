from __future__ import annotations

from typing import Any

import pytest

from router.prompts.agreement import BELIEVED_S, MOST_MODELS, OF_LAST, WRONG_COUNTS, WRONG_HITS, Agreement, State
from router.tokenizing.asked import Form


def answered(agreement: Agreement, **said: Any) -> State:
    facts = {"ours": 100, "reported": None, "promised_tokens": 0.0, "cached": None, "now_s": 0.0} | said
    agreement.observed("m", Form.CHAT, **facts)
    return agreement.state("m", Form.CHAT, facts["now_s"])


def test_nothing_is_known_before_there_is_evidence() -> None:
    agreement = Agreement()
    assert agreement.state("m", Form.CHAT, 0.0) is State.UNKNOWN
    assert answered(agreement) is State.UNKNOWN


@pytest.mark.parametrize(("others", "state"), [([True], State.AGREES), ([True, False], State.DISAGREES)])
def test_one_replica_that_makes_other_tokens_is_enough(others: list[bool], state: State) -> None:
    agreement = Agreement()
    for number, agrees in enumerate(others):
        agreement.checked("m", Form.CHAT, f"r{number}", agrees)
    assert agreement.state("m", Form.CHAT, 0.0) is state
    assert agreement.state("m", Form.TOOLS, 0.0) is State.UNKNOWN
    assert agreement.state("other", Form.CHAT, 0.0) is State.UNKNOWN
    agreement.checked("m", Form.CHAT, "r1", True)  # it came up again, with the right tokenizer
    assert agreement.state("m", Form.CHAT, 0.0) is State.AGREES


def test_answers_with_other_lengths_contradict_and_equal_ones_heal() -> None:
    agreement = Agreement()
    assert answered(agreement, reported=100) is State.AGREES
    states = [answered(agreement, reported=101) for _ in range(WRONG_COUNTS)]
    assert states == [State.AGREES] * (WRONG_COUNTS - 1) + [State.DISAGREES]
    states = [answered(agreement, reported=100) for _ in range(OF_LAST)]
    assert states[0] is State.DISAGREES
    assert states[-1] is State.AGREES


def test_hits_that_do_not_come_contradict_for_a_while() -> None:
    agreement = Agreement()
    lost = [answered(agreement, reported=100, promised_tokens=96.0, cached=0, now_s=5.0) for _ in range(WRONG_HITS)]
    assert lost == [State.AGREES] * (WRONG_HITS - 1) + [State.DISAGREES]
    assert agreement.state("m", Form.CHAT, 5.0 + BELIEVED_S - 0.1) is State.DISAGREES
    assert agreement.state("m", Form.CHAT, 5.0 + BELIEVED_S) is State.AGREES
    assert answered(agreement, reported=100, promised_tokens=96.0, cached=0, now_s=90.0) is State.AGREES


@pytest.mark.parametrize(
    "said",
    [
        {"promised_tokens": 96.0, "cached": None},  # the engine does not say
        {"promised_tokens": 16.0, "cached": 0},  # hardly anything was promised
        {"promised_tokens": 96.0, "cached": 48},  # some of it came
    ],
)
def test_silence_small_promises_and_partial_hits_contradict_nothing(said: dict[str, Any]) -> None:
    agreement = Agreement()
    assert {answered(agreement, **said) for _ in range(20)} == {State.UNKNOWN}


def test_names_that_clients_make_up_do_not_pile_up() -> None:
    agreement = Agreement()
    for number in range(5000):
        agreement.observed(f"m{number}", Form.TEXT, ours=1, reported=1, promised_tokens=0.0, cached=None, now_s=0.0)
    assert len(agreement.states(0.0)) <= MOST_MODELS * len(Form) + 1
