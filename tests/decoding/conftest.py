"""Fixtures of most engine tests: a small target, its draft, and a prompt cache folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Folders, Pair


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> Folders:
    return checkpoint(max_position_embeddings=4096), checkpoint(seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def models(folders: Folders) -> Pair:
    return Pair(*folders)


@pytest.fixture
def cache_folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")
