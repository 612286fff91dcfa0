"""Fetches by themselves, on links of round numbers: one token is one byte, a block is 512 tokens, a piece one block."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from sim_backends.alarms import Alarms
from sim_backends.block_cache import BlockCache
from sim_backends.directives import Directive, Path
from sim_backends.disciplines import DISCIPLINES
from sim_backends.fetch import Fetch, Peer
from sim_backends.fetching import Fetcher, Place
from sim_backends.links import FairLink
from sim_backends.prefetch_space import PrefetchSpace
from sim_backends.roles import KeptState
from sim_backends.store import SharedStore
from sim_backends.tiers import TierStack

BLOCK = 512
DIGESTS = [bytes([number]) for number in range(10)]


def a_link(blocks_per_s: float, start_s: float = 0.0) -> FairLink:
    return FairLink(rate_bytes_per_s=blocks_per_s * BLOCK, start_s=start_s)


@dataclass
class Site:
    """One replica with a host tier, a disk, a store and one peer called `peer`."""

    alarms: Alarms = field(default_factory=Alarms)
    pcie: FairLink = field(default_factory=lambda: a_link(10.0))
    disk: FairLink = field(default_factory=lambda: a_link(1.0, start_s=0.5))
    network: FairLink = field(default_factory=lambda: a_link(2.0, start_s=1.0))
    egress: FairLink = field(default_factory=lambda: a_link(4.0))
    tiers: TierStack = field(default_factory=lambda: TierStack(host_blocks=20, disk_blocks=20))
    store: SharedStore = field(default_factory=lambda: SharedStore(capacity_blocks=100))
    let_go: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kept = KeptState(self.alarms, lambda blocks, _now_s: self.let_go.append(blocks))
        self.peer = Peer(BlockCache(20), TierStack(host_blocks=20), self.egress, kept)
        self.ends: list[tuple[str, float]] = []

    def fetcher(self, discipline: str = "overlapped", **more: Any) -> Fetcher:
        own = [
            Place("host", self.tiers.tiers["host"], (self.pcie,)),
            Place("disk", self.tiers.tiers["disk"], (self.disk, self.pcie)),
        ]
        return Fetcher(
            DISCIPLINES[discipline],
            self.alarms,
            block_tokens=BLOCK,
            bytes_per_token=1,
            layers=4,
            places=own,
            remote=[*own, Place("store", self.store, (self.network, self.pcie))],
            tiers=self.tiers,
            store=self.store,
            peers={"peer": self.peer},
            **{"asks_store": not more.get("directed", False), **more},
        )

    def hold(self, *, host: range = range(0), disk: range = range(0), store: range = range(0)) -> None:
        for number in host:
            self.tiers.tiers["host"].put(DIGESTS[number])
        for number in disk:
            self.tiers.tiers["disk"].put(DIGESTS[number])
        self.store.put([DIGESTS[number] for number in store], 0.0)

    def peer_holds(self, count: int) -> None:
        blocks = self.peer.cache.take(count)
        for block, digest in zip(blocks, DIGESTS, strict=False):
            self.peer.cache.register(block, digest)

    def start(
        self, fetcher: Fetcher, now_s: float = 0.0, *, here: int = 0, directive: Directive | None = None
    ) -> Fetch:
        plan = fetcher.plan(DIGESTS, here=here, limit=10, prompt_tokens=5200, directive=directive)
        assert plan is not None
        return fetcher.start(
            plan,
            DIGESTS,
            now_s,
            first_done=lambda at_s: self.ends.append(("first", at_s)),
            done=lambda at_s: self.ends.append(("done", at_s)),
        )

    def run(self, until_s: float = inf) -> None:
        links = [self.network, self.disk, self.egress, self.pcie]
        while (link := min(links, key=lambda link: link.due_s)).due_s <= until_s and link.due_s < inf:
            link.run_due()


def sources(fetcher: Fetcher, here: int = 0, directive: Directive | None = None) -> list[tuple[str, int]]:
    plan = fetcher.plan(DIGESTS, here=here, limit=10, prompt_tokens=5200, directive=directive)
    return [] if plan is None else [(segment.source, segment.tokens // BLOCK) for segment in plan.segments]


def test_each_block_comes_from_the_first_place_that_has_it_up_to_the_first_gap() -> None:
    site = Site()
    site.hold(host=range(1, 4), disk=range(2, 6), store=range(8))
    assert sources(site.fetcher()) == [("store", 1), ("host", 3), ("disk", 2), ("store", 2)]
    assert sources(site.fetcher(), here=7) == [("store", 1)]
    assert sources(site.fetcher(), here=8) == []


def test_a_directed_engine_reads_the_store_and_peers_only_when_told() -> None:
    site = Site()
    site.hold(host=range(2), store=range(8))
    site.peer_holds(6)
    fetcher = site.fetcher(directed=True)
    assert sources(fetcher) == [("host", 2)]
    assert sources(fetcher, directive=Directive(Path.LOCAL)) == [("host", 2)]
    assert sources(fetcher, directive=Directive(Path.REMOTE)) == [("host", 2), ("store", 6)]
    assert sources(fetcher, directive=Directive(Path.PEER, source="peer")) == [("host", 2), ("peer", 4)]
    assert sources(fetcher, directive=Directive(Path.PEER, source="nobody")) == [("host", 2)]


def test_who_looks_the_store_up_by_itself_takes_it_before_the_peer_it_is_told() -> None:
    site = Site()
    site.hold(host=range(2), store=range(5))
    site.peer_holds(8)
    fetcher = site.fetcher(directed=True, asks_store=True)
    told = Directive(Path.PEER, source="peer")
    assert sources(fetcher, directive=told) == [("host", 2), ("store", 3), ("peer", 3)]
    assert sources(fetcher) == [("host", 2), ("store", 3)]


def test_an_engine_that_looks_up_by_itself_is_not_led_to_a_peer() -> None:
    site = Site()
    site.hold(store=range(2))
    site.peer_holds(6)
    assert sources(site.fetcher(), directive=Directive(Path.PEER, source="peer")) == [("store", 2)]


def test_a_peers_host_tier_can_be_read_too() -> None:
    site = Site()
    site.peer_holds(2)
    site.peer.tiers.write_back(DIGESTS[2])
    assert sources(site.fetcher(directed=True), directive=Directive(Path.PEER, source="peer")) == [("peer", 3)]


def test_a_gain_below_the_minimum_is_no_plan() -> None:
    site = Site()
    site.hold(store=range(2))
    assert sources(site.fetcher(minimum_tokens=2 * BLOCK)) == [("store", 2)]
    assert sources(site.fetcher(minimum_tokens=2 * BLOCK + 1)) == []


@pytest.mark.parametrize(
    ("held", "end_s"),
    [
        ({"host": range(5)}, 0.5),  # 5 / 10
        ({"disk": range(5)}, 6.0),  # 0.5 + 5 / 1, then 5 / 10
        ({"store": range(5)}, 4.0),  # 1 + 5 / 2, then 5 / 10
        ({"host": range(2), "store": range(5)}, 2.8),  # side by side; the store's: 1 + 3 / 2 + 3 / 10
    ],
)
def test_a_whole_fetch_takes_what_its_links_take(held: dict[str, range], end_s: float) -> None:
    site = Site()
    site.hold(**held)
    fetch = site.start(site.fetcher())
    assert fetch.usable_tokens == 0
    site.run()
    assert dict(site.ends) == pytest.approx({"done": end_s})
    assert fetch.usable_tokens == 5 * BLOCK


def test_a_peers_blocks_pass_only_the_link_that_leaves_it() -> None:
    site = Site()
    site.peer_holds(6)
    site.start(site.fetcher(directed=True), directive=Directive(Path.PEER, source="peer"))
    assert len(site.peer.readers) == 1
    site.run()
    assert dict(site.ends) == pytest.approx({"done": 6 / 4})
    assert not site.peer.readers


def test_layers_announce_the_first_one_and_then_all() -> None:
    """Four layers of two blocks each over 2 blocks a second, then 10: a layer passes at 2, its PCIe takes 0.2; the
    other six blocks leave the network at 5 and end 0.6 later."""
    site = Site()
    site.hold(store=range(8))
    site.start(site.fetcher("layerwise"))
    site.run()
    assert dict(site.ends) == pytest.approx({"first": 2.2, "done": 5.6})


def test_pieces_are_usable_from_the_head_as_they_come() -> None:
    """A block leaves the network every half second from 1.5 on and takes 0.1 more: three have come by 2.7."""
    site = Site()
    site.hold(store=range(8))
    fetcher = site.fetcher("best_effort")
    fetch = site.start(fetcher)
    site.run(until_s=2.65)
    assert fetch.stop(2.7) == 3 * BLOCK
    site.run()
    assert site.ends == []
    assert (fetcher.fetched_tokens, fetcher.wasted_tokens) == ({"store": 3 * BLOCK}, 5 * BLOCK)
    assert [link.active_transfers for link in (site.network, site.pcie)] == [0, 0]


def test_pieces_of_a_later_place_are_of_no_use_before_the_gap_is_filled() -> None:
    """The host's block 1 is there at 0.1; block 0 comes from the store at 1.6."""
    site = Site()
    site.hold(host=range(1, 2), store=range(1))
    fetch = site.start(site.fetcher("best_effort"))
    site.run(until_s=1.0)
    assert fetch.usable_tokens == 0
    site.run()
    assert fetch.usable_tokens == 2 * BLOCK


def test_from_the_tail_the_last_pieces_come_first() -> None:
    site = Site()
    site.hold(store=range(8))
    fetch = site.start(site.fetcher("two_ends"))
    site.run(until_s=2.65)
    assert (fetch.usable_tokens, fetch.tail_from_tokens) == (0, 5 * BLOCK)


def test_a_fetch_holds_its_prefetch_space_to_its_end() -> None:
    site = Site()
    site.hold(store=range(8))
    fetcher = site.fetcher(space=PrefetchSpace(8 * BLOCK))
    fetch = site.start(fetcher)
    assert not fetcher.has_space(fetch.plan)
    fetch.stop(0.5)
    assert fetcher.has_space(fetch.plan)
    assert fetcher.space.refused == 1


def test_a_reader_of_a_peer_that_dies_goes_on_with_what_has_come() -> None:
    """Four blocks a second leave the peer: three whole ones have come by 0.8."""
    site = Site()
    site.peer_holds(6)
    fetch = site.start(site.fetcher("best_effort", directed=True), directive=Directive(Path.PEER, source="peer"))
    site.run(until_s=0.8)
    site.peer.lose_readers(0.8)
    site.run()
    assert (site.ends, fetch.usable_tokens) == ([("done", 0.8)], 3 * BLOCK)
    assert site.egress.active_transfers == 0


def test_a_hand_off_brings_every_kept_token_and_lets_the_source_go() -> None:
    """5,200 tokens at 2,048 a second, of which one block is here: 4,688 / 2,048 s."""
    site = Site()
    site.peer.kept.keep("p", [1, 2, 3], 5200, 0.0)
    fetcher = site.fetcher(space=PrefetchSpace(1))
    fetch = site.start(fetcher, here=1, directive=Directive(Path.HAND_OFF, source="peer", request_id="p"))
    assert site.alarms.due_s == inf
    site.run()
    assert dict(site.ends) == pytest.approx({"done": 4688 / 2048})
    assert (fetch.usable_tokens, site.let_go, len(site.peer.kept)) == (5200, [[1, 2, 3]], 0)


def test_a_hand_off_that_is_not_there_is_no_plan() -> None:
    site = Site()
    assert sources(site.fetcher(), directive=Directive(Path.HAND_OFF, source="peer", request_id="p")) == []
    assert sources(site.fetcher(), directive=Directive(Path.HAND_OFF, source="nobody", request_id="p")) == []
