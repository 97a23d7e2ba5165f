"""The demo asks the command in both modes, and compares what they took."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import demo.run


def test_both_modes_are_run_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times, asked = {"retrieval": 5.0, "plain": 40.0}, list[str]()

    def run(command: list[str]) -> SimpleNamespace:
        given = dict(itertools.pairwise(command))
        asked.append(given["--mode"])
        assert given["--model"] == "smollm2"
        assert "--chat" in command
        assert Path(given["--prompt-file"]).read_text().endswith(demo.run.QUESTION)
        stats = {
            "time_to_first_token_s": 1.0,
            "ms_per_token": times[given["--mode"]],
            "tokens_per_verification": 8.0,
            "link_bytes_per_token": 1e6,
            "acceptance": {"target": 0.5, "retrieval": 0.25},
        }
        Path(given["--stats"]).write_text(json.dumps(stats))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(demo.run.subprocess, "run", run)
    monkeypatch.setattr(demo.run, "OUT", tmp_path / "out")
    demo.run.main()
    assert asked == ["retrieval", "plain"]
    out = capsys.readouterr().out
    assert "8.0 times as fast; acceptance rates: target 0.50, retrieval 0.25." in out
