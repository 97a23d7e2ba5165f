"""The page of a server, in a real browser: what a person does, and what is shown."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="no playwright to drive a browser with")
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from support.chat_model import STORY
from support.serving import SLOW, Serving, serving

# without these a browser looks for its maker's hosts
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
            pytest.skip(f"no Chromium to test with: {str(error).splitlines()[0]}")
        yield running
        running.close()


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page") / "run"
    with serving(folder, *model, "--context", "4000") as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Serving) -> Iterator[Page]:
    """The page, on which nothing may go wrong that nobody is told of."""
    with opened(browser, server.url) as shown:
        yield shown


class opened:
    """A page inside a `with` block."""

    def __init__(self, browser: Browser, url: str):
        self.context = browser.new_context(viewport={"width": 1200, "height": 800})
        self.wrong: list[str] = []
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("requestfailed", self._failed)
        self.page.goto(url)

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert not self.wrong

    def _failed(self, request: object) -> None:
        if "ERR_ABORTED" not in str(request.failure):  # type: ignore[attr-defined]
            self.wrong.append(f"{request.url}: {request.failure}")  # type: ignore[attr-defined]


def choose(page: Page, name: str, content: bytes) -> None:
    page.set_input_files(
        "#file", files=[{"name": name, "mimeType": "text/plain", "buffer": content}]
    )


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def answers(page: Page) -> list[str]:
    expect(page.locator("#stop")).to_be_hidden()
    return page.locator("#talk .answer").all_inner_texts()


def test_a_document_is_asked_about(page: Page, server: Serving) -> None:
    expect(page.locator("#model")).to_contain_text("model, up to 4,000 tokens")
    choose(page, "story.txt", STORY.encode())
    expect(page.locator("#state")).to_contain_text("tokens, read in")
    expect(page.locator("#name")).to_have_text("story.txt")
    expect(page.locator("#layers i.device")).to_have_count(6)
    page.click("summary")
    page.fill("#temperature", "0")
    page.fill("#most", "12")
    ask(page, "Who?")
    (first,) = answers(page)
    client = server.client()
    talk = [{"role": "user", "content": f"{STORY}\n\nWho?"}]
    expected = client.chat.completions.create(
        model="model", messages=talk, temperature=0, max_tokens=12
    )
    said = expected.choices[0].message.content
    assert first.split() == said.split()
    # a second question goes on, and what was read is not read again
    ask(page, "Why?")
    _, second = answers(page)
    talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    expected = client.chat.completions.create(
        model="model", messages=talk, temperature=0, max_tokens=12
    )
    assert second.split() == expected.choices[0].message.content.split()
    expect(page.locator("#counts")).to_contain_text("tokens per verification")
    width = page.evaluate("parseFloat(document.querySelector('#prompt .device').style.width)")
    assert width > 90
    page.click("#clear")
    expect(page.locator("#talk article")).to_have_count(0)
    page.click("#remove")
    expect(page.locator("#drop")).to_be_visible()


def test_of_a_document_that_is_too_long_the_beginning_is_read(page: Page) -> None:
    choose(page, "long.txt", (STORY * 20).encode())
    expect(page.locator("#state")).to_contain_text("it is too long: the first")
    ask(page, "Who?")
    assert answers(page)[0]


def test_another_document_takes_the_place_of_one_that_is_being_read(page: Page) -> None:
    """And of its conversation, in the middle of an answer: nothing of it is asked about."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    choose(page, "first.txt", (STORY * 20).encode())
    page.click("#remove")
    choose(page, "second.txt", "Call me Ishmael. 😀".encode() * 20)
    expect(page.locator("#state")).to_contain_text("tokens, read in")
    ask(page, "Who?")
    expect(page.locator("#talk .answer")).to_have_text(re.compile(".{5}", re.DOTALL))
    page.click("#clear")
    ask(page, "Why?")
    assert len(answers(page)) == 1
    assert "Ishmael" in asked[-1]
    assert "best of times" not in asked[-1]
    assert "Who?" not in asked[-1]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe\x00x", "no UTF-8"), (b"a\x00b", "no UTF-8"), (b" \n", "is empty")],
)
def test_what_is_no_text_is_told(content: bytes, said: str, page: Page) -> None:
    choose(page, "broken.txt", content)
    expect(page.locator("#state")).to_contain_text(said)
    page.click("#remove")
    expect(page.locator("#drop")).to_be_visible()


def test_an_answer_is_stopped_and_words_are_no_markup(
    browser: Browser, model: tuple[str, ...], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-nobody-guesses")
    needs_key = serving(tmp_path, *model, *SLOW, "--api-key-file", str(keys))
    with needs_key as server, opened(browser, server.url) as page:
        expect(page.locator("#locked")).to_be_visible()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("that is none of its keys")
        page.fill("#key", "a-key-that-nobody-guesses")
        page.press("#key", "Enter")
        expect(page.locator("#locked")).to_be_hidden()
        page.click("summary")
        page.fill("#most", "5000")
        ask(page, "<img src=x onerror=alert(1)>Who?")
        expect(page.locator("#talk .asked")).to_have_text("<img src=x onerror=alert(1)>Who?")
        expect(page.locator("#talk .answer")).to_have_text(re.compile(".{20}", re.DOTALL))
        expect(page.locator("#layers i.host")).to_have_count(6)
        page.click("#stop")
        assert answers(page)[0]
        expect(page.locator("#talk .note")).to_have_text("stopped")
        server.job.wait_for(lambda: "given up" in server.log)
