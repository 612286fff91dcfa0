from __future__ import annotations

import pytest

from sim_backends.block_hash import BlockHasher
from sim_backends.intake import Intake
from sim_backends.requests import EngineRequest, EngineSettings, RequestRefused
from tests.sim_backends.builders import a_block_request, a_request

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
    an_intake().accept(request, 0.0).content.fill(2)
    assert request.prompt == [1, 2, 3]


def test_block_ids_beyond_the_full_blocks_of_the_prompt_are_cut() -> None:
    live = an_intake().accept(a_block_request([7, 8, 9], 47), 0.0)
    assert (len(live.digests), live.prompt_tokens, live.content.told(0, 2)) == (2, 47, [7, 8])


@pytest.mark.parametrize("ids", [[-1, 2], [1, 2**31], [1]])
def test_block_ids_that_cannot_be_a_prompts_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestRefused):
        an_intake().accept(a_block_request(ids, 40), 0.0)


def test_a_prompt_of_block_ids_has_to_fit_like_any_other() -> None:
    with pytest.raises(RequestRefused, match="maximum context length is 160 tokens"):
        an_intake(kv_blocks=10).accept(a_block_request(list(range(10)), 160), 0.0)
    with pytest.raises(RequestRefused, match="at least one token"):
        an_intake().accept(a_block_request([], 0), 0.0)


def test_a_request_is_made_of_tokens_or_of_block_ids() -> None:
    with pytest.raises(ValueError, match="either"):
        EngineRequest("x", [1, 2], block_ids=[1], prompt_tokens=16)
    with pytest.raises(ValueError, match="either"):
        EngineRequest("x")
