"""Fixtures of the chat page's tests: a browser, and a server whose answers the test writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from support.page_stub import Stub


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium; the test is skipped without it."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    from support.browser import chromium

    with chromium() as running:
        yield running


@pytest.fixture
def stub() -> Iterator[Stub]:
    from support.page_stub import stub_server

    with stub_server() as running:
        yield running


@pytest.fixture
def page(browser: Browser, stub: Stub) -> Iterator[Page]:
    """Yield the page of the stub; the test fails if a script of it fails."""
    from support.browser import OpenPage

    with OpenPage(browser, stub.url) as shown:
        yield shown
