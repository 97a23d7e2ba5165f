"""The chat page is accessible, in every state, size and color scheme, and takes nothing from
elsewhere.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from decoding.app.server.http.page import PAGE, POLICY
from support.browser import NARROW, WIDE, OpenPage, ask, choose
from support.page_stub import Stub

MARKDOWN = (
    "# One\n\n### Two\n\nA *b* **c** `d` [e](https://example.org).\n\n- f\n\n1. g\n\n> h\n\n"
    "|i|j|\n|-|-|\n|k|l|\n\n```py\ncode that is so long that it has to be scrolled, even if wide, "
    "which this is not, since there is more of it to come\n```\n"
)


def check(page: Page) -> None:
    """Assert that axe finds no violation, and that nothing is wider than the page."""
    found = Axe().run(page)["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
    width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_state_violates_a_rule(
    scheme: str, size: tuple[int, int], browser: Browser, stub: Stub
) -> None:
    stub.kept["a"] = {"id": "a", "name": "tale.txt", "tokens": 9, "text": "x"}
    with OpenPage(browser, stub.url, size, color_scheme=scheme) as page:
        expect(page.locator("#kept")).to_be_visible()
        check(page)  # empty
        long = "x" * 60 + ".txt"
        choose(page, (long, "call me Ishmael " * 1100), ("b.pdf", "x " * 900))
        expect(page.locator(".offer")).to_be_visible()
        check(page)  # a decision
        page.click(".offer button")
        stub.chat().comment(prefill=[1, 3])
        expect(page.locator("#progress")).to_contain_text("of")
        check(page)  # documents being read
        page.reload()
        stub.read_documents()
        for question in ("Who?", "Why?", "What?"):
            ask(page, question)
        stub.chat().finish(MARKDOWN, "length")
        chat = stub.chat()
        chat.text(MARKDOWN)
        expect(page.locator(".answer table")).to_have_count(2)
        for summary in page.locator("summary").all():
            summary.click()
        check(page)  # a conversation
        chat.fail("the engine failed.")
        choose(page, ("c.broken", "x"))
        expect(page.locator("#documents .error")).to_be_visible()
        third = stub.chat()
        stub.stop()
        third.parts.put(None)
        expect(page.locator("#connection")).to_be_visible()
        page.click("#clear")
        check(page)  # errors
        stub.key = "secret"
        stub.start()
        expect(page.locator("#locked")).to_be_visible()
        check(page)  # locked


def test_the_policy_allows_only_the_own_script_and_style() -> None:
    policy = POLICY["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    for name in ("script", "style"):
        (sources,) = re.findall(f"{name}-src ([^;]*)", policy)
        assert re.fullmatch("'sha256-[^ ']+'", sources)
    assert not re.search(r"\s(on\w+|style)=|innerHTML|insertAdjacentHTML|document\.write", PAGE)


def test_motion_and_announcements_are_sparing(browser: Browser, stub: Stub) -> None:
    """An answer is announced when it begins and ends, not token by token."""
    with OpenPage(browser, stub.url, reduced_motion="reduce") as page:
        live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
        page.evaluate(
            """() => {
              window.announced = [];
              const node = document.querySelector("#announcer");
              new MutationObserver(() => window.announced.push(node.textContent))
                .observe(node, {childList: true});
            }"""
        )
        ask(page, "Who?")
        chat = stub.chat()
        for part in ("a", "b", "c"):
            chat.text(part)
            expect(page.locator(".answer")).to_contain_text(part)
        assert live.filter(has=page.locator(".answer")).count() == 0
        chat.finish()
        expect(page.locator("#announcer")).to_have_text("The answer is complete.")
        assert page.evaluate("window.announced") == [
            "The question is being answered.",
            "The answer is complete.",
        ]
        assert page.evaluate("document.getAnimations().length") == 0
