"""Every way is asked the same questions, and none reads twice what it has read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.speed.conversation import KEPT, main
from support.engines import DEMO


def test_a_row_for_each_way(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "conversation.json"
    app.command()(main)
    sizes = ["--context", "300", "--questions", "3", "--new-tokens", "6", "--dtype", "float32"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    ways = ["--ways", "plain@resident,hierarchical@emulated:50", "--temperature", "0"]
    done = CliRunner().invoke(app, [*sizes, *models, *ways, "--output", str(output)])
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    plain, hierarchical, kept = found["rows"]
    assert plain["way"] == "plain, resident"
    assert hierarchical["way"] == "hierarchical, emulated:50"
    assert kept["way"] == KEPT
    for row in found["rows"]:
        assert row["share"] == pytest.approx(row["next_question_s"] / row["first_reading_s"])
        claim = f"{row['way']}: the first reading, times a later question"
        assert found["ratios"][claim] == pytest.approx(1 / row["share"])
    assert plain["reused_tokens"] == hierarchical["reused_tokens"] > 300
    assert kept["reused_tokens"] is None
