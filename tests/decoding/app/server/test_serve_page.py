"""The chat page of a server that has a model, used in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, expect

from support.browser import OpenPage, ask, choose
from support.chat_model import STORY
from support.serving import SLOW, Serving, serving


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page")
    cache = ("--prompt-cache", str(folder / "cache"))
    with serving(folder / "run", *model, *cache, "--context", "4000") as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Serving) -> Iterator[Page]:
    """Yield the page; the test fails if a script of it fails."""
    with OpenPage(browser, server.url) as shown:
        yield shown


def read(page: Page) -> None:
    """Wait until the documents are read."""
    expect(page.locator("#documents .state").last).to_have_text(re.compile("tokens, read$"))


def answers(page: Page, count: int) -> list[str]:
    """Wait for as many answers, and return them."""
    expect(page.get_by_role("button", name="Retry")).to_have_count(count)
    return page.locator("#conversation .answer").all_inner_texts()


def sample_greedily(page: Page) -> None:
    page.click("#settings summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "12")


def test_questions_about_a_document(page: Page, server: Serving) -> None:
    expect(page.locator("#model")).to_contain_text("model, context of 4,000 tokens")
    choose(page, ("story.txt", STORY))
    read(page)
    sample_greedily(page)
    ask(page, "Who?")
    (first,) = answers(page, 1)
    client = server.client()
    messages = [{"role": "user", "content": f"{STORY}\n\nWho?"}]
    expected = client.chat.completions.create(
        model="model", messages=messages, temperature=0, max_tokens=12
    )
    content = expected.choices[0].message.content
    assert first.split() == content.split()
    # a second question continues the conversation, whose KV is reused
    ask(page, "Why?")
    _, second = answers(page, 2)
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Why?"}]
    expected = client.chat.completions.create(
        model="model", messages=messages, temperature=0, max_tokens=12
    )
    assert second.split() == expected.choices[0].message.content.split()
    page.click("#numbers summary")
    expect(page.locator("#layers i.device")).to_have_count(6)
    expect(page.locator("#counts")).to_contain_text("tokens per verification")
    assert page.locator("#prompt .device").evaluate("(part) => parseFloat(part.style.width)") > 90
    # its end is the limit of tokens, beyond which it goes on
    expect(page.locator(".note").last).to_have_text("cut: the limit of tokens")
    page.get_by_role("button", name="Go on").last.click()
    expect(page.locator(".answer").last).to_have_text(re.compile(f"^{re.escape(second)}.+", re.S))


def test_a_document_on_disk_needs_no_prefill(page: Page) -> None:
    sample_greedily(page)
    choose(page, ("story.txt", STORY[7:] + "Two cities."))
    read(page)
    ask(page, "Who?")
    first = answers(page, 1)
    page.click("[aria-label='Remove story.txt']")
    page.click("#clear")
    page.click("#kept summary")
    page.locator("#kept button", has_text="the best of times").first.click()
    read(page)
    ask(page, "Who?")
    assert answers(page, 1) == first
    page.click("#numbers summary")
    origins = page.locator("#prompt").get_attribute("aria-label") or ""
    prefilled = re.search(r"(\d+) prefilled", origins)
    assert prefilled is not None
    assert int(prefilled[1]) < 50


def test_a_document_that_is_too_long_is_cut_on_request(page: Page) -> None:
    choose(page, ("long.txt", STORY * 40))
    offer = page.locator(".offer button")
    expect(offer).to_have_text(re.compile(r"Use the first 1\d% \(3,\d\d\d tokens\)"))
    offer.click()
    read(page)
    ask(page, "Who?")
    assert answers(page, 1)[0]


def test_a_document_can_be_replaced_while_it_is_read(page: Page) -> None:
    """A conversation can be cleared during an answer; requests have no part of either."""
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    choose(page, ("first.txt", STORY * 4))
    page.click("#documents button")
    choose(page, ("second.txt", "Call me Ishmael. 😀" * 20))
    read(page)
    ask(page, "Who?")
    expect(page.locator(".answer")).to_have_text(re.compile(".{5}", re.DOTALL))
    page.click("#clear")
    ask(page, "Why?")
    assert len(answers(page, 1)) == 1
    question = next(body for body in reversed(bodies) if "messages" in body)
    assert "Ishmael" in question
    assert "best of times" not in question
    assert "Who?" not in question


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.txt", b"a\x00b", "a.txt: "), ("b.txt", b" \n", "b.txt: "), ("c.pdf", b"x", "c.pdf: ")],
)
def test_a_file_without_text_is_refused(
    name: str, content: bytes, message: str, page: Page
) -> None:
    choose(page, (name, content))
    expect(page.locator("#documents .error[role=alert]")).to_contain_text(message)
    page.click("#documents button")
    expect(page.locator("#documents li")).to_have_count(0)


def test_an_answer_can_be_stopped_and_markup_is_escaped(
    browser: Browser, model: tuple[str, ...], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-hard-to-guess")
    with_key = serving(tmp_path, *model, *SLOW, "--api-key-file", str(keys))
    with with_key as server, OpenPage(browser, server.url) as page:
        expect(page.locator("#locked")).to_be_visible()
        page.fill("#key", "wr\u2022ng")  # no character of a header
        page.press("#key", "Enter")
        expect(page.locator("#key-error")).to_be_visible()
        page.fill("#key", "a-key-that-is-hard-to-guess")
        page.press("#key", "Enter")
        expect(page.locator("#locked")).to_be_hidden()
        page.click("#settings summary")
        page.fill("#max-tokens", "5000")
        ask(page, "<img src=x onerror=alert(1)>Who?")
        expect(page.locator(".question")).to_have_text("<img src=x onerror=alert(1)>Who?")
        expect(page.locator(".answer")).to_have_text(re.compile(".{20}", re.DOTALL))
        page.click("#numbers summary")
        expect(page.locator("#layers i.host")).to_have_count(6)
        page.get_by_role("button", name="Stop").click()
        assert answers(page, 1)[0]
        expect(page.locator("#conversation .note")).to_have_text("stopped")
        server.job.wait_for(lambda: "aborted" in server.log)
