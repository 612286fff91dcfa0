"""One receipt, drawn and in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Reason
from router.cli.explain import show
from router.cli.main import main
from router.cli.screen import Screen
from router.receipts import Receipt, Resume
from router.study import bars
from router.study.bars import BOTH, COMPUTE, FETCH, NOTHING, QUEUE, axis_end_s, bar
from router.study.explain import REASONS, what_came, why
from tests.router.receipts.builders import a_candidate, a_receipt

times_s = st.floats(0.0, 500.0)


def drawn(receipt: Receipt, width: int = 120) -> str:
    console = Screen(width=width, record=True, force_terminal=False, no_color=True)
    with console.capture() as capture:
        show(receipt, console)
    return capture.get()


def the_choice_between_two(**changes: Any) -> Receipt:
    candidates = [
        a_candidate(replica="busy", queue_s=0.3, compute_s=0.1, first_token_s=0.4, expected_s=0.4),
        a_candidate(
            replica="idle",
            path="recompute",
            queue_s=0.0,
            compute_s=0.8,
            first_token_s=0.8,
            expected_s=0.8,
            local_tokens=0,
        ),
    ]
    return a_receipt(**{"candidates": candidates, "first_token_s": 0.5, **changes})


@given(times_s, times_s, times_s, st.integers(1, 100))
def test_an_overlapped_bar_shows_queue_then_compute_up_to_the_first_token(
    queue_s: float, fetch_s: float, compute_s: float, width: int
) -> None:
    first_s = max(queue_s, fetch_s) + compute_s
    one = a_candidate(queue_s=queue_s, fetch_s=fetch_s, ready_s=fetch_s, compute_s=compute_s, first_token_s=first_s)
    axis_s = max(first_s, 1e-3)
    text = bar(one, axis_s=axis_s, width=width)
    order = {BOTH: 0, QUEUE: 1, FETCH: 1, COMPUTE: 2, NOTHING: 3}
    steps = [order[cell] for cell in text]
    assert len(text) == width
    assert steps == sorted(steps)
    assert text.count(COMPUTE) == pytest.approx(compute_s / axis_s * width, abs=1.01)


def test_a_fetch_that_starts_with_its_turn_is_drawn_after_the_queue() -> None:
    one = a_candidate(queue_s=0.4, fetch_s=0.2, ready_s=0.6, compute_s=0.2, first_token_s=0.8)
    assert bar(one, axis_s=1.0, width=10) == QUEUE * 4 + FETCH * 2 + COMPUTE * 2 + NOTHING * 2


@given(st.floats(1e-4, 1e6))
def test_the_axis_ends_at_a_round_number_not_far_beyond_the_longest(longest_s: float) -> None:
    assert longest_s <= axis_end_s(longest_s) <= 2.51 * longest_s


def test_the_chosen_is_first_and_marked_and_the_moment_the_token_came_is_on_its_bar() -> None:
    lines = drawn(the_choice_between_two(chosen=1, first_token_s=0.5)).splitlines()
    rows = [line for line in lines if line.lstrip("▶ ").startswith(("idle", "busy"))]
    assert rows[0].startswith("▶ idle")
    assert ["◆" in row for row in rows] == [True, False]


def test_the_sentence_says_who_was_next_best_and_by_how_much() -> None:
    text = why(the_choice_between_two())
    assert "took busy" in text
    assert "after 400 ms, that of the next best, idle (recompute), after 800 ms" in text


@pytest.mark.parametrize(("deadline_s", "says"), [(0.6, "inside its deadline of 600 ms"), (0.2, "after its deadline")])
def test_a_deadline_is_told_with_what_came(deadline_s: float, says: str) -> None:
    receipt = the_choice_between_two(deadline_s=deadline_s, reason="best_effort")
    assert says in what_came(receipt)
    assert "no candidate was likely enough to meet the deadlines" in why(receipt)
    assert "deadline" not in what_came(the_choice_between_two())


def test_a_rule_that_passed_over_a_sooner_first_token_says_what_it_saved() -> None:
    slow, fast = the_choice_between_two().candidates
    slow.pace_s, fast.pace_s, fast.queue_price_s, slow.queue_price_s = 0.02, 0.01, 0.1, 0.5
    text = why(the_choice_between_two(candidates=[slow, fast], chosen=1, expected_output_tokens=100.0))
    assert "busy (local) was expected to give the first token 400 ms sooner" in text
    assert "but to take 1 s longer to decode and delay later requests by 400 ms more" in text


def test_who_comes_while_a_queue_lasts_is_told_apart_from_all_who_wait_longer() -> None:
    slow, fast = the_choice_between_two().candidates
    slow.queue_s, fast.queue_s, slow.compute_s, fast.compute_s = 0.0, 2.0, 0.5, 0.2
    slow.queue_price_s, fast.queue_price_s, slow.expected_s, fast.expected_s = 0.1, 0.5, 0.9, 0.4
    taken = {"candidates": [slow, fast], "chosen": 0}
    later, meanwhile = "but to delay later requests by 400 ms more", "delay whoever comes while its queue lasts by"
    assert f"{later} and {meanwhile} 200 ms more." in why(
        the_choice_between_two(**taken, arrival_rps=0.5, mean_compute_s=0.2)
    )
    served = the_choice_between_two(**taken, arrival_rps=9.0, mean_compute_s=1.0)  # one a second is served at most
    assert f"{later} and {meanwhile} 400 ms more." in why(served)
    assert f"{later}." in why(the_choice_between_two(**taken))


def test_a_rule_that_left_a_short_queue_to_others_says_so() -> None:
    long, short = the_choice_between_two().candidates
    long.expected_s, short.expected_s, long.levelling_price_s, short.levelling_price_s = 0.8, 0.4, 0.0, 0.3
    long.queue_price_s, short.queue_price_s = 0.9, 0.5
    text = why(the_choice_between_two(candidates=[long, short], chosen=0))
    assert "400 ms sooner, but to lengthen the queue of whoever comes next by 300 ms more" in text


def test_a_rule_that_computed_less_where_all_wait_says_so() -> None:
    local, shorter = the_choice_between_two().candidates
    local.expected_s, shorter.expected_s, local.compute_s, shorter.compute_s = 0.8, 0.4, 0.1, 0.9
    local.queue_price_s = shorter.queue_price_s
    more = "compute 800 ms more while all others wait"
    assert more not in why(the_choice_between_two(candidates=[local, shorter], chosen=0))
    local.levelling_price_s = shorter.levelling_price_s = 0.0
    assert more in why(the_choice_between_two(candidates=[local, shorter], chosen=0))


def test_a_stream_that_went_on_elsewhere_says_where_it_broke_and_is_held_against_the_last_choice() -> None:
    broke = Resume("gone", broke_s=2.0, sent_tokens=40, went_on_s=2.9)
    receipt = the_choice_between_two(resumes=[broke], placed_s=2.5, tried=["gone"])
    assert "its stream broke on gone after 40 tokens; the first token of the rest came after 400 ms" in what_came(
        receipt
    )
    failed = the_choice_between_two(outcome="failed", cause="broken", not_resumed="stop_at_cut")
    assert "it did not go on elsewhere (stop at cut); the first token came" in what_came(failed)


def test_the_end_is_held_against_what_was_expected() -> None:
    receipt = the_choice_between_two(regret_s=-0.3)
    receipt.candidates[0].first_token_p90_s, receipt.candidates[0].first_token_p99_s = 0.45, 0.6
    text = what_came(receipt)
    assert "after 500 ms, 100 ms later than expected, inside its p99" in text
    assert "300 ms less than the best other" in text
    receipt.candidates[0].first_token_p99_s = 0.46
    assert "beyond its p99" in what_came(receipt)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"candidates": [], "chosen": None, "reason": None, "outcome": "refused", "status": 404}, "status 404"),
        ({"candidates": [], "chosen": None, "reason": "next_in_turn"}, "without any estimate"),
        ({"outcome": "failed", "cause": "no_answer", "tried": ["busy"], "first_token_s": None}, "attempts on busy"),
        ({"override": True}, "asked for by the client"),
    ],
)
def test_requests_that_went_another_way_are_explained_too(changes: dict[str, Any], says: str) -> None:
    assert says in drawn(the_choice_between_two(**changes), width=400)


def test_every_reason_of_our_rules_has_words() -> None:
    assert {reason.value for reason in Reason} == set(REASONS)


def test_a_reason_without_words_of_its_own_is_told_as_it_is() -> None:
    assert "the rule says full moon" in why(the_choice_between_two(reason="full_moon"))


@pytest.mark.parametrize("width", [20, 40, 50, 59, 60, 80, 200])
def test_on_terminals_of_any_width_the_chosen_row_is_marked_and_lines_fit(width: int) -> None:
    receipt = the_choice_between_two()
    receipt.candidates[0].replica = "a-replica-with-a-name-too-long-to-be-shown"
    rows = [line for line in drawn(receipt, width).splitlines() if "█" in line and line[:2] in ("▶ ", "  ")]
    assert [line[0] for line in rows] == ["▶", " "]
    assert all(len(line) <= width for line in rows)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_narrow_terminal_leaves_numbers_out_and_cuts_none(width: int) -> None:
    rows = drawn(the_choice_between_two(), width).splitlines()
    (chosen,) = (line for line in rows if line.startswith("▶ busy"))
    assert chosen.split()[-1] == ("ms" if width < 60 else "90%")
    assert "400 ms" in chosen
    assert "…" not in chosen


def test_a_receipt_with_impossible_times_is_drawn_all_the_same() -> None:
    assert "▶ busy" in drawn(the_choice_between_two(first_token_s=0.1, placed_s=3.0))


def test_more_candidates_than_fit_a_screen_are_said_to_be_there() -> None:
    many = [a_candidate(replica=f"r{index}", expected_s=1.0 + index) for index in range(40)]
    text = drawn(a_receipt(candidates=many, possible=64))
    assert "16 more are named" in text
    assert "24 more were possible" in text
    assert sum("█" in line for line in text.splitlines()[2:]) == 24


def test_the_command_finds_a_request_in_a_file_and_says_when_it_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(msgspec.json.encode(the_choice_between_two(request_id="mine-1")) + b"\n")
    assert main(["explain", "mine-1", "--receipts", str(path)]) == 0
    assert "took busy" in capsys.readouterr().out
    assert main(["explain", "other", "--receipts", str(path)]) == 2
    assert "no receipt of request 'other'" in capsys.readouterr().err


def test_times_are_written_as_people_read_them() -> None:
    assert [bars.seconds(value_s) for value_s in (0.0004, 0.25, 2.5, -0.25)] == ["0.4 ms", "250 ms", "2.5 s", "-250 ms"]
