"""Every variant answers the same questions and reuses its cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.speed.conversation import TRANSFORMERS, main
from support.engines import DEMO


@pytest.mark.slow
def test_a_row_per_variant(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "conversation.json"
    app.command()(main)
    sizes = ["--context", "300", "--questions", "3", "--new-tokens", "6", "--dtype", "float32"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    variants = ["--variants", "plain@resident,hierarchical@emulated:50", "--temperature", "0"]
    done = CliRunner().invoke(app, [*sizes, *models, *variants, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    plain, hierarchical, transformers = document["rows"]
    assert plain["way"] == "plain, resident"
    assert hierarchical["way"] == "hierarchical, emulated:50"
    assert transformers["way"] == TRANSFORMERS
    for row in document["rows"]:
        assert row["share"] == pytest.approx(row["next_question_s"] / row["first_reading_s"])
        claim = f"{row['way']}: the first question, times a later question"
        assert document["ratios"][claim] == pytest.approx(1 / row["share"])
    assert plain["reused_tokens"] == hierarchical["reused_tokens"] > 300
    assert transformers["reused_tokens"] is None
