"""Reopened documents give the same outputs as prefilled ones, for every engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.speed.reopening import main
from support.engines import DEMO


@pytest.mark.slow
def test_a_row_per_variant(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "reopening.json"
    app.command()(main)
    sizes = ["--context", "400", "--new-tokens", "6", "--repeats", "1", "--dtype", "float32"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    variants = ["--variants", "plain@resident,hierarchical@emulated:50"]
    done = CliRunner().invoke(app, [*sizes, *models, *variants, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    plain, hierarchical, pickled = document[
        "rows"
    ]  # without llama.cpp, as the target is not a GGUF file
    assert plain["way"] == "plain, resident"
    assert hierarchical["way"] == "hierarchical, emulated:50"
    assert pickled["ms_while_saving"] is None
    for row in document["rows"]:
        assert row["same_text"] == 1
        assert row["gigabytes"] > 0
        assert row["share"] == pytest.approx(row["reopened_s"] / row["first_reading_s"])
        claim = f"{row['way']}: prefill, times reopening"
        assert document["ratios"][claim] == pytest.approx(1 / row["share"])
    assert plain["ms_while_saving"] > 0
