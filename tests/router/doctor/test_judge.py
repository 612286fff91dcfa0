"""From facts to findings: each thing that can be missing has its sentence and its flag."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from router.doctor.facts import Facts, LoadFacts, ProbeFacts, SourceFacts, TokenFacts, as_one_fleet
from router.doctor.judge import Finding, Level, findings_of, works
from router.doctor.probe import unmatched
from router.signals.claims import Applied
from router.signals.load import Load
from router.signals.sequence import State

LIVE = SourceFacts(
    rank=0,
    address="tcp://10.0.0.5:5557",
    replay="tcp://10.0.0.5:5657",
    raw_address="tcp://*:5557",
    state=State.LIVE,
    connected=True,
    batches=3,
    replays=1,
)
GOOD = Facts(
    url="http://10.0.0.5:8000",
    engine="vllm",
    version="0.33.0",
    models=("m1",),
    block_tokens=16,
    block_tokens_from="/metrics",
    blocks=1000,
    capacity_tokens=16_000,
    caching=True,
    sources=(LIVE,),
    sources_route="/kv_event_sources",
    load=LoadFacts(names=("vllm:num_requests_running",), total=Load(running=1, waiting=0), page_says_load=True),
    probe=ProbeFacts(blocks=2, seen_blocks=2, batches=1, cached_tokens=32, reusable_tokens=32, figures_moved=True),
    tokens=TokenFacts(engine_tokens=20, local_tokens=20),
)


def with_source(**changes: Any) -> Facts:
    return replace(GOOD, sources=(replace(LIVE, **changes),))


def unlike(facts: Facts) -> list[Finding]:
    """Findings that are not fine."""
    return [finding for finding in findings_of(facts) if finding.level is not Level.FINE]


def the_problem(facts: Facts) -> Finding:
    assert not works(findings_of(facts))
    (found,) = [finding for finding in unlike(facts) if finding.level is Level.PROBLEM]
    return found


def the_note(facts: Facts) -> Finding:
    assert works(findings_of(facts))
    (found,) = unlike(facts)
    return found


def test_a_server_that_lacks_nothing_has_nothing_but_fine_findings() -> None:
    assert unlike(GOOD) == []
    assert works(findings_of(GOOD))


@pytest.mark.parametrize(
    ("changes", "words", "flag"),
    [
        ({"sources": ()}, "names no source", '"publisher":"zmq"'),
        ({"sources": (), "switched_off": True}, "switched off", "--kv-events-config"),
        ({"sources": (), "version": "0.24.0"}, "cannot say where", "--events"),
        ({"models": ()}, "names no model", None),
        ({"caching": False}, "Prefix caching is off", "--enable-prefix-caching"),
        ({"block_tokens": 24, "block_tokens_from": "/server_info"}, "would take 16", "block_tokens: 24"),
        ({"block_tokens": 16, "configured_tokens": 24}, "The fleet file says block_tokens: 24", "block_tokens: 16"),
        ({"health_trouble": "/health answered 503"}, "takes no requests", None),
        ({"load": LoadFacts(names=("x",), total=Load(running=0, asleep=True))}, "It sleeps", "wake it up"),
        ({"engine": "sglang", "version": "0.5.5", "load": LoadFacts(names=("x",))}, "not chained", "0.5.6"),
        ({"tokens": TokenFacts(engine_tokens=9, local_tokens=8, first_difference=4)}, "token 4 differs", "directory"),
    ],
)
def test_what_keeps_the_cache_unknown_is_a_problem(changes: dict[str, Any], words: str, flag: str | None) -> None:
    finding = the_problem(replace(GOOD, **changes))
    assert words in finding.sentence
    assert (flag or "") in (finding.fix or "")
    assert (finding.fix is None) == (flag is None)


@pytest.mark.parametrize(
    ("changes", "words", "flag"),
    [
        ({"block_tokens": None, "block_tokens_from": None}, "block size is not said", "block_tokens in a fleet file"),
        ({"load": LoadFacts()}, "no figures of load", "--disable-log-stats"),
        ({"load": LoadFacts(page_trouble="/metrics answered 404")}, "/metrics answered 404", "proxy"),
        ({"engine": "sglang", "version": "0.5.18", "load": LoadFacts(page_trouble="x")}, "X:", "--enable-metrics"),
        ({"load": LoadFacts(names=("x",), total=Load(running=1, anomalies=2))}, "2 load figures", None),
        ({"probe": None}, "Not tried", "--probe"),
        ({"tokens": TokenFacts(trouble="/tokenize answered 404")}, "cannot be asked for tokens", None),
        ({"engine": None}, "unknown kind", None),
        ({"engine": "sglang", "version": "0.5.23"}, "can push it", "--load-publish-endpoint auto"),
    ],
)
def test_what_makes_it_less_sure_is_a_note(changes: dict[str, Any], words: str, flag: str | None) -> None:
    finding = the_note(replace(GOOD, **changes))
    assert words in finding.sentence
    assert (finding.fix is None) == (flag is None)
    assert (flag or "") in (finding.fix or "")


# Event sources

SILENT = {"state": State.SILENT, "batches": 0}
GONE = {"state": State.NEVER_CONNECTED, "connected": False, "batches": 0, "replays": 0}


@pytest.mark.parametrize(
    ("changes", "words", "fix"),
    [
        (GONE, "Nothing accepts subscribers at tcp://10.0.0.5:5557 (rank 0)", "--kv-events-config"),
        ({**GONE, "raw_address": "tcp://0.0.0.0:5557"}, "which vLLM dials", '"endpoint":"tcp://*:5557"'),
        ({**GONE, "raw_address": "tcp://router:5557"}, "the engine dials", "events: tcp://*:5557"),
        ({**GONE, "address": "ipc:///tmp/kv", "raw_address": "ipc:///tmp/kv"}, "own machine", '"endpoint"'),
        ({"errors": 1}, "cannot be listened to", None),
    ],
)
def test_a_source_that_cannot_be_heard_says_why(changes: dict[str, Any], words: str, fix: str | None) -> None:
    finding = the_problem(with_source(**changes))
    assert words in finding.sentence
    assert (fix or "") in (finding.fix or "")


def test_wildcards_of_both_versions_of_ip_are_no_dialled_addresses() -> None:
    for said in ("tcp://*:5557", "tcp://[::]:5557"):
        assert "Nothing accepts" in the_problem(with_source(**GONE, raw_address=said)).sentence


def test_a_silent_source_is_fine_after_a_probe_and_asks_for_one_without() -> None:
    assert unlike(with_source(**SILENT)) == []
    notes = unlike(replace(with_source(**SILENT), probe=None))
    assert "--probe" in (notes[0].fix or "")
    assert works(notes)


def test_a_source_without_replay_works_and_is_told_what_it_would_gain() -> None:
    finding = the_note(with_source(replay=None, replays=0))
    assert '"replay_endpoint"' in (finding.fix or "")
    older = replace(with_source(replay=None, replays=0), engine="sglang", version="0.5.18")
    assert "cannot say whether" in the_note(older).sentence


def test_a_replay_socket_that_does_not_answer_is_named() -> None:
    assert "tcp://10.0.0.5:5657 does not answer" in the_note(with_source(replays_failed=1)).sentence


def test_a_source_joined_late_is_less_sure() -> None:
    assert "before is unknown" in the_note(with_source(state=State.DEGRADED)).sentence


def test_ranks_behind_one_url_must_be_listed_one_by_one() -> None:
    second = replace(LIVE, rank=1, address="tcp://10.0.0.5:5558", replay="tcp://10.0.0.5:5658")
    two = replace(GOOD, sources=(LIVE, second))
    finding = the_problem(two)
    assert "2 data-parallel ranks" in finding.sentence
    assert "2 replicas of this URL" in (finding.fix or "")
    assert unlike(replace(two, listed=2)) == []


def test_a_port_that_two_ranks_would_use_is_a_collision() -> None:
    second = replace(LIVE, rank=1, address="tcp://10.0.0.5:5657", replay="tcp://10.0.0.5:5757")
    finding = the_problem(replace(GOOD, sources=(LIVE, second), listed=2))
    assert finding.about == "ports"


# The probe


@pytest.mark.parametrize(
    ("changes", "words", "flag"),
    [
        ({"trouble": "/v1/completions answered 500"}, "No completion", ""),
        ({"seen_blocks": 0, "batches": 0, "cached_tokens": None}, "no event came", "--enable-prefix-caching"),
        ({"seen_blocks": 0, "batches": 0}, "Its prefix cache works", "--kv-events-config"),
        ({"seen_blocks": 0, "unmatched": "2 of another block size"}, "0 of 2 blocks match", "block_tokens"),
        ({"cached_tokens": 0}, "reused none", "--enable-prefix-caching"),
    ],
)
def test_a_probe_that_shows_no_cache_is_a_problem(changes: dict[str, Any], words: str, flag: str) -> None:
    assert GOOD.probe is not None
    finding = the_problem(replace(GOOD, probe=replace(GOOD.probe, **changes)))
    assert words in finding.sentence
    assert flag in (finding.fix or "")


@pytest.mark.parametrize(
    ("engine", "said_by", "configured"),
    [
        (64, "/server_info", None),
        (1, "/server_info", None),
        (64, "/metrics", 64),
        (64, "/metrics", 16),
        (64, "/metrics", 128),
    ],
)
def test_block_sizes_fit_where_one_is_a_whole_number_of_the_other(
    engine: int, said_by: Any, configured: int | None
) -> None:
    facts = replace(GOOD, block_tokens=engine, block_tokens_from=said_by, configured_tokens=configured)
    assert unlike(facts) == []
    unsaid = replace(facts, block_tokens=None, block_tokens_from=None)
    assert f"the router takes {configured or 16} tokens" in the_note(unsaid).sentence


def judged_together(*sizes: int | None, configured: int | None = None) -> list[list[Finding]]:
    """What is not fine about servers in front of which one router stands; None for one that says no size."""
    said: list[Literal["/metrics"] | None] = ["/metrics" if size else None for size in sizes]
    servers = [
        replace(GOOD, block_tokens=size, block_tokens_from=where, configured_tokens=configured)
        for size, where in zip(sizes, said, strict=True)
    ]
    return [unlike(facts) for facts in as_one_fleet(servers)]


def test_a_server_whose_blocks_do_not_fit_the_size_the_first_one_says_is_a_problem() -> None:
    first, second, third = judged_together(16, 24, 64)
    assert first == third == []
    (finding,) = second
    assert finding.level is Level.PROBLEM
    assert "the first server says, 16: blocks of 24 tokens" in finding.sentence
    assert finding.fix == "block_tokens: 8 in a fleet file"
    assert judged_together(16, 24, 64, configured=8) == [[], [], []], "the cure is one"


def test_the_first_size_that_is_said_counts_for_servers_that_say_none() -> None:
    unsaid, said = judged_together(None, 64)
    assert "the router takes 64 tokens" in unsaid[0].sentence
    assert said == []
    by_server_info = replace(GOOD, block_tokens=24, block_tokens_from="/server_info")
    _, other = as_one_fleet([replace(GOOD, block_tokens=64), by_server_info])
    assert "the first server says, 64: blocks of 24 tokens" in the_problem(other).sentence


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (16, 1)])
def test_servers_whose_blocks_fit_one_another_have_no_problem(sizes: tuple[int, int]) -> None:
    assert judged_together(*sizes) == [[], []]


def two_ranks(**probed: Any) -> Facts:
    assert GOOD.probe is not None
    second = replace(LIVE, rank=1, address="tcp://10.0.0.5:5558", replay="tcp://10.0.0.5:5658")
    return replace(GOOD, sources=(LIVE, second), listed=2, probe=replace(GOOD.probe, rank=0, **probed))


def test_of_several_ranks_the_one_that_was_asked_must_reuse_its_blocks() -> None:
    assert unlike(two_ranks()) == []
    assert "reused none" in the_problem(two_ranks(cached_tokens=0)).sentence


@pytest.mark.parametrize("cached", [0, 32])
def test_a_rank_that_was_not_asked_and_ran_the_request_is_a_problem(cached: int) -> None:
    finding = the_problem(two_ranks(seen_blocks=0, elsewhere_blocks=2, cached_tokens=cached))
    assert (finding.about, finding.fix) == ("ranks", "vLLM 0.11.2 or newer")


def test_token_pairs_are_a_problem_although_events_come() -> None:
    finding = the_problem(with_source(pair_events=3))
    assert "token pairs" in finding.sentence
    assert "EAGLE" in (finding.fix or "")


@pytest.mark.parametrize(("batches", "answers"), [(0, False), (5, True)])
def test_a_history_that_is_still_being_read_answers_once_something_came(batches: int, answers: bool) -> None:
    assert replace(LIVE, state=State.REPLAYING, batches=batches).replay_answers is answers


def test_load_that_some_ranks_do_not_tell_is_not_shown_as_nothing() -> None:
    facts = replace(GOOD, load=LoadFacts(names=("x",), total=Load(), page_says_load=True))
    assert "x: of some ranks only" in next(one for one in findings_of(facts) if one.about == "load").sentence


def test_what_could_not_be_matched_is_counted_in_words() -> None:
    assert unmatched(Applied()) == ""
    assert unmatched(Applied(mismatched=2, orphans=1)) == "2 of another block size, 1 with an unknown parent"


def test_every_finding_that_is_not_fine_is_a_sentence() -> None:
    worst = replace(
        with_source(**GONE),
        health_trouble="/health answered 503",
        caching=False,
        load=LoadFacts(),
        models=(),
        probe=None,
    )
    for finding in unlike(worst):
        assert finding.sentence.endswith("."), finding
        assert not finding.sentence[0].islower(), finding


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.33.0", (0, 33, 0)), ("v0.9.2", (0, 9, 2)), ("0.5.23.post1", (0, 5, 23)), ("0.31.0rc1+cu12", (0, 31, 0))],
)
def test_versions_are_read_as_numbers(version: str, release: tuple[int, int, int]) -> None:
    assert replace(GOOD, version=version).release == release


@pytest.mark.parametrize("version", [None, "", "dev", "1.2"])
def test_an_unknown_version_is_older_than_nothing(version: str | None) -> None:
    facts = replace(GOOD, version=version)
    assert facts.release is None
    assert not facts.is_before(99, 0, 0)
