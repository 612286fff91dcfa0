from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.actions import Refuse
from router.prompts.wishes import Wishes, wishes_of

TENANT = b"x-tenant"


@dataclass
class AHead:
    fields: dict[bytes, bytes] = field(default_factory=dict)
    client: str = ""

    def get(self, name: bytes) -> bytes | None:
        return self.fields.get(name)


def test_who_wishes_for_nothing_gets_what_everybody_gets() -> None:
    assert wishes_of(AHead(), TENANT) == Wishes(0, "", None)


def test_priority_tenant_and_deadline_are_read_in_their_units() -> None:
    head = AHead({b"x-priority": b" -3", TENANT: b" blue ", b"x-slo-ttft-ms": b"1500"})
    assert wishes_of(head, TENANT) == Wishes(-3, "blue", 1.5)


def test_a_pace_may_be_wished_for_too() -> None:
    assert wishes_of(AHead({b"x-slo-tpot-ms": b"25"}), TENANT) == Wishes(pace_deadline_s=0.025)


@pytest.mark.parametrize(("said", "tenant"), [({}, "key"), ({TENANT: b" "}, "key"), ({TENANT: b"blue"}, "blue")])
def test_a_tenant_that_is_not_named_is_known_by_its_key(said: dict[bytes, bytes], tenant: str) -> None:
    assert wishes_of(AHead(said, client="key"), TENANT) == Wishes(tenant=tenant)


def test_without_a_field_for_it_no_client_names_its_tenant() -> None:
    assert wishes_of(AHead({TENANT: b"blue"}, client="key"), None) == Wishes(tenant="key")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-priority", b"high"),
        (b"x-priority", b"1.5"),
        (b"x-priority", b"9" * 5000),
        (b"x-slo-ttft-ms", b"0"),
        (b"x-slo-ttft-ms", b"-1"),
        (b"x-slo-ttft-ms", b"nan"),
        (b"x-slo-ttft-ms", b"inf"),
        (b"x-slo-ttft-ms", b"1e999"),
        (b"x-slo-ttft-ms", b"soon"),
        (b"x-slo-ttft-ms", b""),
        (b"x-slo-tpot-ms", b"0"),
        (b"x-slo-tpot-ms", b"fast"),
        (TENANT, b"t" * 257),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(name: bytes, value: bytes) -> None:
    refuse = wishes_of(AHead({name: value}), TENANT)
    assert isinstance(refuse, Refuse)
    assert refuse.status == 400


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_are_wishes_or_refused(priority: bytes, tenant: bytes, deadline: bytes) -> None:
    wishes = wishes_of(AHead({b"x-priority": priority, TENANT: tenant, b"x-slo-ttft-ms": deadline}), TENANT)
    assert isinstance(wishes, Refuse) or wishes.deadline_s is None or wishes.deadline_s > 0
