import asyncio

import pytest

from loadtest.peer_runs.load import play
from loadtest.scenarios.prompts import Row
from tests.loadtest.scenarios.servers import a_server, busy, cut

ROWS = [Row(at_s / 100, 600, 2, [1, 2 + at_s]) for at_s in range(6)]


async def test_every_row_is_sent_with_its_length_and_measured() -> None:
    async with a_server() as server:
        samples = await play(server.url, "m", ROWS, factor=1.0)
    assert [sample.error for sample in samples] == [None] * 6
    assert all(0.0 < (sample.first_token_s or 0.0) <= (sample.end_s or 0.0) for sample in samples)
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in server.bodies} == {("m", 2, True)}
    texts = [body["messages"][0]["content"] for body in server.bodies]
    assert {len(text) for text in texts} == {2400}
    assert len({text[:2048] for text in texts}) == 1
    assert len(set(texts)) == 6


async def test_an_answer_of_another_length_is_an_error() -> None:
    async with a_server() as server:
        (sample,) = await play(server.url, "m", [Row(0.0, 10, 3, [1])], factor=1.0)
    assert sample.error == "2 tokens came, 3 were asked for"


@pytest.mark.parametrize(("write", "said"), [(busy, "503: not today"), (cut, "Client")])
async def test_what_a_server_does_wrong_is_told(write: object, said: str) -> None:
    async with a_server(cut if write is cut else busy) as server:
        samples = await play(server.url, "m", ROWS, factor=1.0)
    assert all(said in (sample.error or "") for sample in samples)


async def test_nobody_there_is_an_error_of_each_request() -> None:
    listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()
    samples = await play(f"http://127.0.0.1:{port}", "m", ROWS[:2], factor=1.0)
    assert all("Connect" in (sample.error or "") for sample in samples)
