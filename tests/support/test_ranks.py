"""The fork server of ranks and commands preloads modules that exist."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from support.ranks import PRELOAD


@pytest.mark.parametrize("name", PRELOAD)
def test_preloaded_modules_exist(name: str) -> None:
    """The fork server silently skips modules that it cannot import."""
    assert find_spec(name)
