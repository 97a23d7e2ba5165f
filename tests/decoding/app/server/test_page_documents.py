"""Documents on the chat page: opened, fitted to the context, and read."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, expect

from support.browser import OpenPage, ask, choose
from support.page_stub import Stub

BOOK = "call me Ishmael " * 1000  # 3,000 tokens of 4,096
STATES = "#documents .state"
DROP = """(files) => {
  const dataTransfer = new DataTransfer();
  for (const [name, content] of files) dataTransfer.items.add(new File([content], name));
  document.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));
}"""


def is_idle(stub: Stub) -> bool:
    """Return whether the page has requested nothing more."""
    return stub.chats.empty()


def test_a_single_document_precedes_the_question(page: Page, stub: Stub) -> None:
    """Its text is unchanged, so that KV that the command line has stored is reused."""
    choose(page, ("book.txt", BOOK))
    assert stub.read_documents().contents == [f"{BOOK}\n\n"]
    expect(page.locator(STATES)).to_have_text(["3,000 tokens, read"])
    ask(page, "Who?")
    first = stub.chat()
    assert first.contents == [f"{BOOK}\n\nWho?"]
    first.finish("Ishmael.")
    ask(page, "Why?")
    assert stub.chat().contents == [f"{BOOK}\n\nWho?", "Ishmael.", "Why?"]


def test_several_documents_are_headed_by_their_names(page: Page, stub: Stub) -> None:
    """Those chosen together and one dropped while they are opened all precede the question."""
    stub.can_open.clear()
    choose(page, ("a.txt", "alpha"), ("b.pdf", "beta"))
    page.evaluate(DROP, [["c.txt", "gamma"]])
    expect(page.locator(STATES)).to_have_text(["opening …"] * 3)
    ask(page, "Who?")
    expect(page.locator(".note")).to_have_text("waiting for the documents to be opened")
    stub.can_open.set()
    prefix = "# a.txt\n\nalpha\n\n# b.pdf\n\nbeta\n\n# c.txt\n\ngamma\n\n"
    reading = stub.chat()
    assert reading.contents == [prefix]
    expect(page.locator("#documents li").nth(1)).to_contain_text("page 3 has no text.")
    expect(page.locator(".note")).to_have_text("waiting for the documents to be read")
    reading.finish("x")
    answer = stub.chat()
    assert answer.contents == [f"{prefix}Who?"]
    # one that is removed is not part of the next request, and one that is added is
    answer.finish("They.")
    page.click("[aria-label='Remove b.pdf']")
    assert stub.chat().contents == ["# a.txt\n\nalpha\n\n# c.txt\n\ngamma\n\n"]
    page.click("#undo button")
    assert stub.read_documents().contents == [prefix]
    expect(page.locator(STATES)).to_have_text(["1 token, read"] * 3)


def test_files_that_are_dropped_before_there_is_a_key_are_kept(
    browser: Browser, stub: Stub
) -> None:
    stub.key = "secret"
    with OpenPage(browser, stub.url) as page:
        expect(page.locator("#locked")).to_be_visible()
        page.evaluate(DROP, [["a.txt", "alpha"], ["b.txt", "beta"]])
        expect(page.locator(STATES)).to_have_text(["waiting for the server"] * 2)
        page.reload()
        expect(page.locator(STATES)).to_have_text(["waiting for the server"] * 2)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-error")).to_be_visible()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        assert stub.read_documents().contents == ["# a.txt\n\nalpha\n\n# b.txt\n\nbeta\n\n"]
        expect(page.locator("#locked")).to_be_hidden()
        page.reload()
        stub.read_documents()
        stored = "[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]"
        local, session = page.evaluate(stored)
        assert "secret" not in local
        assert "secret" in session


def test_what_does_not_fit_is_decided_before_it_is_read(page: Page, stub: Stub) -> None:
    choose(page, ("book.txt", BOOK), ("long.txt", "x " * 2000))
    offer = page.locator("#documents li").nth(1).locator(".offer")
    expect(offer).to_contain_text("It has 2,000 tokens, and there is room for 584")
    label = offer.locator("button")
    expect(label).to_have_text(re.compile(r"Use the first 2\d% \(5\d\d tokens\)"))
    ask(page, "Who?")
    expect(page.locator(".note")).to_have_text("waiting: decide about long.txt")
    assert is_idle(stub)
    count = int(re.findall(r"(\d+) tokens", label.inner_text())[0])
    label.click()
    (content,) = stub.read_documents().contents
    assert content.split() == f"# book.txt {BOOK} # long.txt {'x ' * count}".split()
    state = page.locator(STATES).nth(1)
    expect(state).to_have_text(re.compile(rf"the first 2\d%, {count} tokens, read"))
    stub.chat().finish("He.")
    # without the other document there is room for all of it
    page.click("[aria-label='Remove book.txt']")
    assert stub.read_documents().contents == [f"{'x ' * 2000}\n\n"]
    expect(page.locator(STATES)).to_have_text(["2,000 tokens, read"])


def test_a_decision_outlasts_the_removal_of_others_after_it(page: Page, stub: Stub) -> None:
    """And so does the prefill."""
    choose(page, ("long.txt", BOOK * 2))
    page.get_by_role("button", name="Use the first").click()
    reading = stub.chat()
    choose(page, ("scan.broken", "x"))
    expect(page.locator("#documents .error")).to_be_visible()
    page.get_by_role("button", name="Remove scan.broken").click()
    expect(page.locator("#documents li")).to_have_count(1)
    expect(page.locator(STATES)).to_contain_text("being read")
    assert not reading.is_closed.wait(0.2)
    reading.finish("x")
    expect(page.locator(STATES)).to_contain_text("read")


def test_what_fits_another_context_is_decided_again(page: Page, stub: Stub) -> None:
    """Also if the server was restarted while the page was closed."""
    choose(page, ("book.txt", BOOK))
    stub.read_documents()
    stub.context, stub.created = 2048, 2
    page.reload()
    expect(page.locator("#restarted")).to_contain_text("context of 2,048 tokens now")
    expect(page.locator("#documents .offer")).to_contain_text("there is room for 1,792")
    assert is_idle(stub)


def test_a_document_without_room_can_only_be_removed(page: Page, stub: Stub) -> None:
    choose(page, ("book.txt", "x " * 3584))
    stub.read_documents()
    choose(page, ("more.txt", BOOK))
    alert = page.locator("#documents li").nth(1).locator("[role=alert]")
    expect(alert).to_contain_text("Remove it, or one before it.")
    page.click("[aria-label='Remove more.txt']")
    expect(page.locator(STATES)).to_have_text(["3,584 tokens, read"])
    assert is_idle(stub)


def test_an_error_is_shown_at_its_document(page: Page, stub: Stub) -> None:
    """It stays until the document is removed; the others are used."""
    choose(page, ("good.txt", "alpha"), ("bad.broken", "beta"))
    stub.read_documents()
    error = page.locator("#documents li").nth(1).locator(".error[role=alert]")
    expect(error).to_have_text("bad.broken: the file is damaged.")
    sign = "(element) => getComputedStyle(element, '::before').content"
    assert "!" in error.evaluate(sign)
    ask(page, "Who?")
    chat = stub.chat()
    assert chat.contents == ["alpha\n\nWho?"]
    chat.finish("He.")
    expect(page.locator(".answer")).to_have_text("He.")
    expect(error).to_be_visible()
    page.click("[aria-label='Remove bad.broken']")
    expect(error).to_have_count(0)


def test_documents_that_could_not_be_read_are_read_again_on_request(page: Page, stub: Stub) -> None:
    choose(page, ("book.txt", BOOK))
    stub.chat().fail("out of memory.")
    error = page.locator("#reading [role=alert]")
    expect(error).to_contain_text("out of memory.")
    ask(page, "Who?")
    expect(page.locator(".note")).to_have_text("waiting: the documents could not be read")
    expect(error).to_be_visible()
    error.locator("button").click()
    stub.read_documents()
    stub.chat().finish("He.")
    expect(page.locator(".answer")).to_have_text("He.")


def test_progress_is_in_tokens_with_the_time_left(page: Page, stub: Stub) -> None:
    """The server counts units of work, which are tokens times layers."""
    choose(page, ("book.txt", BOOK))
    chat = stub.chat()
    chat.comment(prefill=[0, 36_000])
    shown = page.locator("#progress")
    expect(shown).to_have_text("0 of 3,000 tokens")
    page.wait_for_timeout(1100)
    chat.comment(prefill=[12_000, 36_000])
    expect(shown).to_have_text(re.compile(r"1,000 of 3,000 tokens, about [1-9] s left"))
    assert 0.3 < page.locator("progress").evaluate("(bar) => bar.value") < 0.35
    expect(page).to_have_title(re.compile("33% read"))
    expect(page.locator("#documents .state")).to_have_text("3,000 tokens, being read")
    chat.finish("x")
    expect(shown).to_have_count(0)


def test_documents_on_disk_can_be_chosen(page: Page, stub: Stub) -> None:
    expect(page.locator("#kept")).to_be_hidden()
    text = "it was the best of times"
    stub.kept["f/1"] = {"id": "f/1", "name": "tale.epub", "tokens": 6, "text": text}
    page.reload()
    page.click("#kept summary")
    page.click("#kept >> text=tale.epub")
    assert stub.read_documents().contents == [f"{text}\n\n"]
    expect(page.locator(STATES)).to_have_text(["6 tokens, read"])
