"""Concurrent and single requests do the same work, with the same metrics."""

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
def test_a_row_per_strategy_and_concurrency(mode: str, tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "concurrency.json"
    app.command()(main)
    sizes = ["--context", "70", "--prompts", "3", "--new-tokens", "9", "--concurrency", "1,3"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    strategies = ["--modes", mode, "--links", "resident,emulated:50", "--dtype", "float32"]
    done = CliRunner().invoke(app, [*sizes, *models, *strategies, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    single, concurrent, offloaded, offloaded_concurrent, padded = document["rows"]
    assert [row["concurrency"] for row in document["rows"]] == [1, 3, 1, 3, 3]
    assert single["way"] == concurrent["way"] == f"{mode}, resident"
    assert offloaded["way"] == offloaded_concurrent["way"] == f"{mode}, emulated:50"
    assert padded["way"] == PADDED
    for row in document["rows"]:
        assert row["tokens_s"] == pytest.approx(3 * 8 / row["decode_s"])
        assert row["documents_hour"] == pytest.approx(
            3600 * 3 / (row["prefill_s"] + row["decode_s"])
        )
    claim = f"{mode}, resident: tokens/s of 3 concurrent requests, times those one at a time"
    assert document["ratios"][claim] == concurrent["tokens_s"] / single["tokens_s"]
    assert len(document["ratios"]) == 4
