"""Recipes: each published row has a valid command, a prediction and, if possible, a reduced run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import bench.paper.recipes
from bench.harness.text import documents
from bench.paper.published import RECIPES, Experiment, Recipe
from bench.paper.recipes import main, predict, published_commands
from offload.errors import TierForceError
from support.commands import forked, refused
from support.engines import DEMO

ROWS = [row for recipe in RECIPES.values() for row in recipe.rows]


def run(*arguments: str):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_full_size_commands_are_valid(row: Experiment, tmp_path: Path) -> None:
    """They fail only for the missing checkpoint: options and values are checked before it."""
    (tmp_path / "book.txt").write_text("It was the best of times.")
    replaced = {
        "--model": "/no/such/folder",
        "--input": str(tmp_path),
        "--output": str(tmp_path / "out.jsonl"),
        "--gpus": "1",
    }
    for line in published_commands(row):
        program, *arguments = shlex.split(line)
        assert program == "tierforce"
        for option, value in replaced.items():
            arguments[arguments.index(option) + 1] = value
        assert "/no/such/folder" in refused(forked(tmp_path, *arguments))


def test_predictions_are_close_to_published_times() -> None:
    """With the published settings; the acceptance rate is derived from the first row alone."""
    for row in RECIPES["offload"].rows:
        assert row.published is not None
        assert predict(row, "hierarchical")[0] == pytest.approx(row.published, rel=0.35), row.name
        if row.baseline is None:  # the times of other engines are not predicted
            assert predict(row, "plain")[0] == pytest.approx(row.published_plain, rel=0.1), row.name


def test_on_chip_prediction_excludes_the_link() -> None:
    row = RECIPES["on-chip"].rows[0]
    on_chip, offloaded = (
        predict(experiment, "plain")[0]
        for experiment in (row, replace(row, full=row.full | {"gpu_kv_layers": 0}))
    )
    assert on_chip < 0.05 * offloaded
    assert 1.5 < on_chip / predict(row, "hierarchical")[0] < 4


@pytest.fixture
def two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes with one row that runs here, in forked processes, and one that cannot."""
    small = {
        "context": 600,
        "dtype": "float32",
        "max_new_tokens": 8,
        "device": "cpu",
        "gpus": 1,
        "retrieval_budget": 128,
        "link": "emulated:5",
    }
    full = ROWS[0].full
    rows = (
        Experiment("one", full, small, published=108, published_plain=840, published_gain=7.78),
        Experiment("two", full, None),
    )
    monkeypatch.setattr(bench.paper.recipes, "RECIPES", {"offload": Recipe("about", rows)})

    def fork(command: list[str]) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", "decoding.cli"]
        return SimpleNamespace(returncode=forked(tmp_path, *command[3:]).code)

    monkeypatch.setattr(bench.paper.recipes, "subprocess", SimpleNamespace(run=fork))


@pytest.mark.usefixtures("two_rows")
@pytest.mark.slow
def test_reduced_run_is_labelled(tmp_path: Path) -> None:
    output = tmp_path / "recipe.json"
    target, draft = (str(DEMO / name) for name in ("target", "draft"))
    done = run("offload", "--output", str(output), "--target", target, "--draft", draft)
    assert done.exit_code == 0, done.output
    one, two = json.loads(output.read_text())["rows"]
    assert (one["run"], two["run"]) == ("reduced", "not here")
    assert one["published_ms"] == 108
    assert one["ms_per_token"] > 0
    assert one["gain"] == pytest.approx(one["plain_ms_per_token"] / one["ms_per_token"])
    assert one["tokens_per_verification"] >= 1
    assert two["ms_per_token"] is None
    assert "mode hierarchical, context 600" in one["settings"]
    assert "tierforce summarize --model NousResearch/Yarn-Llama-2-7b-128k" in done.output


@pytest.mark.slow
@pytest.mark.usefixtures("two_rows")
def test_reduced_run_with_longer_contexts(tmp_path: Path) -> None:
    output, longer = tmp_path / "recipe.json", ["--rows", "one", "--stretch", "2"]
    target = ["--target", str(DEMO / "target")]
    done = run("offload", "--output", str(output), *target, *longer)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(output.read_text())["rows"]
    assert "mode retrieval, context 1200" in row["settings"]
    assert "budget 256, link emulated:5, rope yarn:2" in row["settings"]
    assert row["tokens_per_verification"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing is not one of offload"),
        (["offload", "--rows", "unknown"], "no row matches"),
        (
            ["offload", "--rows", "Llama-2-7B, 1x4090", "--data", "/no/such/folder"],
            "/no/such/folder cannot be read",
        ),
    ],
)
def test_invalid_runs_are_reported(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(*arguments, "--output", str(tmp_path / "x.json"))
    assert done.exit_code != 0
    assert message in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output


def test_documents_are_filtered_by_length(tmp_path: Path) -> None:
    for name, size in (("a", 50), ("b", 500), ("c", 600), ("d", 700)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    assert list(documents(str(tmp_path), 2, 100)) == ["b.txt", "c.txt"]
    with pytest.raises(TierForceError, match="no document has 1,000 characters"):
        documents(str(tmp_path), 2, 1000)
    built_in = documents(None, 3, 1)
    assert len(built_in) == 3
    assert len({text[:1000] for text in built_in.values()}) == 3
    with pytest.raises(TierForceError, match="fewer than 10,000,000: name a folder"):
        documents(None, 1, 10_000_000)


def fake_datasets(rows: list[dict[str, Any]]) -> SimpleNamespace:
    def load_dataset(
        name: str, configuration: str | None, split: str, streaming: bool
    ) -> Iterator[dict[str, Any]]:
        assert streaming
        yield from rows

    return SimpleNamespace(load_dataset=load_dataset)


def test_hub_documents_are_deduplicated(monkeypatch: pytest.MonkeyPatch) -> None:
    books = [{"document": {"id": name, "text": name * 300}} for name in ("a", "a", "b", "c")]
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(books))
    assert list(documents("narrativeqa", 2, 100)) == ["a", "b"]
    monkeypatch.setitem(
        sys.modules, "datasets", fake_datasets([{"short_book_title": "x/y", "text": "z" * 300}])
    )
    assert documents("pg19", 2, 100) == {"x-y": "z" * 300}
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets([{"other": 1}]))
    with pytest.raises(TierForceError, match="--data pg19: emozilla/pg19-test cannot be loaded"):
        documents("pg19", 2, 100)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TierForceError, match="needs the package datasets"):
        documents("pg19", 2, 100)
