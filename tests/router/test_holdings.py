"""What a decision is told of caches: the directory's answer as the estimates read it."""

from __future__ import annotations

import numpy as np

from estimators.hit_probability import TIER_ROW
from estimators.routes import Held
from estimators.tiers import Tier
from router.assemble import holdings_of
from router.directory import Directory
from router.fleet import Fleet
from router.holdings import DirectoryHoldings
from router.other_tiers import with_tiers
from router.signals.lmcache import Holding
from router.signals.looked_up import Answers
from tests.router.signals.events import BLOCK, MODEL, P, batch, chain_of, named, removed, stored
from tests.router.test_assemble import PEERS, STORE, TIERS, a_fleet_file

CHAIN = chain_of(P)


def a_directory(rows: int = 2) -> Directory:
    directory = Directory(BLOCK, rows)
    for row in range(rows):
        directory.add_source(row, MODEL)
    return directory


def head_in_hbm_tail_on_host(directory: Directory, now_s: float) -> None:
    """Row 0: blocks 1 to 100 in HBM, 101 to 200 only on the host, 201 and 202 only on the disk."""
    directory.apply(0, batch(stored(P, 1), named(list(range(101, 201)), tier=Tier.HOST)), now_s)
    directory.apply(0, batch(named([201, 202], tier=Tier.DISK), removed(*range(101, 257))), now_s)


def test_a_tail_below_hbm_continues_the_head_in_it() -> None:
    directory = a_directory()
    head_in_hbm_tail_on_host(directory, 1.0)
    held = DirectoryHoldings(directory, has_tiers=True).held(CHAIN, 2.0)
    assert held.host_blocks is not None
    assert held.disk_blocks is not None
    assert (held.local_blocks.tolist(), held.host_blocks.tolist()) == ([100, 0], [200, 0])
    assert held.disk_blocks.tolist() == [202, 0]


def test_replicas_that_read_no_tiers_have_none_whatever_events_say() -> None:
    directory = a_directory()
    head_in_hbm_tail_on_host(directory, 1.0)
    held = DirectoryHoldings(directory).held(CHAIN, 2.0)
    assert (held.local_blocks.tolist(), held.host_blocks, held.disk_blocks) == ([100, 0], None, None)


def test_what_requests_in_flight_will_leave_counts_with_the_tiers_too_and_is_told_from_what_is_there() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P[:160], 1)), 1.0)
    holdings = DirectoryHoldings(directory, has_tiers=True, ages=True)
    assert holdings.held(CHAIN, 2.0).confirmed_blocks is None
    number = holdings.expect(0, CHAIN[:64], 2.0)
    held = holdings.held(CHAIN, 5.0)
    assert held.confirmed_blocks is not None
    assert held.host_blocks is not None
    assert (held.local_blocks.tolist(), held.confirmed_blocks.tolist()) == ([64, 0], [10, 0])
    assert held.host_blocks.tolist() == [64, 0]
    assert held.age_s is not None
    assert held.age_s[TIER_ROW[Tier.HBM], 0] == 0.0, "not there yet, so it will be new"
    holdings.cancel(number)
    assert holdings.held(CHAIN, 5.0).local_blocks.tolist() == [10, 0]


def test_nothing_is_expected_where_a_peer_could_be_told_to_read_it() -> None:
    directory = a_directory()
    holdings = DirectoryHoldings(directory, expects=False)
    holdings.cancel(holdings.expect(0, CHAIN, 1.0))
    holdings.expect(0, CHAIN, 1.0)
    assert holdings.held(CHAIN, 1.0).local_blocks.tolist() == [0, 0]
    assert directory.stats().expected == 0


def test_ages_are_those_of_the_last_block_of_each_reach_and_are_not_asked_for_in_vain() -> None:
    directory = a_directory()
    head_in_hbm_tail_on_host(directory, 10.0)
    directory.apply(0, batch(stored(P[1600:1616], 101, parent=100)), 30.0)
    directory.apply_store(batch(named([1, 2, 3])), 20.0)
    held = DirectoryHoldings(directory, has_tiers=True, ages=True).held(CHAIN, 50.0)
    assert held.age_s is not None
    assert held.age_s[:, 0].tolist() == [20.0, 40.0, 40.0, 30.0]
    assert np.isnan(held.age_s[:3, 1]).all()
    assert DirectoryHoldings(directory, has_tiers=True).held(CHAIN, 50.0).age_s is None


def test_ages_of_tiers_nobody_reads_are_unknown() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P, 1)), 1.0)
    held = DirectoryHoldings(directory, ages=True).held(CHAIN, 2.0)
    assert held.age_s is not None
    assert held.age_s[TIER_ROW[Tier.HBM], 0] == 1.0
    assert np.isnan(held.age_s[[TIER_ROW[Tier.HOST], TIER_ROW[Tier.DISK]]]).all()


def test_what_a_look_up_found_on_hosts_and_disks_counts_where_it_is_more() -> None:
    answers = Answers(2, {"a": 0, "b": 1}, block_tokens=BLOCK, chunk_tokens=BLOCK)
    answers.answered(CHAIN, [Holding("a", Tier.HOST, 20 * BLOCK), Holding("b", Tier.DISK, 30 * BLOCK)], 1.0)
    by_events = np.array([25, 4], np.int32)
    held = with_tiers(
        Held(local_blocks=by_events, store_blocks=0, host_blocks=by_events),
        by_events,
        answers.held(CHAIN, 1.0),
    )
    assert held.host_blocks is not None
    assert held.disk_blocks is not None
    assert (held.host_blocks.tolist(), held.disk_blocks.tolist()) == ([25, 4], [25, 30])
    assert held.local_blocks is by_events


def test_a_fleet_whose_engines_are_told_to_read_peers_expects_nothing() -> None:
    directed = "fetch: {by: directed}\n"
    for sections, expected in (((PEERS,), 64), ((STORE, directed), 64), ((PEERS, directed), 0)):
        fleet = a_fleet_file(*sections)
        holdings = holdings_of(fleet, Directory(BLOCK, len(fleet.replicas)))
        holdings.expect(0, CHAIN[:64], 1.0)
        assert holdings.held(CHAIN, 1.0).local_blocks.tolist() == [expected, 0, 0]


def test_fleet_files_say_whether_tiers_are_read() -> None:
    for sections, has_tiers in (((STORE,), False), ((TIERS,), True), ((STORE, PEERS), False)):
        assert (_held_of(a_fleet_file(*sections)).host_blocks is not None) is has_tiers


def _held_of(fleet: Fleet) -> Held:
    return holdings_of(fleet, Directory(BLOCK, len(fleet.replicas))).held(CHAIN, 1.0)
