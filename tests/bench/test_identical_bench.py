"""Identical texts are counted token by token, on one rank and on two; what parts is told."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from bench.checks.identical import Written, main, row_of
from support.engines import DEMO


def test_what_lies_behind_a_difference_does_not_count() -> None:
    plain = [[1, 2, 3, 4], [5, 6]]
    same = row_of(1, "retrieval", Written(plain, 3.0, 9.0), plain)
    assert (same.tokens, same.equal, same.identical_texts, same.held) == (6, 6, 2, True)
    other = row_of(1, "retrieval", Written([[1, 2, 9, 4], [5, 6]], 3.0, 9.0), plain)
    assert (other.tokens, other.equal, other.identical_texts, other.held) == (6, 4, 1, False)
    longer = row_of(1, "retrieval", Written([[1, 2, 3, 4, 5], [5, 6]], 3.0, 9.0), plain)
    assert not longer.held


def test_every_way_writes_what_plain_decoding_does(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "identical.json"
    app.command()(main)
    sizes = ["--context", "120", "--new-tokens", "20", "--books", "1"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    done = CliRunner().invoke(app, [*sizes, *models, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert document["compared"] == 2 * 4 * 2 * 20
    assert [row["ranks"] for row in document["rows"]] == [1] * 5 + [2] * 5
    assert all(row["equal"] == row["tokens"] == 40 for row in document["rows"])
