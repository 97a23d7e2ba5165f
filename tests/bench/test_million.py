"""A long text beside equations of their own: they are Llama's, and what is wrong is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from bench.checks import equations, million
from bench.checks.equations import Equations
from support.models import random_tokens


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are merged from several pieces in short texts too."""
    monkeypatch.setattr(equations, "_PIECE", 32)


@torch.inference_mode()
def test_the_equations_are_those_of_transformers(tmp_path: Path) -> None:
    million.write_model(tmp_path, 1 << 20)
    llama, tokens = Equations(tmp_path), random_tokens(90, 2048)
    positions = torch.arange(len(tokens))
    hidden = llama.embed(tokens)
    for layer in range(2):
        k, v = llama.kv(layer, hidden, positions)
        hidden = llama.layer(
            layer,
            hidden,
            positions,
            lambda start, end, k=k, v=v: (k[start:end], v[start:end]),  # type: ignore[misc]
        )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    right = theirs(tokens[None]).logits[0]
    assert million.furthest(llama.logits(hidden), right) < 10
    assert million.furthest(llama.logits(hidden.roll(1, 0)), right) > 1e5


def test_positions_are_of_the_whole_text() -> None:
    at = million.places(5000, 40, 200).tolist()
    assert len(at) == len(set(at)) == 200
    assert {0, 1, 2047, 2048, *range(4960, 5000)} <= set(at)
    assert max(b - a for a, b in pairwise(at)) < 500


class Held:
    """The cache of a text that has layers of keys and values (2, N, D)."""

    def __init__(self, layers: list[Tensor]):
        self._layers = layers
        self.length = layers[0].shape[1]

    def excerpts(self) -> list[Callable[[int, int, int], Tensor]]:
        return [
            lambda _, start, end, layer=layer: layer[:, start:end]  # type: ignore[misc]
            for layer in self._layers
        ]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_row_and_a_wrong_position_are_seen(dtype: str, tmp_path: Path) -> None:
    million.write_model(tmp_path, 1 << 20)
    llama, tokens, at = Equations(tmp_path), random_tokens(600, 2048), torch.arange(600)
    hidden, layers = llama.embed(tokens), list[Tensor]()
    for layer in range(2):
        k, v = llama.kv(layer, hidden, at)
        layers.append(torch.stack((k, v)).to(getattr(torch, dtype)))
        hidden = llama.layer(
            layer,
            hidden,
            at,
            lambda start, end, k=k, v=v: (k[start:end], v[start:end]),  # type: ignore[misc]
        )
    logits = llama.logits(hidden)[590:]
    job = million.Job(tmp_path, 591, 10, 1.0, 64, None)

    def off(layers: list[Tensor], logits: Tensor) -> list[str]:
        session: Any = SimpleNamespace(target=Held(layers))
        rows = million._against_equations(session, tokens.tolist(), logits, job, dtype)
        assert len(rows) == 5
        return [row.what for row in rows if not row.held]

    assert off(layers, logits) == []
    assert off(layers, logits.roll(1, 0)) == ["logits"]
    first, second = layers
    assert off([first.roll(1, 1), second], logits)[:2] == ["keys of layer 0", "values of layer 0"]
    spoilt = second.clone()
    spoilt[0, 0] += 1  # position 0 is among those that are compared
    assert "keys of layer 1" in off([first, spoilt], logits)


def test_what_is_off_is_told() -> None:
    right = million.Row("float32", "logits", 9, 99, 1.0, 100)
    wrong = million.Row("float32", "keys of layer 1", 9, 99, 101.0, 100)
    run = million.Run("float32", 1, 1, 9, 1.0, 1.0, 1.0, 1, 1)
    less = million.Run("float32", 1, 1, 9, 1.0, 1.0, 0.9, 1, 1)
    assert million.complaints([right], [run]) == []
    off, few = million.complaints([right, wrong], [run, less])
    assert "keys of layer 1 are off by 101.0 ppm, and 100 are allowed" in off
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
