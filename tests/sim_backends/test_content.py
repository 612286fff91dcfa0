from __future__ import annotations

from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import Stored
from sim_backends.content import FIRST_FRESH_ID, IdContent, TokenContent, fresh_ids
from tests.sim_backends.builders import a_block_request, a_world, an_engine, run_out


def of_ids(*ids: int, salt: str | None = None) -> IdContent:
    return IdContent(ids, salt=salt, fresh_ids=fresh_ids(), vocab=1000, base=0)


def test_two_prompts_share_blocks_exactly_as_far_as_their_ids_are_equal() -> None:
    one, other = of_ids(1, 2, 3, 4).digests, of_ids(1, 2, 9, 4).digests
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False]


def test_a_salt_changes_every_block() -> None:
    assert not set(of_ids(1, 2).digests) & set(of_ids(1, 2, salt="tenant").digests)


def test_output_fills_blocks_of_ids_that_no_prompt_has() -> None:
    content = of_ids(1, 2)
    content.fill(4)
    assert content.told(0, 4) == [1, 2, FIRST_FRESH_ID, FIRST_FRESH_ID + 1]
    assert len(content.digests) == 4
    content.fill(3)
    assert len(content.digests) == 4


def test_a_list_of_ids_is_copied() -> None:
    ids = [1, 2]
    content = IdContent(ids, salt=None, fresh_ids=fresh_ids(), vocab=10, base=0)
    content.fill(3)
    assert ids == [1, 2]


def test_output_of_a_token_prompt_is_hashed_as_a_prompt_of_the_same_tokens() -> None:
    hasher = BlockHasher(block_tokens=16, vocab=1000)
    content = TokenContent(hasher, list(range(20)), salt="s", block_tokens=16, vocab=1000, base=5)
    content.fill(3)
    tokens = [*range(20), *(content.output_token(index) for index in range(28))]
    assert content.digests == hasher.chain(tokens, salt="s")
    assert content.told(0, 3) == tokens


def test_a_repeated_prompt_of_block_ids_is_found_in_the_cache() -> None:
    engine = an_engine(block_tokens=64)
    engine.submit(a_block_request([5, 6, 7], 200), 0.0)
    run_out(engine)
    engine.submit(a_block_request([5, 6, 8], 200), 10.0)
    assert run_out(engine)[0].cached_tokens == 128


def test_events_of_block_ids_carry_one_id_for_each_block() -> None:
    engine = an_engine(block_tokens=64, record_events=True)
    engine.submit(a_block_request([5, 6, 7], 200, output=60), 0.0)
    run_out(engine)
    events = [event for batch in engine.take_event_batches() for event in batch.events]
    stored = [event for event in events if isinstance(event, Stored)]
    assert [list(event.tokens) for event in stored] == [[5, 6, 7], [FIRST_FRESH_ID]]
    assert stored[1].parent == stored[0].digests[-1]


def test_engines_of_one_world_never_generate_the_same_block() -> None:
    world = a_world("A100", "A100", block_tokens=64, record_events=True)
    for row in (0, 1):
        world.submit(row, a_block_request([5], 64, output=80, max_tokens=80), 0.0)
    run_out(world)
    chains = [
        [
            digest
            for batch in engine.take_event_batches()
            for e in batch.events
            if isinstance(e, Stored)
            for digest in e.digests
        ]
        for engine in world.engines
    ]
    assert [len(chain) for chain in chains] == [2, 2]
    assert (chains[0][0] == chains[1][0], chains[0][1] == chains[1][1]) == (True, False)
