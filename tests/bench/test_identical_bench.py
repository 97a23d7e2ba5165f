"""Identical texts are counted token by token, on one rank and on two; what parts is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from bench.checks.identical import Written, complaints, main, prompts_of, row_of
from offload.errors import TierForceError
from support.engines import DEMO


def test_what_lies_behind_a_difference_does_not_count() -> None:
    plain = [[1, 2, 3, 4], [5, 6]]
    same = row_of(1, "same", Written(plain, 2, 0.008), plain)
    assert (same.tokens, same.equal, same.identical_texts) == (6, 6, 2)
    assert (same.tokens_per_verification, same.ms_per_token) == (2.0, 2.0)
    other = row_of(2, "other", Written([[1, 2, 9, 4], [5, 6]], 2, 0.008), plain)
    assert (other.tokens, other.equal, other.identical_texts) == (6, 4, 1)
    longer = row_of(1, "longer", Written([[1, 2, 3, 4, 5], [5, 6]], 2, 0.008), plain)
    itself = row_of(1, "plain", Written(plain, 4, 0.008), None)
    first, second = complaints([itself, same, other, longer])
    assert "2 ranks, other: 4 of 6 tokens" in first
    assert "1 ranks, longer: 6 of 6 tokens" in second
    assert "1 of 2 texts are the same" in second


def test_books_too_short_are_refused() -> None:
    class Letters:
        def __call__(self, text: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    assert prompts_of({"a": "." * 30_000 + "abc"}, Letters(), 2) == [[97, 98]]
    with pytest.raises(TierForceError, match="b has 3 tokens behind its first 30000"):
        prompts_of({"b": "." * 30_000 + "abc"}, Letters(), 4)


def test_every_way_writes_what_plain_decoding_does(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "identical.json"
    app.command()(main)
    sizes = ["--context", "120", "--new-tokens", "16", "--books", "1"]
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    done = CliRunner().invoke(app, [*sizes, *models, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert document["compared"] == 2 * 5 * 2 * 16
    assert [row["ranks"] for row in document["rows"]] == [1] * 6 + [2] * 6
    alone, *others = document["rows"][:6]
    assert alone["equal"] is None
    assert all(row["equal"] == row["tokens"] == 32 for row in others)
    assert max(row["tokens_per_verification"] for row in others) > 1.2
