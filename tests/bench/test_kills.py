"""Kills are counted, and what they cost is found: records lost, twice, or of another text."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from bench.checks.kills import Batch, Row, main, summed


def test_records_that_are_there_twice_or_differ_are_complained_of(tmp_path: Path) -> None:
    batch = Batch([], tmp_path, {"a": "Of a.", "b": "Of b."}, 1.0, 1.0)
    output = tmp_path / "out.jsonl"
    a, b = {"id": "a", "summary": "Of a."}, {"id": "b", "summary": "Of b."}

    def written(*records: dict[str, str], torn: str = "") -> list[str]:
        output.write_text("".join(json.dumps(each) + "\n" for each in records) + torn)
        return batch.complaints(output)

    assert written(a, b) == []
    assert written(a, torn='{"id": "b", "summ') == []
    assert written(a, b, a) == ["a has two records"]
    assert "b has another text" in written(a, {**b, "summary": "Of a."})[0]
    assert "no memory" in written({"id": "a", "error": "no memory"})[0]


def test_kills_of_a_kind_are_one_row() -> None:
    rows = [
        Row("SIGKILL", "rank 1", 1, "137", 0.5),
        Row("SIGINT", "launcher", 1, "130", 0.1),
        Row("SIGKILL", "rank 1", 1, "1", 0.7, 2),
    ]
    assert summed(rows) == [
        Row("SIGINT", "launcher", 1, "130", 0.1),
        Row("SIGKILL", "rank 1", 2, "1, 137", 0.7, 2),
    ]


def test_a_job_survives_a_few_kills(tmp_path: Path) -> None:
    app, output = typer.Typer(), tmp_path / "kills.json"
    app.command()(main)
    sizes = ["--kills", "2", "--documents", "2", "--tokens", "1000", "--new-tokens", "32"]
    done = CliRunner().invoke(app, [*sizes, "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert document["wrong"] == []
    assert sum(row["kills"] for row in document["rows"]) == 2
