"""The page and the tables say what the committed documents say, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.harness.report import FILLED, main
from bench.harness.tables import cell, flat, heading
from bench.harness.views import RESULTS, VIEWS, filled, table

README = Path(__file__).parents[2] / "README.md"
ENVIRONMENT = {
    "date": "2026-11-20T10:00:00+00:00",
    "command": "python -m bench compare",
    "commit": "0123456789abcdef",
    "cpu": "a <fast> one",
    "threads": 2,
    "gpus": [],
    "versions": {"torch": "2.13.0", "flash-attn": None},
}


def compared() -> dict:
    rows = [
        {
            "context": context,
            "peer": peer,
            "ms_per_token": ms,
            "link_mb_per_token": link,
            "note": note,
        }
        for context in (8192, 65_536)
        for peer, ms, link, note in (
            ("ours: plain", 20.0, None, None),
            ("ours: hierarchical offloaded", 12.5, 18.25, None),
            ("them", None, None, "skipped: <not> here"),
        )
    ]
    times = {"drafted": 8, "draft_ms": 30.0, "verification_ms": 60.0, "link_ms": 50}
    rounds = [{"context": 8192, "peer": "ours: hierarchical offloaded", **times}]
    return {
        "settings": {"link": "emulated:0.5"},
        "rows": rows,
        "rounds": rounds,
        "environment": ENVIRONMENT,
    }


def run(*arguments: object):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_page_holds_everything_by_itself(tmp_path: Path) -> None:
    document, page = tmp_path / "compare.json", tmp_path / "out" / "page.html"
    document.write_text(json.dumps(compared()))
    assert run(document, "--output", page).exit_code == 0
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', text)  # nothing from elsewhere
    assert len(re.findall('src="data:image/png;base64,', text)) == 3
    assert sorted(path.name for path in page.parent.glob("*.png")) == [
        "compare-link.png",
        "compare-round.png",
        "compare-speed.png",
    ]
    assert "skipped: &lt;not&gt; here" in text
    assert "a &lt;fast&gt; one" in text
    assert "18.2" in text


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"environment": 3}', '{"environment": {"gpus": []}}']
)
def test_a_file_that_is_no_document_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    done = run(tmp_path / "other.json", "--output", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "is not a document that a benchmark wrote" in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("path", FILLED, ids=["results", "front"])
def test_tables_are_those_of_the_documents(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert filled(text, path.parent) == text
    named = re.findall(r"<!-- ([a-z]+) -->", text)
    assert set(named) - {"end"} <= set(VIEWS)
    assert named.count("end") == len(named) // 2


def test_every_document_has_a_table() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\(([a-z0-9-]+\.json)\)", text))
    assert shown == {path.name for path in RESULTS.glob("*.json")}


def test_a_table_has_the_columns_asked_for_and_says_where_it_is_from(tmp_path: Path) -> None:
    (tmp_path / VIEWS["peers"].file).write_text(json.dumps(compared()))
    lines = table(VIEWS["peers"], tmp_path, "docs/results/").splitlines()
    assert lines[0].startswith("| context | peer | ms/token |")
    assert any(line.startswith("| 65,536 | ours: plain | 20 |") for line in lines)
    assert (
        "`python -m bench compare` on a <fast> one, 2 threads, 2026-11-20, commit 0123456"
        in lines[-1]
    )
    assert lines[-1].endswith("([compare-cpu.json](docs/results/compare-cpu.json))")
    before = "a\n<!-- peers -->\nold\n<!-- end -->\nb"
    after = filled(before, tmp_path.parent, tmp_path)
    assert after == "a\n<!-- peers -->\n" + "\n".join(lines) + "\n<!-- end -->\nb"
    short = table(VIEWS["compare"], tmp_path, "").splitlines()
    assert len([line for line in short if line.startswith("| ours")]) == 2


def test_headings_are_words_and_mappings_are_columns() -> None:
    row = {"link_gbps": 2, "rejected": {"16": 0.1}, "overlap_by_age": [1.0], "mean_draft": 3}
    assert [heading(name) for name in flat(row)] == ["link GB/s", "rejected 16", "mean draft"]


def test_cells() -> None:
    values = [None, "text", True, 3, 32_768, 1234.5, 12.34, 1.234, 0.12345, 0.0]
    assert [cell(value) for value in values] == [
        "",
        "text",
        "True",
        "3",
        "32,768",
        "1,234",
        "12.3",
        "1.23",
        "0.123",
        "0",
    ]


def test_no_table_names_a_folder_of_the_machine_it_was_made_on() -> None:
    """Not even in the page, whose pictures may hold any letters."""
    folder = re.compile(r"(?<![\w+/=])(/(work|tmp|home|root|mnt|Users)/|\.\./shared/)")
    texts = [README, *README.parent.joinpath("docs").rglob("*.*")]
    for path in texts:
        if path.suffix != ".png":
            assert not folder.search(path.read_text(encoding="utf-8")), path
