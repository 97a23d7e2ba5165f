"""Tables are generated from the committed documents."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.harness.report import PAGES, RESULTS, filled
from bench.harness.tables import cell, flat, heading

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


def compare_document() -> dict:
    rows = [
        {"context": context, "peer": peer, "ms_per_token": ms, "note": note}
        for context in (8192, 65_536)
        for peer, ms, note in (
            ("ours: plain", 20.0, None),
            ("ours: hierarchical offloaded", 12.5, None),
            ("them", None, "skipped: not here"),
        )
    ]
    ratios = {"8,192 tokens: one": 2.0, "65,536 tokens: one": 1.5}
    return {"rows": rows, "ratios": ratios, "environment": ENVIRONMENT}


@pytest.mark.parametrize("path", PAGES, ids=["results", "gpu", "more", "front"])
def test_tables_match_the_documents(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert filled(text, path.parent) == text
    assert text.count("<!-- end -->") == len(re.findall("<!-- table ", text))


def test_every_document_has_a_table() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES[:-1])
    shown = set(re.findall(r"\(([a-z0-9-]+\.json)\)", text))
    assert shown == {path.name for path in RESULTS.glob("*.json")}


SPEC = """<!-- table one.json
columns: context | peer = who | ms_per_token
where: context = 65536 | peer = ours: plain or them
ratios: 65,536
-->
"""


def test_a_table_follows_its_specification_and_names_its_document(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(compare_document()))
    after = filled(f"a\n{SPEC}old\n<!-- end -->\nb", tmp_path.parent, tmp_path)
    assert after.startswith(f"a\n{SPEC}| context | who | ms/token |\n")
    assert after.endswith("([one.json](docs/results/one.json))\n<!-- end -->\nb")
    lines = after.removeprefix(f"a\n{SPEC}").splitlines()
    assert lines[2:4] == ["| 65,536 | ours: plain | 20 |", "| 65,536 | them |  |"]
    assert lines[5] == "- 65,536 tokens: one: **1.50**"
    assert lines[7].startswith(
        "`python -m bench compare` on a <fast> one, 2 threads, 2026-11-20, commit 0123456"
    )
    assert filled(after, tmp_path.parent, tmp_path) == after
    short = "<!-- table one.json\nratios: none\n-->\n<!-- end -->"
    assert "**" not in filled(short, tmp_path, tmp_path)


def test_a_table_may_show_another_machine_beside_its_own(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(compare_document()))
    other = compare_document()
    del other["rows"][1:4]
    for row in other["rows"]:
        row["ms_per_token"] = 7.0
    other["environment"] = {**ENVIRONMENT, "cpu": "another"}
    (tmp_path / "two.json").write_text(json.dumps(other))
    spec = (
        "<!-- table one.json\ncolumns: peer | ms_per_token = one | beside.ms_per_token = two\n"
        "where: context = 65536\nbeside: two.json\nratios: none\n-->\n"
    )
    after = filled(f"{spec}<!-- end -->", tmp_path.parent, tmp_path)
    lines = after.removeprefix(spec).splitlines()
    assert lines[0] == "| peer | one | two |"
    assert lines[2:5] == [
        "| ours: plain | 20 |  |",
        "| ours: hierarchical offloaded | 12.5 | 7 |",
        "| them |  | 7 |",
    ]
    assert lines[6].endswith("(docs/results/one.json))\\")
    assert "on another, 2 threads" in lines[7]


def test_mappings_are_flattened_to_columns_with_headings() -> None:
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


def test_documents_have_no_machine_paths() -> None:
    folder = re.compile(r"(?<![\w+/=])(/(work|tmp|home|root|mnt|Users)/|\.\./shared/)")
    files = [README, *README.parent.joinpath("docs").rglob("*.*")]
    for path in files:
        if path.suffix != ".png":
            assert not folder.search(path.read_text(encoding="utf-8")), path
