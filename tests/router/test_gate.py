from __future__ import annotations

import pytest

from router.gate import Gate
from router.http.head import RequestHead
from router.keys import SecretKey, key_line, new_key, parse_keys
from router.routes import classify

ALICE, ADMIN = new_key(), new_key()
KEYS = parse_keys(key_line("alice", ALICE), "here")


def a_head(path: str = "/v1/completions", method: str = "POST", **fields: str) -> RequestHead:
    headers = [(name.replace("_", "-").encode(), name.encode(), value.encode()) for name, value in fields.items()]
    return RequestHead(method.encode(), path.encode(), path, headers, classify(method.encode(), path))


def status(gate: Gate, head: RequestHead) -> int:
    refuse = gate.admit(head)
    return 200 if refuse is None else refuse.status


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"authorization": f"Bearer {ALICE}"}, 200),
        ({"authorization": f"bearer {ALICE}"}, 200),
        ({"x_api_key": ALICE}, 200),
        ({"authorization": "Basic dTpw", "x_api_key": ALICE}, 200),
        ({"authorization": f"Bearer {ADMIN}"}, 200),
        ({}, 401),
        ({"authorization": ALICE}, 401),
        ({"authorization": f"Bearer {ALICE}x"}, 401),
        ({"authorization": f"Bearer {new_key()}", "x_api_key": ALICE}, 401),
        ({"x_api_key": ""}, 401),
        ({"cookie": f"key={ALICE}"}, 401),
    ],
)
def test_a_key_is_needed_once_there_are_keys(fields: dict[str, str], answer: int) -> None:
    assert status(Gate(keys=KEYS, admin=SecretKey(ADMIN)), a_head(**fields)) == answer
    assert status(Gate(), a_head(**fields)) == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_need_no_key(path: str, method: str) -> None:
    assert status(Gate(keys=KEYS), a_head(path, method)) == 200


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/models", "GET"),
        ("/version", "GET"),
        ("/metrics", "GET"),
        ("/health", "DELETE"),
        ("//health", "GET"),
        ("/health/", "GET"),
        ("/%68ealth", "GET"),
        ("/v1/messages", "POST"),
        ("/anything", "GET"),
    ],
)
def test_everything_else_needs_one_in_every_spelling(path: str, method: str) -> None:
    assert status(Gate(keys=KEYS), a_head(path, method)) == 401


def test_a_request_that_comes_back_is_refused_whatever_its_key() -> None:
    gate, other = Gate(), Gate()
    back = a_head(via=f"1.0 edge, {gate.via.decode()}, 1.1 cache", authorization=f"Bearer {ALICE}")
    assert status(gate, back) == 508
    assert status(gate, a_head("/health", "GET", via=gate.via.decode())) == 508
    assert status(other, back) == 200


def test_a_request_that_is_let_in_says_whose_key_it_carried() -> None:
    gate, head = Gate(keys=KEYS), a_head(authorization=f"Bearer {ALICE}")
    gate.admit(head)
    assert head.client == "alice"


def test_keys_can_be_exchanged_while_requests_come() -> None:
    gate = Gate(keys=KEYS)
    bob = new_key()
    gate.keys = parse_keys(key_line("bob", bob), "here")
    assert status(gate, a_head(authorization=f"Bearer {ALICE}")) == 401
    assert status(gate, a_head(authorization=f"Bearer {bob}")) == 200


def test_what_changes_replicas_needs_the_admin_key_and_is_not_there_without_one() -> None:
    head = a_head("/v1/load_lora_adapter", authorization=f"Bearer {ALICE}")
    right = a_head("/v1/load_lora_adapter", authorization=f"Bearer {ADMIN}")
    without, with_key = Gate(keys=KEYS), Gate(keys=KEYS, admin=SecretKey(ADMIN))
    answers = [gate.admin(asked) for gate in (without, with_key) for asked in (head, right)]
    assert [answer and answer.status for answer in answers] == [404, 404, 401, None]
