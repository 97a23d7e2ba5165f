"""The demo runs both modes of the command, and compares what their records say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import demo.run
from bench.paper import jobs


def test_both_modes_are_run_and_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"hierarchical": 5.0, "plain": 40.0}

    def summarize(
        folder: Path,
        name: str,
        documents: dict[str, str],
        options: list[str],
        say: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        assert options[options.index("--mode") + 1] == name
        assert len(documents) == 1
        record = {"summary": f"[{name}] it was", "acceptance": {"target": 0.5, "retrieval": 0.25}}
        counts = {"tokens_per_verification": 8.0, "link_bytes_per_token": 1e6}
        return [record | counts | {"time_to_first_token_s": 1.0, "ms_per_token": times[name]}]

    assert demo.run.summarize is jobs.summarize
    monkeypatch.setattr(demo.run, "summarize", summarize)
    demo.run.main()
    out = capsys.readouterr().out
    assert "[plain] it was" in out
    assert "8.0 times as fast; acceptance rates: target 0.50, retrieval 0.25." in out
