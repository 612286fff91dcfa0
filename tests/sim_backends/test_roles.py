from __future__ import annotations

from math import inf

import pytest

from sim_backends.alarms import Alarms
from sim_backends.directives import Directive, Path
from sim_backends.roles import KeptState


def kept_state(hold_s: float = 5.0) -> tuple[KeptState, Alarms, list[tuple[list[int], float]]]:
    alarms, gone = Alarms(), list[tuple[list[int], float]]()
    return KeptState(alarms, lambda blocks, now_s: gone.append((blocks, now_s)), hold_s=hold_s), alarms, gone


def test_kept_blocks_are_let_go_once_when_they_have_been_read() -> None:
    kept, alarms, gone = kept_state()
    kept.keep("p", [4, 5], 20, 1.0)
    assert kept.tokens("p") == 20
    kept.reading("p")
    assert alarms.due_s == inf
    kept.release("p", 9.0)
    kept.release("p", 9.5)
    assert (gone, kept.tokens("p"), len(kept)) == ([([4, 5], 9.0)], 0, 0)


def test_state_nobody_comes_for_is_let_go_after_its_time() -> None:
    kept, alarms, gone = kept_state(hold_s=5.0)
    kept.keep("p", [4], 20, 1.0)
    assert alarms.due_s == 6.0
    alarms.run_due()
    assert (gone, kept.expired) == ([([4], 6.0)], 1)


def test_state_kept_under_an_id_once_more_replaces_what_was_there() -> None:
    kept, alarms, gone = kept_state(hold_s=5.0)
    kept.keep("p", [4], 20, 1.0)
    kept.keep("p", [5, 6], 30, 2.0)
    assert (gone, kept.tokens("p"), alarms.due_s) == ([([4], 2.0)], 30, 7.0)


def test_dropping_lets_go_of_everything_and_leaves_no_alarm() -> None:
    kept, alarms, gone = kept_state()
    kept.keep("p", [4], 20, 1.0)
    kept.keep("q", [7], 20, 2.0)
    kept.drop(3.0)
    assert (gone, alarms.due_s, kept.expired) == ([([4], 3.0), ([7], 3.0)], inf, 0)


def test_a_directive_without_its_source_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a source"):
        Directive(Path.PEER)
    with pytest.raises(ValueError, match="needs a request_id"):
        Directive(Path.HAND_OFF, source="p0")
