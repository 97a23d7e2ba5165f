"""Markdown in answers on the chat page: elements for what is Markdown, text for all else."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect

from support.browser import ask
from support.page_stub import Stub

# elements as (tag text children...) without attributes, which other tests look at
SHAPE = """(root) => {
  const shape = (node) => node.nodeType === Node.TEXT_NODE ? node.data
    : node.tagName === "BUTTON" ? ""
    : `<${node.tagName.toLowerCase()}>${[...node.childNodes].map(shape).join("")}</>`;
  return [...root.childNodes].map(shape).join("");
}"""


def shown(page: Page, stub: Stub, source: str) -> str:
    """Return the shape of an answer."""
    if page.locator("article").count():
        page.click("#clear")
    ask(page, "Who?")
    stub.chat().finish(source)
    expect(page.get_by_role("button", name="Retry")).to_have_count(1)
    return str(page.locator(".answer").evaluate(SHAPE))


CASES = {
    "a *b* **c** ***d*** `e*` ~~f~~": (
        "<p>a <em>b</> <strong>c</> <strong><em>d</></> <code>e*</> <del>f</></>"
    ),
    "__a__ _b_ ``c ` d``": "<p><strong>a</> <em>b</> <code>c ` d</></>",
    "snake_case_name 2 * 3 * 4 **open": "<p>snake_case_name 2 * 3 * 4 **open</>",
    r"\*a\* 5\. \d": r"<p>*a* 5. \d</>",
    "a  \nb\\\nc\n***": "<p>a<br></>b<br></>c</><hr></>",
    "# A\n### B\ntext": "<h4>A</><h4>B</><p>text</>",
    "- a\n- b\n  - c\n\n  d\n- e": "<ul><li>a</><li>b<ul><li>c</></><p>d</></><li>e</></>",
    "- a\n\n- b": "<ul><li><p>a</></><li><p>b</></></>",
    "3. a\n4. b": "<ol><li>a</><li>b</></>",
    "1. a\n   - b\n2. c": "<ol><li>a<ul><li>b</></></><li>c</></>",
    "a\n- b\nc\n\nd": "<p>a</><ul><li>b\nc</></><p>d</>",
    "> a\n> - b\n\nc": "<blockquote><p>a</><ul><li>b</></></><p>c</>",
    "```py\na <b>\n\n# c\n```\nd": "<div><p>py</><pre><code>a <b>\n\n# c</></></><p>d</>",
    "~~~\nopen\n```": "<div><p></><pre><code>open\n```</></></>",
    "|a|b|\n|-|:-:|\n|1|`x\\|y`|\n|2|": (
        "<div><table><thead><tr><th>a</><th>b</></></><tbody>"
        "<tr><td>1</><td><code>x|y</></></><tr><td>2</></></></></>"
    ),
    "a | b\nc": "<p>a | b\nc</>",
    "<b>a</b> &amp; <script>x</script>": "<p><b>a</b> &amp; <script>x</script></>",
}


def test_blocks_and_emphasis(page: Page, stub: Stub) -> None:
    found = {source: shown(page, stub, source) for source in CASES}
    assert found == CASES


def test_links_open_only_the_web_and_mail(page: Page, stub: Stub) -> None:
    sources = (
        "[a](https://example.org/x_(y)_z) <mailto:a@example.org> see http://example.org/b_c. "
        "[https://example.org](https://example.org)"
    )
    shown(page, stub, sources)
    links = page.locator(".answer a")
    hrefs = links.evaluate_all("(links) => links.map((link) => link.href)")
    assert hrefs == [
        "https://example.org/x_(y)_z",
        "mailto:a@example.org",
        "http://example.org/b_c",
        "https://example.org/",
    ]
    for link in links.all():
        assert link.get_attribute("target") == "_blank"
        assert "noopener" in (link.get_attribute("rel") or "")
    for unsafe in ("javascript:alert(1)", "data:text/html,x", "file:///etc/passwd", "/x", "//x.y"):
        source = f"[a]({unsafe})"
        assert shown(page, stub, source) == f"<p>{source}</>"
    image = shown(page, stub, "![a whale](https://example.org/a.png)")
    assert image == "<p><a>a whale</></>"


def test_numbering_and_alignment(page: Page, stub: Stub) -> None:
    shown(page, stub, "3. a\n\n|a|b|\n|-:|:-:|\n|1|2|")
    assert page.locator("ol").get_attribute("start") == "3"
    alignment = "(cells) => cells.map((cell) => getComputedStyle(cell).textAlign)"
    assert page.locator("td").evaluate_all(alignment) == ["right", "center"]


def test_blocks_that_are_complete_stay_while_an_answer_is_written(page: Page, stub: Stub) -> None:
    """A selection in them, or the focus on a button, is not lost."""
    ask(page, "Who?")
    chat = stub.chat()
    chat.text("first\n\n```\ncode\n```\n\nsec")
    button = page.get_by_role("button", name="Copy code")
    button.focus()
    page.locator(".answer p").first.evaluate("(block) => { block.isSame = true; }")
    chat.text("ond\n\nthird")
    expect(page.locator(".answer > p")).to_have_text(["first", "second", "third"])
    assert page.locator(".answer p").first.evaluate("(block) => block.isSame")
    assert button.evaluate("(button) => button === document.activeElement")


def test_no_answer_takes_long_to_render(page: Page, stub: Stub) -> None:
    """Patterns backtrack over what is nearly Markdown, at most quadratically."""
    for unit in ("*", "**a ", "[", "[a](", "`a``", "_a", "> ", "- ", "|-", "# ", "a  ", "\\"):
        source = unit * 3000
        assert shown(page, stub, f"{source}\n{source}x")
    table = f"{'|' * 5000}\n|-|\n" + "|\n" * 5000
    fence, code = f"```{'a' * 30_000}`", f"` {'a' * 30_000}`"
    for source in (table, fence, code, f"a|\n{' ' * 30_000}x|", f"x {'*' * 10_000}"):
        assert shown(page, stub, source)
