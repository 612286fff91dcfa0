from __future__ import annotations

import os
import socket

from loadtest.chaos.sockets import sockets_of


def test_a_connection_is_seen_from_its_beginning_to_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = sockets_of(os.getpid(), port=port)
        client = socket.create_connection(("127.0.0.1", port))
        taken, _ = server.accept()
        during = sockets_of(os.getpid(), port=port)
        client.close()
        assert taken.recv(1) == b""  # the end of the client's side has arrived
        left = sockets_of(os.getpid(), port=port)
        taken.close()
        after = sockets_of(os.getpid(), port=port)
    assert (before.clients, during.clients, left.clients, after.clients) == (0, 1, 1, 0)
    assert left.half_closed == before.half_closed + 1
    assert during.all == before.all + 2
    assert after == before


def test_sockets_of_other_ports_are_no_clients() -> None:
    server, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with server, other, socket.create_connection(server.getsockname()):
        assert sockets_of(os.getpid(), port=other.getsockname()[1]).clients == 0
