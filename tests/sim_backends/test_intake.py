from __future__ import annotations

from sim_backends.block_hash import BlockHasher
from sim_backends.intake import Intake
from sim_backends.requests import EngineSettings
from tests.sim_backends.builders import a_request

HASHER = BlockHasher(block_tokens=16, vocab=1000)


def an_intake(**settings: int) -> Intake:
    return Intake(EngineSettings(**{"vocab": 1000, "kv_blocks": 10, **settings}, name="e"), HASHER)


def test_the_context_is_no_longer_than_the_memory() -> None:
    assert an_intake(kv_blocks=10, max_model_len=500).max_model_len == 160
    assert an_intake(kv_blocks=10, max_model_len=50).max_model_len == 50


def test_an_answer_ends_by_itself_or_at_its_limit() -> None:
    intake = an_intake()
    by_itself = intake.accept(a_request([1], output=5, max_tokens=9), 0.0)
    cut = intake.accept(a_request([1], output=50, max_tokens=9), 0.0)
    forced = intake.accept(a_request([1], output=5, max_tokens=9, ignore_eos=True), 0.0)
    assert [(live.planned, live.finish_reason) for live in (by_itself, cut, forced)] == [
        (5, "stop"),
        (9, "length"),
        (9, "length"),
    ]


def test_the_clients_list_of_tokens_is_not_touched() -> None:
    request = a_request([1, 2, 3])
    an_intake().accept(request, 0.0).tokens.append(9)
    assert request.prompt == [1, 2, 3]
