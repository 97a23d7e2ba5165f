"""What ranks and commands are forked from has imported what they need."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from support.ranks import PRELOAD


@pytest.mark.parametrize("name", PRELOAD)
def test_what_is_imported_beforehand_exists(name: str) -> None:
    """The server of forks leaves out what it cannot import, without a word."""
    assert find_spec(name)
