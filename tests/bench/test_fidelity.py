"""Deterministic outputs equal plain decoding's, and divergences are measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.checks.fidelity import Divergence, main
from support.engines import DEMO


def test_divergence_counts_tokens_and_distributions() -> None:
    divergence = Divergence()
    divergence.compare_tokens([1, 2, 3, 4], [1, 2, 5, 4])
    assert (divergence.equal, divergence.first) == ([0.75], [2])
    plain = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    divergence.compare_logits(plain.clone(), plain)
    assert divergence.kl[0].tolist() == [0, 0]
    assert divergence.top[0].all()
    divergence.compare_logits(torch.tensor([[math.log(3), 0.0], [0.0, 1.0]]), plain)
    first, second = divergence.kl[1].tolist()
    assert first == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert second > 0
    assert divergence.top[1].tolist() == [True, False]


@pytest.mark.slow
def test_deterministic_outputs_and_distributions_are_equal(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "fidelity.json"
    app.command()(main)
    sizes = ["--context", "150", "--new-tokens", "24", "--prompts", "1", "--dtypes", "bfloat16"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    sampling = ["--temperature", "0.8"]
    done = CliRunner().invoke(app, [*sizes, *models, *sampling, "--output", str(output)])
    assert done.exit_code == 0, done.output
    rows = json.loads(output.read_text())["rows"]
    deterministic = [row for row in rows if row["deterministic"]]
    assert len(deterministic) == 6
    for row in deterministic:
        assert row["equal_tokens"] == row["same_top"] == 1
        assert row["max_kl"] == 0
        assert row["first_difference"] == 24
    others = [row for row in rows if not row["deterministic"] and row["way"] != "plain"]
    assert any(row["max_kl"] > 0 for row in others)
    scored = [row for row in rows if "transformers" in row["way"]]
    assert [row["equal_tokens"] for row in scored] == [None, None]
