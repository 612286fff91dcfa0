from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError
from router.safe_urls import SafeAddresses, is_local

OURS = [("0.0.0.0", 30000), ("0.0.0.0", 29000)]
METADATA = [
    "169.254.169.254",
    "169.254.0.1",
    "fe80::1",
    "fe80::1%eth0",
    "fd00:ec2::254",
    "100.100.100.200",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
]


def addresses(*, allow_link_local: bool = False, local: str = "10.0.0.5") -> SafeAddresses:
    return SafeAddresses(OURS, allow_link_local=allow_link_local, local=lambda address: address == local)


@pytest.mark.parametrize("address", METADATA)
def test_link_local_and_metadata_addresses_are_refused_unless_allowed(address: str) -> None:
    assert "allow_link_local" in (addresses().refused(address, 80) or "")
    assert addresses(allow_link_local=True).refused(address, 80) is None


@pytest.mark.parametrize("address", ["10.0.0.6", "127.0.0.1", "::1", "fd00::1", "100.100.100.201", "192.168.1.9"])
def test_any_other_address_may_be_a_replica(address: str) -> None:
    assert addresses().refused(address, 8000) is None


@pytest.mark.parametrize("port", [30000, 29000])
@pytest.mark.parametrize("address", ["10.0.0.5", "0.0.0.0", "::", "::ffff:10.0.0.5"])
def test_the_routers_own_ports_are_refused_at_every_address_of_its_machine(address: str, port: int) -> None:
    assert "this router itself" in (addresses().refused(address, port) or "")
    assert addresses(allow_link_local=True).refused(address, port) is not None
    assert addresses().refused("10.0.0.6", port) is None


def test_a_router_that_listens_on_one_address_may_have_a_replica_beside_it() -> None:
    beside = SafeAddresses([("127.0.0.1", 30000)], allow_link_local=False, local=lambda address: True)
    assert beside.refused("10.0.0.5", 30000) is None
    assert beside.refused("127.0.0.1", 30000) is not None


def test_a_port_the_system_is_to_choose_refuses_nothing() -> None:
    unknown = SafeAddresses([("0.0.0.0", 0)], allow_link_local=False, local=lambda address: True)
    assert unknown.refused("127.0.0.1", 0) is None


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "0xA9FEA9FE", "2852039166", "169.254.43518", "[fe80::1]", "[::ffff:a9fe:a9fe]"]
)
def test_a_url_is_judged_by_its_address_however_it_is_spelled(host: str) -> None:
    with pytest.raises(ConfigError, match="link-local or metadata"):
        addresses().check_urls(["http://10.0.0.6:8000", f"http://{host}:8000"])


@pytest.mark.parametrize("url", ["http://localhost:30000", "http://127.0.0.1:30000", "http://[::1]:30000/"])
def test_a_url_that_is_this_router_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="this router itself"):
        SafeAddresses(OURS, allow_link_local=False).check_urls([url])


def test_a_name_is_judged_when_it_has_an_address() -> None:
    addresses().check_urls(["http://metadata.example:80", "https://replica"])


@given(st.text(max_size=40))
def test_no_address_whatever_it_is_breaks_the_check(text: str) -> None:
    reason = addresses().refused(text, 1)
    assert reason is None or text.partition("%")[0] in reason


def test_an_address_is_local_when_it_can_be_bound_to() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")  # for documentation: nobody has it
    assert not is_local("not an address")
    if socket.has_ipv6:
        assert not is_local("2001:db8::1")
