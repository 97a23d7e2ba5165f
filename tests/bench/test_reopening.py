"""What is opened again is the text that was read, whoever keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.speed.reopening import main
from support.engines import DEMO


@pytest.mark.slow
def test_a_row_for_each_way(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "reopening.json"
    app.command()(main)
    sizes = ["--context", "400", "--new-tokens", "6", "--repeats", "1", "--dtype", "float32"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    ways = ["--ways", "plain@resident,hierarchical@emulated:50"]
    done = CliRunner().invoke(app, [*sizes, *models, *ways, "--output", str(output)])
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    plain, hierarchical, pickled = found["rows"]  # the target is no GGUF file for llama.cpp
    assert plain["way"] == "plain, resident"
    assert hierarchical["way"] == "hierarchical, emulated:50"
    assert pickled["ms_while_saving"] is None
    for row in found["rows"]:
        assert row["same_text"] == 1
        assert row["gigabytes"] > 0
        assert row["share"] == pytest.approx(row["reopened_s"] / row["first_reading_s"])
        claim = f"{row['way']}: the first reading, times reopening it"
        assert found["ratios"][claim] == pytest.approx(1 / row["share"])
    assert plain["ms_while_saving"] > 0
