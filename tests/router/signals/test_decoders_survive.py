"""Whatever arrives, a decoder gives a value of bounded size or its own error, and nothing else happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory import Directory
from router.signals import discovery, load_answers, orca, poller, prometheus_text
from router.signals.intake import BadPush, parse_push
from router.signals.stream import Stream
from router.signals.wire import BadFrame, Batch, Removed, Stored, decode
from tests.router.signals.events import BLOCK, MODEL, VECTORS

SEED = 20260101
MUTANTS = 150  # of each recorded file

Decoder = Callable[[bytes], object]


def guarded(decoder: Decoder, *errors: type[Exception]) -> Decoder:
    """The decoder with its own errors as values; any other error is a failure of the test."""

    def decoded(raw: bytes) -> object:
        try:
            return decoder(raw)
        except errors as exc:
            return str(exc)

    return decoded


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


PAGES = prometheus_text.PageReader()  # one for all: a reader meets pages that have nothing to do with each other
DECODERS: dict[str, tuple[Decoder, str]] = {
    "events": (guarded(decode, BadFrame), "kv_events_*.hex"),
    "load socket": (guarded(load_answers.stat_of, BadFrame), "load_*.hex"),
    "push": (guarded(lambda raw: parse_push(raw, "application/json"), BadPush), "kv_events_*.json"),
    "packed push": (guarded(lambda raw: parse_push(raw, "application/msgpack"), BadPush), "kv_events_*.hex"),
    "page": (lambda raw: prometheus_text.loads_of(text_of(raw)), "metrics_*.txt"),
    "page, again": (lambda raw: PAGES.read(text_of(raw)), "metrics_*.txt"),
    "v1 loads": (load_answers.loads_of_v1, "sglang_v1_loads.json"),
    "get load": (load_answers.loads_of_get_load, "sglang_get_load_legacy.json"),
    "header": (orca.load_of_header, "orca_headers.txt"),
    "models": (poller.models_in, "sglang_v1_loads.json"),
}


def recorded(pattern: str) -> list[bytes]:
    files = [path.read_bytes() for path in sorted(VECTORS.glob(pattern))]
    assert files, pattern
    return [bytes.fromhex(raw.decode()) for raw in files] if pattern.endswith(".hex") else files


def mutants(raw: bytes, rng: random.Random, count: int) -> list[bytes]:
    """The bytes with some changed, cut, doubled or put in."""
    found = []
    for _ in range(count):
        changed = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(changed) + 1)
            match rng.randrange(5):
                case 0:
                    changed[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del changed[at:]
                case 2:
                    del changed[at : at + rng.randrange(9)]
                case 3:
                    changed[at:at] = changed[at : at + rng.randrange(40)]
                case _:
                    changed[at:at] = rng.choice([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xff" * 9, b"\n"])
        found.append(bytes(changed))
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_changed_recordings_are_read_or_refused(name: str) -> None:
    decoder, pattern = DECODERS[name]
    rng = random.Random(f"{SEED}/{name}")
    for raw in recorded(pattern):
        count = MUTANTS if len(raw) < 4000 else MUTANTS // 5
        for mutant in mutants(raw, rng, count):
            decoder(mutant)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(raw=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(name: str, raw: bytes) -> None:
    DECODERS[name][0](raw)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("raw", [b"", b"[" * 50_000, b"\x91" * 50_000, b"\x81\xa1a" * 20_000, b"\xdd\x7f\xff\xff\xff"])
def test_depth_and_claimed_lengths_are_refused(name: str, raw: bytes) -> None:
    DECODERS[name][0](raw)


def test_no_changed_batch_says_more_than_its_bytes_can_hold() -> None:
    rng = random.Random(f"{SEED}/size")
    for raw in recorded("kv_events_*.hex"):
        for mutant in mutants(raw, rng, MUTANTS):
            try:
                batch = decode(mutant)
            except BadFrame:
                continue
            said = sum(len(event.hashes) for event in batch.events if isinstance(event, Stored | Removed))
            said += sum(len(event.tokens) for event in batch.events if isinstance(event, Stored))
            assert said + batch.read + batch.bad + batch.unknown <= len(mutant)


def test_a_stream_of_changed_batches_never_stops_a_source_and_stays_within_its_limit() -> None:
    directory = Directory(BLOCK, 1, source_limit=64)
    directory.add_source(0, MODEL)

    def apply(batch: Batch) -> None:
        directory.apply(0, batch, 1.0)

    stream = Stream("a", apply, lambda: directory.clear(0), first_seq=0, clock=lambda: 1.0)
    rng = random.Random(f"{SEED}/stream")
    payloads = [mutant for raw in recorded("kv_events_*.hex") for mutant in mutants(raw, rng, 60)]
    rng.shuffle(payloads)
    for seq, payload in enumerate(payloads):
        stream.heard(seq, stream.decoded(payload))
    assert stream.sequence.last == len(payloads) - 1
    assert stream.counts.errors == 0
    assert 0 < stream.counts.bad_frames < len(payloads)
    assert directory.stats().engine_hashes <= 128


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(JSON, JSON, JSON)
def test_any_discovery_answer_names_sources_or_none(one: Any, two: Any, three: Any) -> None:
    entry = {"publisher": "zmq", "endpoint": one, "replay_endpoint": two, "topic": three}
    assert isinstance(discovery.vllm_sources({"0": entry, "x": one}, "h"), list)
    ports = {"publisher": "zmq", "endpoint_host": one, "endpoint_port_base": 5, "dp_size": two, "topic": three}
    for answer in ({"kv_events": ports | {"load_endpoint_port_base": three}}, {"kv_events": one}):
        assert isinstance(discovery.sglang_sources(answer, "h"), list)
        assert isinstance(discovery.sglang_load(answer, "h"), tuple)
