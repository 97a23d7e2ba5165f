"""A fixture of GPU tests: on a stand-in, which is slow, few of them warm up."""

from __future__ import annotations

import pytest

from decoding.engine import session_manager
from standin import Machine

# models of other families, and what the warm-up leaves to requests; ranks of their own process, too
WARM = {"test_captured_families", "test_device_memory"}


@pytest.fixture(autouse=True)
def few_warm_ups(
    request: pytest.FixtureRequest, gpu: Machine | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu is not None and request.module.__name__.rpartition(".")[2] not in WARM:
        monkeypatch.setattr(session_manager, "warm_up", lambda runtime: None)
