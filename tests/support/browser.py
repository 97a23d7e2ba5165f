"""Chromium, and the chat page in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

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
PATIENCE_MS = 10_000
WIDE, NARROW = (1280, 800), (390, 844)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser; skip the test without one."""
    own = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=own, args=list(QUIET))
        except Error as error:
            pytest.skip(f"Chromium is not available: {str(error).splitlines()[0]}")
        yield running
        running.close()


class OpenPage:
    """A context manager that opens the page and checks it for errors."""

    def __init__(self, browser: Browser, url: str, size: tuple[int, int] = WIDE, **options: Any):
        """Open `url`; `options` are those of a browser's context."""
        viewport = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(viewport=viewport, **options)
        self.errors: list[str] = []
        expect.set_options(timeout=PATIENCE_MS)
        self._url = url
        self.page = self.open()

    def open(self) -> Page:
        """Return a new tab."""
        page = self.context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._on_message)
        page.on("request", self._on_request)
        page.goto(self._url)
        return page

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert not self.errors

    def _on_message(self, message: Any) -> None:
        if "Content Security Policy" in message.text:
            self.errors.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self._url, "data:")):
            self.errors.append(f"a request to {request.url}")


def choose(page: Page, *files: tuple[str, str | bytes]) -> None:
    """Choose files, each a name and its content."""
    page.set_input_files(
        "#file",
        files=[
            {
                "name": name,
                "mimeType": "application/octet-stream",
                "buffer": content if isinstance(content, bytes) else content.encode(),
            }
            for name, content in files
        ],
    )


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
