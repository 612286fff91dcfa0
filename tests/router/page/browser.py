"""A headless Chromium driven over its own protocol (CDP): what a person would do, and what came of it.

A client of some dozen commands is less to install than a driver for every browser. No page but those on loopback.
"""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

PATIENCE_S = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: Debian's package is `chromium`")
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}


class Browser:
    """One page. `problems` are errors that its scripts, or its rules on what may be loaded, ran into."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def listen(self) -> None:
        """Take what the browser says, until it is closed."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._waiting.pop(said["id"])
                if not answer.done():  # who asked may have given up
                    answer.set_result(said)
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(f"{said['params']['entry']['text']} {said['params']['entry'].get('url', '')}")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol. AssertionError with what it said when it failed."""
        self._number += 1
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            said = await answer
        assert "error" not in said, f"{method}: {said}"
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE_S):
            await self._loaded.wait()

    async def ask(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression, once it is true; the limit only bounds a failure."""
        try:
            return await self.ask(
                f"new Promise((done) => {{ const look = () => {{ const value = {script};"
                " if (value) done(value); else setTimeout(look, 20); }; look(); })"
            )
        except TimeoutError:
            raise AssertionError(f"never true: {script}") from None

    async def text(self, selector: str) -> str:
        """All text in there, seen or not."""
        return str(await self.ask(f"document.querySelector({selector!r})?.textContent ?? ''"))

    async def click(self, selector: str) -> None:
        """Press the mouse in the middle of it, where something else may lie on top."""
        box = await self.until(
            f"(() => {{ const one = document.querySelector({selector!r}); if (!one) return null;"
            " one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    async def press(self, key: str) -> None:
        code, text = KEYS[key]
        both = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **both)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int, *, scale: float = 1.0, phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the person's system would."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def unnamed(self) -> list[str]:
        """Roles of what a screen reader would come to and find no name for."""
        tree = await self.call("Accessibility.getFullAXTree")
        wanted = {"button", "link", "textbox", "searchbox", "combobox", "image", "img", "region", "dialog", "heading"}
        return [
            f"{node['role']['value']} {node['backendDOMNodeId']}"
            for node in tree["nodes"]
            if not node["ignored"]
            and node["role"]["value"] in wanted
            and not node.get("name", {}).get("value", "").strip()
        ]

    async def picture(self, selector: str | None = None) -> bytes:
        """A screenshot of the window, or of one element, as PNG."""
        clip: dict[str, Any] = {}
        if selector is not None:
            box = await self.ask(
                f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect(); return {{"
                " x: box.x + scrollX - 8, y: box.y + scrollY - 8, width: box.width + 16, height: box.height + 16,"
                " scale: 1}; })()"
            )
            clip = {"clip": box, "captureBeyondViewport": True}
        shot = await self.call("Page.captureScreenshot", format="png", **clip)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def a_browser() -> AsyncIterator[Browser]:
    """A Chromium with one empty page, ended on the way out."""
    assert CHROMIUM is not None, "the test is skipped without"
    with tempfile.TemporaryDirectory(prefix="tfirst-chromium-", ignore_cleanup_errors=True) as folder:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
        arguments += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None, "asked for"
        try:
            port = await _port(process.stderr)
            drained = asyncio.create_task(process.stderr.read())  # it never waits to be read
            async with aiohttp.ClientSession() as session, _page(session, port) as browser:
                yield browser
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
        await drained


@asynccontextmanager
async def _page(session: aiohttp.ClientSession, port: int) -> AsyncIterator[Browser]:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
        (target,) = [each for each in await response.json() if each["type"] == "page"]
    async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 27) as socket:
        browser = Browser(socket)
        listening = asyncio.create_task(browser.listen())
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await browser.call(f"{domain}.enable")
        await browser.call("Emulation.setScrollbarsHidden", hidden=True)  # pictures are of the page alone
        yield browser
        await socket.close()
        await listening


async def _port(said: asyncio.StreamReader) -> int:
    """Where it listens, which it says once it does."""
    async with asyncio.timeout(PATIENCE_S):
        while line := await said.readline():
            if found := re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line):
                return int(found[1])
    raise AssertionError("chromium ended at once")
