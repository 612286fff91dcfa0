from __future__ import annotations

import socket
from pathlib import Path

import pytest

from loadtest.chaos import processes
from loadtest.chaos.processes import Command, NotRunning, free_ports


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_listened_on_is_not_free() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert port not in free_ports(5)


async def never() -> bool:
    return False


async def test_a_command_that_ends_instead_of_starting_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = Command("the fleet", ["sim", "--fleet", str(tmp_path / "none.yaml")], log=tmp_path / "log")
    with pytest.raises(NotRunning, match=r"the fleet ended at once: .*none\.yaml"):
        await command.start(never)
    assert await command.end() != 0


async def test_a_command_that_is_never_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_LIMIT_S", 0.0)
    command = Command("the fleet", ["sim", "--port", "0"], log=tmp_path / "log")
    try:
        with pytest.raises(NotRunning, match="was not there within"):
            await command.start(never)
    finally:
        command.kill()
