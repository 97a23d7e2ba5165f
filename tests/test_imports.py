"""The packages are a strict chain, bench -> decoding -> parallel -> offload, and their files stay
small.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHAIN = ["bench", "decoding", "parallel", "offload"]  # each may import what is to its right
FILES = [path for package in CHAIN for path in sorted((ROOT / package).rglob("*.py"))]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def imported(source: str) -> list[tuple[int, str]]:
    """(level, dotted name) of every import, wherever in the file it stands. Level 0 is absolute."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


@every_file
def test_imports_go_down_the_chain_only(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    left = CHAIN[: CHAIN.index(parts[0])]
    for level, name in imported(path.read_text()):
        assert name.split(".")[0] not in [*left, "tests", "demo"], f"{path} imports {name}"
        assert level < len(parts), (
            f"{path} reaches out of its package by a relative import of {name}"
        )


@every_file
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_the_walk_sees_every_kind_of_import() -> None:
    source = (
        "import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    from ..i import j\nif "
        "False:\n    import k as l\n"
    )
    assert sorted(imported(source)) == [
        (0, "a.b"),
        (0, "c"),
        (0, "d.e"),
        (0, "k"),
        (1, ""),
        (2, "i"),
    ]
    assert {path.relative_to(ROOT).parts[0] for path in FILES} >= {
        "decoding",
        "parallel",
        "offload",
    }
