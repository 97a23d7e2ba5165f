"""The chat page of a server, used in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from support.chat_model import STORY
from support.serving import SLOW, Serving, serving

# options that keep the browser from connecting to its vendor's hosts
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 30_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    own = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=own, args=list(QUIET))
        except Error as error:
            pytest.skip(f"Chromium is not available: {str(error).splitlines()[0]}")
        yield running
        running.close()


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page") / "run"
    with serving(folder, *model, "--context", "4000") as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Serving) -> Iterator[Page]:
    """Yield the page; the test fails if it raises an error or a request of it fails."""
    with OpenPage(browser, server.url) as shown:
        yield shown


class OpenPage:
    """A context manager that opens the page and checks it for errors."""

    def __init__(self, browser: Browser, url: str):
        self.context = browser.new_context(viewport={"width": 1200, "height": 800})
        self.errors: list[str] = []
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("requestfailed", self._on_failed_request)
        self.page.goto(url)

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert not self.errors

    def _on_failed_request(self, request: object) -> None:
        if "ERR_ABORTED" not in str(request.failure):  # type: ignore[attr-defined]
            self.errors.append(f"{request.url}: {request.failure}")  # type: ignore[attr-defined]


def choose(page: Page, name: str, content: bytes) -> None:
    page.set_input_files(
        "#file", files=[{"name": name, "mimeType": "text/plain", "buffer": content}]
    )


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def answers(page: Page) -> list[str]:
    expect(page.locator("#stop")).to_be_hidden()
    return page.locator("#conversation .answer").all_inner_texts()


def test_questions_about_a_document(page: Page, server: Serving) -> None:
    expect(page.locator("#model")).to_contain_text("model, context of 4,000 tokens")
    choose(page, "story.txt", STORY.encode())
    expect(page.locator("#state")).to_contain_text("tokens, prefilled in")
    expect(page.locator("#name")).to_have_text("story.txt")
    expect(page.locator("#layers i.device")).to_have_count(6)
    page.click("summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "12")
    ask(page, "Who?")
    (first,) = answers(page)
    client = server.client()
    messages = [{"role": "user", "content": f"{STORY}\n\nWho?"}]
    expected = client.chat.completions.create(
        model="model", messages=messages, temperature=0, max_tokens=12
    )
    content = expected.choices[0].message.content
    assert first.split() == content.split()
    # a second question continues the conversation, whose KV is reused
    ask(page, "Why?")
    _, second = answers(page)
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Why?"}]
    expected = client.chat.completions.create(
        model="model", messages=messages, temperature=0, max_tokens=12
    )
    assert second.split() == expected.choices[0].message.content.split()
    expect(page.locator("#counts")).to_contain_text("tokens per verification")
    width = page.evaluate("parseFloat(document.querySelector('#prompt .device').style.width)")
    assert width > 90
    page.click("#clear")
    expect(page.locator("#conversation article")).to_have_count(0)
    page.click("#remove")
    expect(page.locator("#drop")).to_be_visible()


def test_a_document_that_is_too_long_is_truncated(page: Page) -> None:
    choose(page, "long.txt", (STORY * 20).encode())
    expect(page.locator("#state")).to_contain_text("too long: only the first")
    ask(page, "Who?")
    assert answers(page)[0]


def test_a_document_can_be_replaced_during_its_prefill(page: Page) -> None:
    """A conversation can be cleared during an answer; requests have no part of either."""
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    choose(page, "first.txt", (STORY * 20).encode())
    page.click("#remove")
    choose(page, "second.txt", "Call me Ishmael. 😀".encode() * 20)
    expect(page.locator("#state")).to_contain_text("tokens, prefilled in")
    ask(page, "Who?")
    expect(page.locator("#conversation .answer")).to_have_text(re.compile(".{5}", re.DOTALL))
    page.click("#clear")
    ask(page, "Why?")
    assert len(answers(page)) == 1
    assert "Ishmael" in bodies[-1]
    assert "best of times" not in bodies[-1]
    assert "Who?" not in bodies[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\x00x", "not UTF-8"), (b"a\x00b", "not UTF-8"), (b" \n", "is empty")],
)
def test_a_file_without_text_is_refused(content: bytes, message: str, page: Page) -> None:
    choose(page, "broken.txt", content)
    expect(page.locator("#state")).to_contain_text(message)
    page.click("#remove")
    expect(page.locator("#drop")).to_be_visible()


def test_an_answer_can_be_stopped_and_markup_is_escaped(
    browser: Browser, model: tuple[str, ...], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-hard-to-guess")
    with_key = serving(tmp_path, *model, *SLOW, "--api-key-file", str(keys))
    with with_key as server, OpenPage(browser, server.url) as page:
        expect(page.locator("#locked")).to_be_visible()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("invalid API key")
        page.fill("#key", "a-key-that-is-hard-to-guess")
        page.press("#key", "Enter")
        expect(page.locator("#locked")).to_be_hidden()
        page.click("summary")
        page.fill("#max-tokens", "5000")
        ask(page, "<img src=x onerror=alert(1)>Who?")
        expect(page.locator("#conversation .question")).to_have_text(
            "<img src=x onerror=alert(1)>Who?"
        )
        expect(page.locator("#conversation .answer")).to_have_text(re.compile(".{20}", re.DOTALL))
        expect(page.locator("#layers i.host")).to_have_count(6)
        page.click("#stop")
        assert answers(page)[0]
        expect(page.locator("#conversation .note")).to_have_text("stopped")
        server.job.wait_for(lambda: "aborted" in server.log)
