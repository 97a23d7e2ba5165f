"""Fixtures of the tests of clients: a model with a chat template, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chat_model import chat_model
from support.clients import SMOLLM2
from support.serving import Serving, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of a model that writes any text."""
    folder = tmp_path_factory.mktemp("server")
    with serving(folder / "run", *chat_model(folder / "model"), "--context", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of a model that answers questions."""
    with serving(tmp_path_factory.mktemp("smollm2") / "run", *SMOLLM2) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home directory of clients."""
    return tmp_path
