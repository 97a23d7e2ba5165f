"""What tests of conversations share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chat_model import chat_model_options, document_options


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options of a model that can be talked to."""
    return chat_model_options(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def story(tmp_path: Path) -> tuple[str, str]:
    """The options of a document."""
    return document_options(tmp_path)
