from __future__ import annotations

from router.reported import Progress
from router.signals.load import Load


def busy(generated: float | None, prompt: float | None = 10.0) -> Load:
    return Load(running=2.0, generated_tokens=generated, prompt_tokens=prompt)


def test_counters_that_move_between_two_probes_are_progress_and_others_are_none() -> None:
    progress = Progress()
    said = []
    for load in (busy(1.0), busy(2.0), busy(2.0), busy(2.0, prompt=50.0)):
        progress.told(load)
        said.append(progress.since_last())
    assert said == [(None, 2.0), (True, 2.0), (False, 2.0), (True, 2.0)]


def test_a_process_that_starts_anew_moves() -> None:
    progress = Progress()
    progress.told(busy(100.0))
    progress.since_last()
    progress.told(busy(0.0))
    assert progress.since_last() == (True, 2.0)


def test_a_page_that_no_longer_comes_or_names_no_counter_says_nothing() -> None:
    progress = Progress()
    progress.told(busy(1.0))
    progress.since_last()
    assert progress.since_last() == (None, None), "a report counts for one probe"
    progress.told(busy(None))
    assert progress.since_last() == (None, None)


def test_an_engine_without_a_count_of_prompts_is_judged_by_what_it_generates() -> None:
    progress = Progress()
    for generated, moved in ((1.0, None), (1.0, False), (2.0, True)):
        progress.told(busy(generated, prompt=None))
        assert progress.since_last()[0] is moved
