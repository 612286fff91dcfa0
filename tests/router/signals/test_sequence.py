from __future__ import annotations

from router.signals.sequence import Sequence, State, Verdict


def at(seq: int, *, live: bool = True) -> Sequence:
    """A source that has applied everything up to `seq`."""
    sequence = Sequence()
    sequence.connected = True
    if live:
        assert sequence.feed(0) is Verdict.APPLY
        sequence.live_last = seq
    sequence.applied(seq, ts_s=100.0, now_s=5.0)
    return sequence


def test_batches_in_order_are_applied() -> None:
    sequence = Sequence()
    for seq in range(3):
        assert sequence.feed(seq, 1.0) is Verdict.APPLY
        sequence.applied(seq, 1.0, now_s=float(seq))
    assert (sequence.last, sequence.expected, sequence.last_event_s) == (2, 3, 2.0)


def test_a_first_batch_that_is_not_the_first_is_a_gap_from_the_start() -> None:
    sequence = Sequence()
    assert sequence.feed(900) is Verdict.GAP
    assert sequence.expected == 0


def test_a_store_may_number_from_one() -> None:
    assert Sequence(first=1).feed(1) is Verdict.APPLY


def test_a_jump_ahead_is_a_gap_from_the_next_number() -> None:
    sequence = at(2)
    assert sequence.feed(5) is Verdict.GAP
    assert sequence.expected == 3
    sequence.gap(5)
    assert (sequence.gaps, sequence.gap_batches) == (1, 2)


def test_going_back_on_the_live_stream_is_a_restart_even_to_the_same_number() -> None:
    assert at(9).feed(0) is Verdict.RESTART
    assert at(9).feed(9) is Verdict.RESTART
    assert at(0).feed(0) is Verdict.RESTART


def test_what_a_replay_already_gave_is_stale() -> None:
    sequence = at(9, live=False)
    assert sequence.feed(8, ts_s=90.0) is Verdict.STALE
    assert sequence.feed(9, ts_s=100.0) is Verdict.STALE
    assert sequence.feed(10, ts_s=101.0) is Verdict.APPLY
    assert sequence.stale == 2


def test_a_new_process_after_a_replay_is_told_by_its_time() -> None:
    assert at(9, live=False).feed(0, ts_s=101.0) is Verdict.RESTART


def test_the_states_an_operator_sees_follow_the_life_of_a_source() -> None:
    sequence = Sequence()
    states = [sequence.state]
    sequence.connected = True
    states.append(sequence.state)
    sequence.replaying(True)
    states.append(sequence.state)
    sequence.replaying(False)
    sequence.applied(0, 1.0, now_s=1.0)
    states.append(sequence.state)
    sequence.history_lost()
    states.append(sequence.state)
    sequence.history_whole()
    states.append(sequence.state)
    expected = [State.NEVER_CONNECTED, State.SILENT, State.REPLAYING, State.LIVE, State.DEGRADED, State.LIVE]
    assert states == expected


def test_two_ranks_numbered_alike_do_not_disturb_each_other() -> None:
    ranks = [Sequence(), Sequence()]
    for seq in range(5):
        for sequence in ranks:
            assert sequence.feed(seq, 1.0) is Verdict.APPLY
            sequence.applied(seq, 1.0, now_s=0.0)


def test_a_reset_forgets_the_cursor_and_keeps_the_counters() -> None:
    sequence = at(9)
    assert sequence.feed(0) is Verdict.RESTART
    sequence.reset()
    assert (sequence.last, sequence.restarts, sequence.feed(0)) == (None, 1, Verdict.APPLY)


def test_a_stray_leaves_the_live_cursor_where_it_was() -> None:
    sequence = at(3)
    assert sequence.feed(8, ts_s=1.0) is Verdict.GAP
    assert sequence.is_older(1.0)
    sequence.stray()
    assert (sequence.feed(4, ts_s=101.0), sequence.stale) == (Verdict.APPLY, 1)
