from __future__ import annotations

import pytest

from sim_backends import ranks
from sim_backends.ranks import BadRank, RankPicker


def test_without_a_header_ranks_take_turns_and_a_header_does_not_move_them() -> None:
    picker = RankPicker(3)
    assert [picker.pick(header) for header in (None, None, "0", None, None)] == [0, 1, 0, 2, 0]


def test_the_header_picks_the_rank() -> None:
    assert [RankPicker(4).pick(text) for text in ("3", " 1 ")] == [3, 1]


@pytest.mark.parametrize("text", ["2", "-1", "x", "", "1.0", "²"])
def test_a_header_that_names_no_rank_is_refused(text: str) -> None:
    with pytest.raises(BadRank, match=r"this server has ranks 0\.\.1"):
        RankPicker(2).pick(text)


def test_publishers_of_ranks_count_ports_up_unless_the_system_gives_them() -> None:
    assert ranks.shifted("tcp://127.0.0.1:5557", 3) == "tcp://127.0.0.1:5560"
    assert ranks.shifted("tcp://127.0.0.1:*", 3) == "tcp://127.0.0.1:*"


def page(rank: int) -> str:
    return (
        "# HELP a What.\n# TYPE a gauge\n"
        f'a{{engine="{rank}"}} {rank}.5\n'
        "# HELP h Hist.\n# TYPE h histogram\n"
        f'h_bucket{{engine="{rank}",le="+Inf"}} 1.0\nh_sum{{engine="{rank}"}} 2.0\n'
        "# HELP process_start Unix.\n# TYPE process_start gauge\nprocess_start 9.0\n"
    )


def test_a_merged_page_has_each_family_once_with_the_samples_of_all_ranks() -> None:
    assert ranks.merged([page(0), page(1)]) == (
        "# HELP a What.\n# TYPE a gauge\n"
        'a{engine="0"} 0.5\na{engine="1"} 1.5\n'
        "# HELP h Hist.\n# TYPE h histogram\n"
        'h_bucket{engine="0",le="+Inf"} 1.0\nh_sum{engine="0"} 2.0\n'
        'h_bucket{engine="1",le="+Inf"} 1.0\nh_sum{engine="1"} 2.0\n'
        "# HELP process_start Unix.\n# TYPE process_start gauge\nprocess_start 9.0\n"
    )


def test_a_page_merged_alone_is_itself() -> None:
    assert ranks.merged([page(0)]) == page(0)
