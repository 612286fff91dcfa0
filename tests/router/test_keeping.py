from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.keeping import StateKeeper
from router.state import load_state
from tests.router.dispatch_bench import Bench


def a_taught_bench() -> Bench:
    """A router that saw a replica answer twice as late as its card would."""
    bench = Bench("A100")
    for turn in range(30):
        now_s = 10.0 * turn
        sent = bench.send(now_s, request_id=f"r-{turn}")
        bench.dispatcher.first_token(sent, now_s + 2.0)
        bench.finish(sent, now_s + 5.0)
    return bench


def a_keeper(path: Path, bench: Bench) -> StateKeeper:
    return StateKeeper(path, bench.dispatcher.learning, lambda: 1000.0, every_s=3600.0)


async def test_what_one_router_learned_the_next_one_starts_with(tmp_path: Path) -> None:
    path, taught, new = tmp_path / "state.json", a_taught_bench(), Bench("A100")
    first = a_keeper(path, taught)
    first.start()
    await first.stop()
    untaught = new.view.coefficients.copy()
    second = a_keeper(path, new)
    second.start()
    await second.stop()
    assert new.view.coefficients.tolist() == taught.view.coefficients.tolist()
    assert new.view.coefficients.tolist() != untaught.tolist()


async def test_a_file_that_holds_something_else_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("shopping list")
    with pytest.raises(ConfigError, match=r"state\.path: .*holds no state"):
        a_keeper(path, Bench("A100")).start()


async def test_a_disk_that_is_gone_costs_the_state_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    keeper = a_keeper(folder / "state.json", Bench("A100"))
    keeper.start()
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        await keeper.stop()
    assert "cannot be written" in caplog.text
    assert not folder.exists()


async def test_the_state_is_written_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    keeper = StateKeeper(path, Bench("A100").dispatcher.learning, lambda: 0.0, every_s=1e-3)
    keeper.start()
    try:
        async with asyncio.timeout(10):
            while load_state(path) is None:  # noqa: ASYNC110  a file has no event to await
                await asyncio.sleep(0.001)
    finally:
        await keeper.stop()
