"""A fixture of all tests of caches: their small prompts leave for the host in many copies."""

from __future__ import annotations

import pytest

from offload.prefill import layer_major
from offload.tiered import shape, split


@pytest.fixture(autouse=True)
def short_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store each chunk of a prompt when it is computed, and split 16 tokens at a time."""
    monkeypatch.setattr(layer_major, "WRITEBACK_BYTES", 0)
    monkeypatch.setattr(shape, "WRITEBACK_BYTES", 0)
    for module in (shape, split):
        monkeypatch.setattr(module, "SPLIT_TOKENS", 16)
        monkeypatch.setattr(module, "PLAIN_SPLIT_TOKENS", 16)
