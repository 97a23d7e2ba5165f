"""Fixtures of conversation tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chat_model import chat_model, story_options


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options that name a model with a chat template."""
    return chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def story(tmp_path: Path) -> tuple[str, str]:
    """The options that name a document."""
    return story_options(tmp_path)
