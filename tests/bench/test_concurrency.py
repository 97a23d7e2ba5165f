"""Texts at once and one by one are the same work, counted alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.speed.concurrency import PADDED, main
from support.engines import DEMO
from support.slow import slow_except


@pytest.mark.parametrize("mode", slow_except(["plain", "hierarchical"], 1))
def test_a_row_for_each_way_and_count(mode: str, tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "texts.json"
    app.command()(main)
    sizes = ["--context", "70", "--texts", "3", "--new-tokens", "9", "--concurrency", "1,3"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    ways = ["--modes", mode, "--links", "resident,emulated:50", "--dtype", "float32"]
    done = CliRunner().invoke(app, [*sizes, *models, *ways, "--output", str(output)])
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    alone, together, far, far_together, padded = found["rows"]
    assert [row["concurrency"] for row in found["rows"]] == [1, 3, 1, 3, 3]
    assert alone["way"] == together["way"] == f"{mode}, resident"
    assert far["way"] == far_together["way"] == f"{mode}, emulated:50"
    assert padded["way"] == PADDED
    for row in found["rows"]:
        assert row["tokens_s"] == pytest.approx(3 * 8 / row["decode_s"])
        assert row["documents_hour"] == pytest.approx(
            3600 * 3 / (row["prefill_s"] + row["decode_s"])
        )
    claim = f"{mode}, resident: tokens a second of 3 at once, times those one by one"
    assert found["ratios"][claim] == together["tokens_s"] / alone["tokens_s"]
    assert len(found["ratios"]) == 4
