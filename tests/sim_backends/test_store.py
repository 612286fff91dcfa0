from __future__ import annotations

from math import inf

import pytest

from sim_backends.links import FairLink
from sim_backends.store import Fetch, SharedStore, StoreChange


def test_the_least_recently_used_block_leaves_when_the_store_is_full() -> None:
    store = SharedStore(capacity_blocks=2, record_changes=True)
    store.put([b"a", b"b"], 0.0)
    store.refresh([b"a"])
    store.put([b"c"], 1.0)
    assert (b"a" in store, b"b" in store, b"c" in store) == (True, False, True)
    assert store.take_changes()[-2:] == [StoreChange(1.0, b"c", True), StoreChange(1.0, b"b", False)]


def test_a_block_written_again_counts_as_used() -> None:
    store = SharedStore(capacity_blocks=2)
    store.put([b"a", b"b", b"a", b"c"], 0.0)
    assert (b"a" in store, b"b" in store) == (True, False)


def test_changes_are_handed_out_once() -> None:
    store = SharedStore(capacity_blocks=2, record_changes=True)
    store.put([b"a"], 0.0)
    assert len(store.take_changes()) == 1
    assert store.take_changes() == []


def test_a_block_written_again_is_not_announced_again() -> None:
    store = SharedStore(capacity_blocks=2, record_changes=True)
    store.put([b"a"], 0.0)
    store.put([b"a"], 1.0)
    assert len(store.take_changes()) == 1


def test_a_match_takes_what_the_replica_has_for_granted() -> None:
    store = SharedStore(capacity_blocks=9)
    store.put([b"b", b"c"], 0.0)
    chain = [b"a", b"b", b"c", b"d"]
    assert (store.match(chain, 1, 4), store.match(chain, 0, 4), store.match(chain, 1, 2)) == (3, 0, 2)


def run(*links: FairLink) -> None:
    while (link := min(links, key=lambda link: link.due_s)).due_s < inf:
        link.run_due()


def test_a_fetch_passes_network_then_host_link_in_series() -> None:
    network, host = FairLink(rate_bytes_per_s=100.0, start_s=0.5), FairLink(rate_bytes_per_s=200.0)
    ends: list[float] = []
    Fetch(network, host, done=ends.append).start(100.0, 1.0)
    run(network, host)
    assert ends == pytest.approx([1.0 + 0.5 + 1.0 + 0.5])


def test_the_first_part_comes_ahead_and_the_rest_follows_behind_it() -> None:
    """Four parts of 25: first at 0.5 + 0.25 + 0.125; the rest leaves the network at 1.5 and the host 0.375 later."""
    network, host = FairLink(rate_bytes_per_s=100.0, start_s=0.5), FairLink(rate_bytes_per_s=200.0)
    first: list[float] = []
    ends: list[float] = []
    Fetch(network, host, done=ends.append, first_done=first.append).start(100.0, 0.0, parts=4)
    run(network, host)
    assert [*first, *ends] == pytest.approx([0.875, 1.875])


@pytest.mark.parametrize("cancel_s", [0.2, 0.8, 1.6])  # look-up, network, host link
def test_a_cancelled_fetch_never_ends_and_frees_both_links(cancel_s: float) -> None:
    network, host = FairLink(rate_bytes_per_s=100.0, start_s=0.5), FairLink(rate_bytes_per_s=200.0)
    ends: list[float] = []
    fetch = Fetch(network, host, done=ends.append)
    fetch.start(100.0, 0.0)
    while (link := min(network, host, key=lambda link: link.due_s)).due_s < cancel_s:
        link.run_due()
    fetch.cancel(cancel_s)
    run(network, host)
    assert (ends, network.active_transfers, host.active_transfers) == ([], 0, 0)
