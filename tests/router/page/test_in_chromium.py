"""The page as a person meets it, in a headless Chromium: seen, clicked, tabbed through and read aloud."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import nan
from typing import Any

import pytest
import pytest_asyncio

from router.admin import AdminPort
from router.page import Live, Page
from tests.router.dispatch_bench import Bench
from tests.router.page.browser import Browser, a_browser, needs_chromium
from tests.router.page.builders import a_candidate, a_fleet_view, a_replica, a_source, end, placed_nowhere

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONTRAST = """(() => {
  const light = (text) => { const parts = text.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]; };
  const behind = (one) => { for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor; if (!/, 0\\)$/.test(colour)) return colour; } };
  const seen = [...document.querySelectorAll('body *')].filter((one) => one.checkVisibility()
    && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && !one.closest('svg'));
  return seen.map((one) => { const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.textContent.slice(0, 40)]; });
})()"""

NEXT_NEWS = """new Promise((done) => { const source = new EventSource('page/events');
  let left = 3; source.addEventListener('news', () => { if (--left === 0) { source.close(); done(); } }); })"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with a_browser() as one:
        yield one


@asynccontextmanager
async def shown(
    browser: Browser, fleet: Callable[[], dict[str, Any]], live: Live | None = None, *, port: int = 0
) -> AsyncIterator[AdminPort]:
    """The page of a router that believes this of its fleet, open in the browser; no script of it may fail."""
    page = Page(live or Live(), fleet, can_edit=True, period_s=0.2)
    admin = AdminPort(not_ready=lambda: None, metrics_text=lambda: b"", fleet=fleet, page=page.add_to)
    await admin.start("127.0.0.1", port)
    browser.problems.clear()
    await browser.size(1440, 900)
    await browser.prefer("light")
    try:
        await browser.open(f"http://127.0.0.1:{admin.port}/")
        await browser.until("document.querySelector('#replicas tr')")
        yield admin
        assert browser.problems == []
    finally:
        await browser.call("Page.navigate", url="about:blank")
        await admin.stop()


def sixty_four() -> dict[str, Any]:
    """A fleet with all there is to see: one down, one left alone, one drained, one without cache events."""
    replicas = [
        a_replica(f"pool-{index}", card="H20" if index % 2 else "A100", prefill_ahead_s=index / 10, kv_used_share=0.5)
        for index in range(64)
    ]
    replicas[40]["up"] = False
    replicas[50]["health"] = {"state": "open", "trouble": "frozen", "share": 1.0, "failures": 3}
    replicas[60]["drained"] = True
    replicas[62] |= {"prefill_ahead_s": None, "kv_used_share": None, "signal_age_s": None}
    sources = [a_source(one["name"], carrier="none" if one["name"] == "pool-63" else "zmq") for one in replicas]
    return a_fleet_view(*replicas, event_sources=sources)


def some_decisions() -> Live:
    """Of each kind: by every path, late, failed, and refused."""
    live = Live()
    for index, path in enumerate(("local", "host", "disk", "remote", "peer", "recompute")):
        fetched = 0 if path in ("local", "recompute") else 64
        one = a_candidate(path=path, fetch_s=0.1 if fetched else 0.0, fetched_tokens=fetched, first_token_p90_s=0.5)
        others = [a_candidate(replica=f"pool-{row}", expected_s=1.0 + row / 10) for row in range(63)]
        end(live, index, *others, at=1000.0 + index, candidates=[one])
    end(live, 6, at=1007.0, outcome="upstream_error", cause="silent", first_token_s=None)
    end(live, 7, at=1008.0, candidates=[a_candidate(first_token_p90_s=0.31, first_token_p99_s=0.32)])
    placed_nowhere(live, 8, at=1009.0)
    return live


async def choose(browser: Browser, name: str, value: str) -> None:
    """Put a value into a field, as typing or choosing it would."""
    await browser.ask(
        f"(() => {{ const one = document.getElementById({name!r}); one.value = {value!r};"
        " one.dispatchEvent(new Event('input')); })()"
    )


async def names(browser: Browser) -> list[str]:
    """Replicas in the order they are shown."""
    found = await browser.ask(
        "[...document.querySelectorAll('#replicas tr')].map((one) => one.querySelector('th').firstChild.data)"
    )
    return list(found)


async def test_of_sixty_four_replicas_the_ones_in_trouble_are_on_top_and_in_the_sentence(browser: Browser) -> None:
    async with shown(browser, sixty_four):
        assert (await names(browser))[:4] == ["pool-40", "pool-50", "pool-63", "pool-60"]
        assert len(await names(browser)) == 64
        summary = await browser.text("#summary")
        assert "61 of 64 replicas in use, in trouble: pool-40, pool-50" in summary
        assert "does not answer" in await browser.text("#replicas tr:nth-child(1)")
        assert "left alone: frozen" in await browser.text("#replicas tr:nth-child(2)")
        assert await browser.ask("document.title") == "✕ tfirst"


async def test_a_replica_is_found_by_name_card_or_state_and_ordered_by_work(browser: Browser) -> None:
    async with shown(browser, sixty_four):
        await browser.click("#find")
        await browser.type("drained")
        await browser.until("document.querySelectorAll('#replicas tr').length === 1")
        assert await names(browser) == ["pool-60"]
        await choose(browser, "find", "h20")
        await choose(browser, "order", "work")
        assert (await names(browser))[:2] == ["pool-63", "pool-61"]
        assert await browser.text("#fleet-count") == "32 of 64 replicas"


async def test_unknown_is_a_dash_and_never_a_zero(browser: Browser) -> None:
    async with shown(browser, sixty_four):
        row = "[...document.querySelectorAll('#replicas tr')].find((one) => one.textContent.startsWith('pool-62'))"
        assert await browser.ask(f"{row}.querySelector('.work').textContent") == "–"
        assert await browser.ask(f"{row}.querySelector('td.fill').textContent") == "–"
        assert await browser.ask(f"{row}.querySelector('.seen-age').textContent") == "never"


@pytest.mark.parametrize("width", [320, 390, 800, 1440])
async def test_nothing_is_wider_than_the_screen(browser: Browser, width: int) -> None:
    async with shown(browser, sixty_four, some_decisions()):
        await browser.size(width, 800, phone=width < 700)
        await browser.click("#list tr:nth-child(3) button")
        await browser.until("!opened.hidden")
        assert await browser.ask("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [320, 390, 800, 1440])
async def test_names_of_any_length_push_nothing_off_the_screen(browser: Browser, width: int) -> None:
    fleet, live, long = sixty_four(), Live(), "W" * 128
    fleet["replicas"][0]["name"] = fleet["event_sources"][0]["name"] = long
    fleet["replicas"][1]["card"] = long
    for index in range(3):
        one = a_candidate(replica=long)
        end(live, index, at=1000.0 + index, request_id=f"{long[:-1]}{index}", model=long, arm=long, candidates=[one])
    async with shown(browser, lambda: fleet, live):
        await browser.size(width, 800, phone=width < 700)
        await browser.click("#list tr:nth-child(1) button")
        await browser.until("!opened.hidden")
        assert await browser.ask("document.documentElement.scrollWidth") <= width
        if width > 1000:  # else the table may be moved by itself
            held = "document.querySelector('#fleet .scroll')"
            assert await browser.ask(f"{held}.scrollWidth <= {held}.clientWidth")


@pytest.mark.parametrize("width", [320, 390, 1100])
async def test_nothing_lies_on_top_of_something_else(browser: Browser, width: int) -> None:
    async with shown(browser, sixty_four, some_decisions()):
        await browser.size(width, 800, phone=width < 700)
        covered = await browser.ask(
            "[...document.querySelectorAll('tbody tr')].flatMap((row) => { const boxes = [...row.children]"
            ".filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect());"
            " return boxes.filter((one, index) => boxes.slice(index + 1).some((other) => one.left < other.right - 1"
            " && other.left < one.right - 1 && one.top < other.bottom - 1 && other.top < one.bottom - 1)); }).length"
        )
        assert covered == 0


async def test_on_a_phone_what_can_be_pressed_is_large_enough_for_a_finger(browser: Browser) -> None:
    async with shown(browser, sixty_four, some_decisions()):
        await browser.size(390, 844, phone=True)
        small = await browser.ask(
            "[...document.querySelectorAll('button, select, input')].filter((one) => one.checkVisibility()"
            " && one.getBoundingClientRect().height < 24).map((one) => one.outerHTML)"
        )
        assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_stands_out_from_what_is_behind_it(browser: Browser, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: at least 4.5 to 1."""
    async with shown(browser, sixty_four, some_decisions()):
        await browser.prefer(scheme)
        await browser.click("#list tr:nth-child(3) button")
        await browser.until("!opened.hidden")
        ratios = await browser.ask(CONTRAST)
        assert len(ratios) > 300
        assert [one for one in ratios if one[0] < 4.5] == []


async def test_light_and_dark_follow_the_system_until_somebody_chooses(browser: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with shown(browser, sixty_four):
        await browser.prefer("dark")
        dark = await browser.ask(ground)
        await browser.prefer("light")
        light = await browser.ask(ground)
        assert dark != light
        await browser.click("#theme")
        await browser.click("#theme")
        assert (await browser.text("#theme"), await browser.ask(ground)) == ("Theme: dark", dark)
        await browser.click("#theme")
        assert (await browser.text("#theme"), await browser.ask(ground)) == ("Theme: system", light)


async def test_whatever_a_screen_reader_comes_to_has_a_name(browser: Browser) -> None:
    async with shown(browser, sixty_four, some_decisions()):
        await browser.click("#list tr:nth-child(3) button")
        await browser.until("!opened.hidden")
        assert await browser.unnamed() == []
        await browser.click("#replicas tr:first-child button")
        await browser.until("drain.open")
        assert await browser.unnamed() == []
        await browser.press("Escape")


async def test_numbers_that_nobody_knows_are_drawn_as_nothing(browser: Browser) -> None:
    live = Live()
    unknown = a_candidate(**dict.fromkeys(("queue_s", "compute_s", "first_token_s", "expected_s", "pace_s"), nan))
    end(live, candidates=[unknown], first_token_s=None)
    async with shown(browser, sixty_four, live):
        await browser.click("#list button")
        await browser.until("!opened.hidden")
        assert await browser.ask("document.querySelectorAll('#list rect').length") == 0
        words = await browser.ask("document.querySelector('#list svg.bar').getAttribute('aria-label')")
        assert words == "queue –, compute –, first token expected after –"
        assert "NaN" not in await browser.ask("document.body.innerText + document.body.innerHTML")


async def test_a_bar_says_in_words_what_it_shows(browser: Browser) -> None:
    live = Live()
    remote = a_candidate(path="remote", queue_s=0.02, fetch_s=0.1, ready_s=0.1, compute_s=0.03, first_token_s=0.13)
    end(live, candidates=[remote])
    async with shown(browser, sixty_four, live):
        words = await browser.until("document.querySelector('#list svg.bar')?.getAttribute('aria-label')")
    assert words == "queue 20 ms, fetch 100 ms, compute 30 ms, first token expected after 340 ms, came after 350 ms"


async def test_parts_of_a_bar_lie_where_their_times_are_on_the_axis(browser: Browser) -> None:
    live = Live()
    remote = a_candidate(path="remote", queue_s=0.25, fetch_s=0.5, ready_s=0.5, compute_s=0.4, first_token_s=0.9)
    end(live, candidates=[remote], first_token_s=0.75)
    async with shown(browser, sixty_four, live):
        await browser.until("document.querySelector('#list svg.bar')")
        places = await browser.ask(
            "[...document.querySelectorAll('#list svg.bar rect')].map((one) =>"
            " [one.getAttribute('class'), parseFloat(one.getAttribute('x')), parseFloat(one.getAttribute('width'))])"
        )
        assert places == [["queue", 0, 25], ["fetch", 0, 50], ["compute", 50, 40]]
        assert (await browser.text("#axis")).endswith("1 s")


async def test_a_decision_opens_with_the_keyboard_and_escape_gives_the_place_back(browser: Browser) -> None:
    async with shown(browser, sixty_four, some_decisions()):
        await browser.until("document.querySelector('#list button')")
        await browser.ask("which.focus()")
        for _ in range(3):  # past the newest two
            await browser.press("Tab")
        opener = await browser.ask("document.activeElement.textContent")
        await browser.press("Enter")
        await browser.until("!opened.hidden")
        assert await browser.ask("document.activeElement.textContent") == opener == "r-6"
        assert await browser.ask("document.activeElement.tagName") == "H2"
        await browser.press("Escape")
        await browser.until("opened.hidden")
        assert await browser.ask("[document.activeElement.tagName, document.activeElement.textContent]") == [
            "BUTTON",
            "r-6",
        ]


async def test_an_opened_decision_goes_on_to_its_end_without_taking_the_keyboard(browser: Browser) -> None:
    live = Live()
    bench = Bench("A100", "H20", keep=lambda receipt, request, detail: live.ended(receipt, detail))
    live.placed(sent := bench.send(0.0))
    async with shown(browser, sixty_four, live):
        await browser.click("#list button")
        await browser.until("opened.textContent.includes('It waits for its first token.')")
        await browser.ask("document.getElementById('find').focus()")
        bench.dispatcher.first_token(sent, 2.0)
        await browser.until("opened.textContent.includes('It is being answered')")
        assert "under way" in await browser.text("#list")
        bench.finish(sent, 5.0)
        await browser.until("opened.textContent.includes('It ended well')")
        assert "under way" not in await browser.text("#list")
        assert await browser.ask("document.activeElement.id") == "find"


async def test_of_many_candidates_the_first_are_shown_and_the_rest_when_asked_for(browser: Browser) -> None:
    async with shown(browser, sixty_four, some_decisions()):
        await browser.click("#list tr:nth-child(5) button")
        await browser.until("document.querySelectorAll('.candidates tbody tr').length === 12")
        assert "▶ a" in await browser.text(".candidates tbody tr:first-child")
        await browser.click("#opened div > button:not(.head button)")
        await browser.until("document.querySelectorAll('.candidates tbody tr').length === 64")


async def test_only_what_failed_or_was_late_is_listed_when_asked_for(browser: Browser) -> None:
    async with shown(browser, sixty_four, some_decisions()):
        await browser.until("document.querySelectorAll('#list tr').length === 9")
        await choose(browser, "which", "notable")
        rows = await browser.ask("[...document.querySelectorAll('#list tr')].map((one) => one.textContent)")
        assert len(rows) == 3
        assert "no replica" in rows[0]
        assert "late" in rows[1]
        assert "silent" in rows[2]


async def test_a_paused_page_stands_still_and_catches_up(browser: Browser) -> None:
    live = Live()
    end(live, 0, at=1000.0)
    async with shown(browser, sixty_four, live):
        await browser.until("document.querySelectorAll('#list tr').length === 1")
        await browser.click("#pause")
        end(live, 1, at=1010.0)
        await browser.ask(NEXT_NEWS)
        assert await browser.ask("document.querySelectorAll('#list tr').length") == 1
        await browser.click("#pause")
        await browser.until("document.querySelectorAll('#list tr').length === 2")


async def test_rows_stand_still_while_the_mouse_is_on_them(browser: Browser) -> None:
    live = Live()
    end(live, 0, at=1000.0)
    async with shown(browser, sixty_four, live):
        await browser.until("document.querySelectorAll('#list tr').length === 1")
        await browser.hover("#list tr")
        end(live, 1, at=1010.0)
        await browser.ask(NEXT_NEWS)
        assert await browser.ask("document.querySelectorAll('#list tr').length") == 1
        await browser.hover("#summary")
        await browser.until("document.querySelectorAll('#list tr').length === 2")


async def test_names_and_ids_are_text_whatever_is_in_them(browser: Browser) -> None:
    nasty = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    live = Live()
    end(live, 0, a_candidate(replica=nasty), request_id=nasty, model=nasty, candidates=[a_candidate(replica=nasty)])
    async with shown(browser, lambda: a_fleet_view(a_replica(nasty)), live):
        await browser.click("#list button")
        await browser.until("!opened.hidden")
        assert await browser.ask("document.querySelectorAll('img, body script').length") == 0
        assert await browser.text("#opened h2") == nasty
        assert await browser.ask("document.title") == "tfirst"


async def test_when_the_router_is_gone_the_page_says_so_and_begins_anew_with_the_next(browser: Browser) -> None:
    async with shown(browser, sixty_four, some_decisions()) as admin:
        port = admin.port
        await browser.until("document.querySelectorAll('#list tr').length === 9")
        assert await browser.ask("stale.hidden")
        await admin.stop()
        await browser.until("!stale.hidden")
        assert "is old" in await browser.text("#stale")
        page = Page(Live(), sixty_four, can_edit=True, period_s=0.2)
        again = AdminPort(not_ready=lambda: None, metrics_text=lambda: b"", fleet=sixty_four, page=page.add_to)
        await again.start("127.0.0.1", port)
        try:
            await browser.until("stale.hidden")
            await browser.until("document.querySelectorAll('#list tr').length === 0")
        finally:
            browser.problems.clear()  # of connections that were refused meanwhile
            await again.stop()
