"""Conversations on the chat page: questions in line, answers and their ends, reloads."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Locator, Page, expect

from support.browser import NARROW, OpenPage, ask, choose
from support.page_stub import Stub


def turn(page: Page, question: str) -> Locator:
    """Return the part of the conversation with a question and its answer."""
    return page.locator("article").filter(has=page.get_by_text(question, exact=True))


def press(part: Locator, name: str) -> None:
    part.get_by_role("button", name=name, exact=True).click()


def note(part: Locator) -> Locator:
    return part.locator(".note")


def answer(part: Locator) -> Locator:
    return part.locator(".answer")


def test_questions_wait_in_line(page: Page, stub: Stub) -> None:
    """They can be removed, and are asked in order."""
    for question in ("Who?", "What?", "Why?"):
        ask(page, question)
    chat = stub.chat()
    chat.text("Ishm")
    expect(note(turn(page, "What?"))).to_have_text("waiting in line")
    press(turn(page, "What?"), "Remove")
    expect(page.locator("article")).to_have_count(2)
    assert stub.chats.empty()
    chat.finish("ael.")
    chat = stub.chat()
    assert chat.contents == ["Who?", "Ishmael.", "Why?"]
    chat.finish("To sail.")
    expect(answer(turn(page, "Why?"))).to_have_text("To sail.")
    expect(page.locator("#announcer")).to_have_text("The answer is complete.")


def test_an_aborted_request_of_its_own_does_not_count_as_waiting(page: Page, stub: Stub) -> None:
    ask(page, "Who?")
    chat = stub.chat()
    chat.comment(waiting=2)
    expect(note(turn(page, "Who?"))).to_have_text("waiting: 2 requests ahead")
    chat.text("Ishm")
    ask(page, "Why?")
    press(turn(page, "Who?"), "Stop")
    assert chat.is_closed.wait(10)
    expect(note(turn(page, "Who?"))).to_have_text("stopped")
    chat = stub.chat()
    assert chat.contents == ["Who?", "Ishm", "Why?"]
    chat.comment(waiting=1)
    expect(note(turn(page, "Why?"))).to_have_text("starting …")
    chat.comment(waiting=2)
    expect(note(turn(page, "Why?"))).to_have_text("waiting: 1 request ahead")
    chat.comment(prefill=[3, 10])
    expect(note(turn(page, "Why?"))).to_have_text("reading: 30%")
    chat.comment(waiting=1)
    expect(note(turn(page, "Why?"))).to_have_text("waiting: 1 request ahead")


def test_an_error_of_an_answer_stays_until_it_is_asked_again(page: Page, stub: Stub) -> None:
    """Another question does not remove it; what was written of the answer stays, too."""
    ask(page, "Who?")
    chat = stub.chat()
    chat.text("Ishm")
    chat.fail("the engine failed.")
    failed = turn(page, "Who?")
    expect(failed.locator(".error[role=alert]")).to_have_text("the engine failed.")
    ask(page, "Why?")
    stub.chat().finish("To sail.")
    expect(answer(turn(page, "Why?"))).to_have_text("To sail.")
    expect(failed.locator(".error")).to_be_visible()
    expect(answer(failed)).to_have_text("Ishm")
    press(failed, "Retry")
    expect(failed.locator(".error")).to_have_count(0)
    stub.chat().finish("Ishmael.")
    expect(answer(failed)).to_have_text("Ishmael.")


def test_retry_replaces_an_answer_with_a_new_seed(page: Page, stub: Stub) -> None:
    """The old answer stays until there is a new one, also if the retry is withdrawn or refused."""
    page.click("#settings summary")
    page.fill("#seed", "5")
    page.fill("#top-p", "0.9")
    page.fill("#system", "Be brief.")
    ask(page, "Who?")
    chat = stub.chat()
    assert chat.body["seed"] == 5
    assert chat.body["top_p"] == 0.9
    assert "temperature" not in chat.body
    assert chat.body["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.finish("Ahab.")
    ask(page, "Why?")
    running = stub.chat()
    first = turn(page, "Who?")
    press(first, "Retry")
    press(first, "Remove")
    press(first, "Retry")
    expect(answer(first)).to_have_text("Ahab.")
    stub.refusals.put((400, "the prompt is too long."))
    running.finish("To sail.")
    expect(first.locator(".error")).to_have_text("the prompt is too long.")
    expect(answer(first)).to_have_text("Ahab.")
    press(first, "Retry")
    chat = stub.chat()
    assert chat.body["seed"] == -1
    assert chat.contents == ["Be brief.", "Who?"]
    chat.finish("Ishmael.")
    expect(answer(first)).to_have_text("Ishmael.")
    expect(page.locator(".question")).to_have_text(["Who?", "Why?"])


def test_an_answer_that_was_cut_can_go_on(page: Page, stub: Stub) -> None:
    ask(page, "Who?")
    stub.chat().finish("Call me ", "length")
    part = turn(page, "Who?")
    expect(note(part)).to_have_text("cut: the limit of tokens")
    press(part, "Go on")
    chat = stub.chat()
    assert chat.body["continue_final_message"] is True
    assert chat.body["messages"][-1] == {"role": "assistant", "content": "Call me "}
    chat.finish("Ishmael.", "length", prompt_tokens=4000, new_tokens=96)
    expect(answer(part)).to_have_text("Call me Ishmael.")
    expect(note(part)).to_have_text("cut: the context is full")
    expect(part.get_by_role("button", name="Go on")).to_have_count(0)


def test_an_answer_can_be_copied(browser: Browser, stub: Stub) -> None:
    """A whole answer is copied as Markdown, a block of code without its fence."""
    permissions = ["clipboard-read", "clipboard-write"]
    with OpenPage(browser, stub.url, permissions=permissions) as page:
        ask(page, "Who?")
        source = "**Ishmael**:\n\n```\ncall(me)\n```"
        stub.chat().finish(source)
        press(turn(page, "Who?"), "Copy")
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == source
        press(turn(page, "Who?"), "Copy code")
        expect(page.get_by_role("button", name="Copied")).to_have_count(2)
        assert page.evaluate("navigator.clipboard.readText()") == "call(me)"


def test_an_answer_can_be_copied_without_https(page: Page, stub: Stub) -> None:
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    ask(page, "Who?")
    stub.chat().finish("*Ishmael*")
    press(turn(page, "Who?"), "Copy")
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.focus("#question")
    page.keyboard.press("Control+V")
    expect(page.locator("#question")).to_have_value("*Ishmael*")


def test_a_reload_loses_nothing(page: Page, stub: Stub) -> None:
    page.click("#settings summary")
    page.fill("#temperature", "0.5")
    choose(page, ("a.txt", "alpha"), ("bad.broken", "beta"))
    stub.read_documents()
    ask(page, "Who?")
    stub.chat().finish("Ishmael.")
    ask(page, "What?")
    stub.chat().text("A wha")
    ask(page, "Why?")
    expect(answer(turn(page, "What?"))).to_have_text(re.compile("A wha"))
    page.wait_for_timeout(400)  # an answer is saved every 300 ms
    page.reload()
    expect(page.locator("#temperature")).to_have_value("0.5")
    expect(page.locator("#documents .error")).to_have_text("bad.broken: the file is damaged.")
    interrupted = turn(page, "What?")
    expect(note(interrupted)).to_have_text("interrupted")
    stub.read_documents()
    chat = stub.chat()  # the one that was waiting
    assert chat.contents == ["alpha\n\nWho?", "Ishmael.", "What?", "A wha", "Why?"]
    assert chat.body["temperature"] == 0.5
    chat.finish("To sail.")
    press(interrupted, "Retry")
    stub.chat().finish("A whale.")
    expect(page.locator(".answer")).to_have_text(["Ishmael.", "A whale.", "To sail."])


def test_tabs_have_conversations_of_their_own(browser: Browser, stub: Stub) -> None:
    """A closed tab's conversation is continued by the next one that is opened."""
    opened = OpenPage(browser, stub.url)
    with opened as first:
        ask(first, "Who?")
        stub.chat().finish("Ishmael.")
        expect(first.locator(".answer")).to_have_text("Ishmael.")
        second = opened.open()
        ask(second, "What?")
        stub.chat().finish("A whale.")
        expect(second.locator(".question")).to_have_text(["What?"])
        for tab, question in ((first, "Who?"), (second, "What?")):
            tab.reload()
            expect(tab.locator(".question")).to_have_text([question])
        first.close()
        expect(opened.open().locator(".question")).to_have_text(["Who?"])


def test_a_new_conversation_can_be_undone(page: Page, stub: Stub) -> None:
    clear = page.locator("#clear")
    expect(clear).to_be_disabled()
    choose(page, ("a.txt", "alpha"))
    stub.read_documents()
    ask(page, "Who?")
    chat = stub.chat()
    chat.text("Ishmael.")
    expect(answer(turn(page, "Who?"))).to_have_text(re.compile("Ishmael"))
    clear.click()
    assert chat.is_closed.wait(10)
    expect(page.locator("article")).to_have_count(0)
    page.click("#undo button")
    expect(note(turn(page, "Who?"))).to_have_text("stopped")
    clear.click()
    ask(page, "Why?")  # withdraws the offer
    assert stub.chat().contents == ["alpha\n\nWhy?"]
    expect(page.locator("#undo")).to_be_hidden()


def test_a_server_that_is_gone_is_reported_until_it_is_back(page: Page, stub: Stub) -> None:
    """Questions wait for it; one that was being answered can go on."""
    ask(page, "Who?")
    chat = stub.chat()
    chat.text("Ishm")
    ask(page, "Why?")
    expect(answer(turn(page, "Who?"))).to_have_text(re.compile("Ishm"))
    stub.stop()
    chat.parts.put(None)  # the stream ends without [DONE]
    alert = page.locator("#connection[role=alert]")
    expect(alert).to_contain_text("The server cannot be reached.")
    expect(page.locator("#countdown")).to_have_text(re.compile(r"Trying again in \d s\."))
    expect(note(turn(page, "Who?"))).to_have_text("interrupted")
    expect(note(turn(page, "Why?"))).to_have_text("waiting for the server")
    choose(page, ("a.txt", "alpha"))
    expect(page.locator("#documents .state")).to_have_text("waiting for the server")
    stub.model, stub.created, stub.context = "other", 2, 2000
    stub.start()
    stub.read_documents()
    expect(alert).to_be_hidden()
    expect(page.locator("#restarted")).to_contain_text("other with a context of 2,000 tokens now")
    expect(page.locator("#model")).to_have_text("other, context of 2,000 tokens")
    assert stub.chat().contents == ["alpha\n\nWho?", "Ishm", "Why?"]


def test_questions_wait_while_a_proxy_has_no_server(page: Page, stub: Stub) -> None:
    stub.is_proxy = True
    for question in ("Who?", "Why?"):
        ask(page, question)
    expect(page.locator("#connection")).to_be_visible()
    for question in ("Who?", "Why?"):
        expect(note(turn(page, question))).to_have_text("waiting for the server")
    stub.is_proxy = False
    stub.chat().finish("Ishmael.")
    assert stub.chat().contents == ["Who?", "Ishmael.", "Why?"]


def test_a_reload_before_the_first_token_keeps_the_order(page: Page, stub: Stub) -> None:
    """A new attempt that has no text yet is made again, and the old answer stays until then."""
    ask(page, "Who?")
    stub.chat().finish("Ishmael.")
    turn(page, "Who?").get_by_role("button", name="Retry").click()
    ask(page, "Why?")
    stub.chat()
    page.reload()
    expect(answer(turn(page, "Who?"))).to_have_text("Ishmael.")
    again = stub.chat()
    assert again.contents == ["Who?"]
    again.finish("Ahab.")
    assert stub.chat().contents == ["Who?", "Ahab.", "Why?"]


def test_a_restart_prefills_the_documents_again(page: Page, stub: Stub) -> None:
    choose(page, ("a.txt", "alpha"))
    stub.read_documents()
    expect(page.locator("#documents .state")).to_have_text("1 token, read")
    stub.stop()
    ask(page, "Who?")
    expect(note(turn(page, "Who?"))).to_have_text("waiting for the server")
    stub.created = 2
    stub.start()
    stub.read_documents()
    stub.chat().finish("Ishmael.")
    expect(answer(turn(page, "Who?"))).to_have_text("Ishmael.")
    expect(page.locator("#restarted")).to_be_hidden()


def test_a_full_queue_is_tried_again(page: Page, stub: Stub) -> None:
    stub.refusals.put((429, "the queue is full."))
    ask(page, "Who?")
    expect(note(turn(page, "Who?"))).to_contain_text("too many requests")
    stub.chat().finish("Ishmael.")
    expect(answer(turn(page, "Who?"))).to_have_text("Ishmael.")


def test_numbers_are_in_a_panel_that_is_empty_at_first(page: Page, stub: Stub) -> None:
    expect(page.locator("#counts")).to_be_hidden()
    page.click("#numbers summary")
    expect(page.locator("#no-numbers")).to_be_visible()
    expect(page.locator("#counts")).to_be_hidden()
    ask(page, "Who?")
    stub.chat().finish("Ishmael.")
    expect(page.locator("#counts")).to_contain_text("tokens per verification2.50")
    expect(page.locator("#layers i")).to_have_count(6)
    origins = page.locator("#prompt")
    expect(origins).to_have_attribute(
        "aria-label", "40 tokens reused, 20 loaded from disk, 30 prefilled"
    )
    widths = "(bar) => [...bar.children].map((part) => Math.round(parseFloat(part.style.width)))"
    assert origins.evaluate(widths) == [44, 22, 33]


def test_the_keyboard_suffices(browser: Browser, stub: Stub) -> None:
    """Focus is visible, and follows what a button changes."""
    with OpenPage(browser, stub.url, NARROW) as page:
        page.focus("#question")
        page.keyboard.type("Who?")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("Why?")
        assert page.locator("#question").evaluate("(area) => area.clientHeight") > 50
        page.keyboard.press("Enter")
        chat = stub.chat()
        assert chat.contents == ["Who?\nWhy?"]
        chat.text("Ishm")
        stop = page.get_by_role("button", name="Stop")
        stop.focus()
        assert stop.evaluate("(button) => getComputedStyle(button).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(page.locator(".note")).to_have_text("stopped")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the first button of the stopped answer
        assert stub.chat().body["continue_final_message"] is True
        assert page.evaluate("document.activeElement.tagName") == "ARTICLE"
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") == NARROW[0]
