"""A long text beside equations of their own: they are Llama's, and what is wrong is told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from bench.checks import million
from bench.checks.equations import Equations
from support.models import random_tokens


@torch.inference_mode()
def test_the_equations_are_those_of_transformers(tmp_path: Path) -> None:
    million.write_model(tmp_path, 1 << 20)
    equations, tokens = Equations(tmp_path), random_tokens(90, 2048)
    positions = torch.arange(len(tokens))
    hidden = equations.embed(tokens)
    for layer in range(2):
        k, v = equations.kv(layer, hidden, positions)
        hidden = equations.layer(
            layer,
            hidden,
            positions,
            lambda start, end, k=k, v=v: (k[start:end], v[start:end]),  # type: ignore[misc]
        )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    right = theirs(tokens[None]).logits[0]
    assert million.furthest(equations.logits(hidden), right) < 10
    assert million.furthest(equations.logits(hidden.roll(1, 0)), right) > 1e5


def test_positions_are_of_the_whole_text() -> None:
    at = million.places(5000, 40, 200).tolist()
    assert len(at) == len(set(at)) == 200
    assert {0, 1, 2047, 2048, *range(4960, 5000)} <= set(at)
    assert max(b - a for a, b in pairwise(at)) < 500


def test_what_is_off_is_told() -> None:
    right = million.Row("float32", "logits", 9, 99, 1.0, 100)
    wrong = million.Row("float32", "keys of layer 1", 9, 99, 101.0, 100)
    run = million.Run("float32", 1, 1, 9, 1.0, 1.0, 1.0, 1, 1)
    less = million.Run("float32", 1, 1, 9, 1.0, 1.0, 0.9, 1, 1)
    assert million.complaints([right], [run]) == []
    off, few = million.complaints([right, wrong], [run, less])
    assert "keys of layer 1 are off by 101 ppm" in off
    assert "0.900 times the bytes" in few


def test_a_short_text_is_what_the_equations_say(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "million.json"
    app.command()(million.main)
    sizes = ["--tokens", "6000", "--new-tokens", "24", "--budget", "512"]
    sizes += ["--dtypes", "float32", "--rate", "10"]
    done = CliRunner().invoke(app, [*sizes, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert document["wrong"] == []
    assert len(document["rows"]) == 5
    (run,) = document["runs"]
    assert run["link_gb"] > run["kv_gb"]
