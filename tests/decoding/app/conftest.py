"""What tests of conversations share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chatty import chatty, told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options of a model that can be talked to."""
    return chatty(tmp_path_factory.mktemp("chatty") / "model")


@pytest.fixture
def story(tmp_path: Path) -> tuple[str, str]:
    """The options of a document."""
    return told(tmp_path)
