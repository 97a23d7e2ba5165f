"""Texts that are to be identical are; what parts from plain decoding is found out."""

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


def test_what_differs_is_told() -> None:
    found = Divergence()
    found.compare_texts([1, 2, 3, 4], [1, 2, 5, 4])
    assert (found.equal, found.first) == ([0.75], [2])
    plain = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    found.compare_laws(plain.clone(), plain)
    assert found.kl[0].tolist() == [0, 0]
    assert found.top[0].all()
    found.compare_laws(torch.tensor([[math.log(3), 0.0], [0.0, 1.0]]), plain)
    first, second = found.kl[1].tolist()
    assert first == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert second > 0
    assert found.top[1].tolist() == [True, False]


@pytest.mark.slow
def test_identical_texts_and_laws_do_not_differ(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "fidelity.json"
    app.command()(main)
    sizes = ["--context", "150", "--new-tokens", "24", "--texts", "1", "--dtypes", "bfloat16"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    law = ["--temperature", "0.8"]
    done = CliRunner().invoke(app, [*sizes, *models, *law, "--output", str(output)])
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
    theirs = [row for row in rows if "transformers" in row["way"]]
    assert [row["equal_tokens"] for row in theirs] == [None, None]
