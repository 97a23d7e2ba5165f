"""A soak counts what ranks hold and what became of every document; it tells what is amiss."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.checks import soak


def test_what_is_missing_twice_or_not_told_is_complained_of() -> None:
    kinds = Counter({"whole": 2, "empty": 1, "too long": 1})
    right = [
        {"id": "1", "summary": "x", "dropped_tokens": 0},
        {"id": "2", "summary": "x", "dropped_tokens": 0},
        {"id": "3", "error": "empty"},
        {"id": "4", "summary": "x", "dropped_tokens": 7},
    ]
    assert soak.complaints(right, 4, kinds) == []
    assert len(soak.complaints(right[:3], 4, kinds)) == 2
    assert "2 at most" in soak.complaints([*right, right[0]], 4, kinds)[0]
    assert "tell an error" in soak.complaints(right, 4, Counter({"too long": 1}))[0]
    assert "were cut" in soak.complaints(right, 4, Counter({"empty": 1}))[0]


def test_a_rank_that_holds_more_is_told() -> None:
    assert soak.Row(0, 100, 102, 200, 220, 13, 13, 8, 8).held
    assert not soak.Row(0, 100, 103, 200, 200, 13, 13, 8, 8).held
    assert not soak.Row(0, 100, 100, 200, 200, 13, 14, 8, 8).held
    assert not soak.Row(0, 100, 100, 200, 200, 13, 13, 8, 9).held


def test_a_short_soak_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_GROWTH", 1.25)  # memory is settled after fifty documents
    app, output = typer.Typer(), tmp_path / "soak.json"
    app.command()(soak.main)
    sizes = ["--documents", "40", "--early", "20", "--longest", "400", "--new-tokens", "8"]
    done = CliRunner().invoke(app, [*sizes, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert document["wrong"] == []
    assert document["kinds"] == {
        "whole": 36,
        "empty": 1,
        "binary": 1,
        "not UTF-8": 1,
        "too long": 1,
    }
    assert [row["rank"] for row in document["rows"]] == [0, 1]
    for row in document["rows"]:  # nothing was looked at that had ended
        for when in ("early", "late"):
            assert 100 < row[f"{when}_mb"] <= row[f"{when}_most_mb"]
