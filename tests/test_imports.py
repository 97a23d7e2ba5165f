"""How the code is laid out: which package may import which, and that no file names a folder of
some machine.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("offload", "parallel", "decoding", "bench")
# Each may import its own layer and those to the right. `decoding` itself is a face: it names what
# it offers, and imports it when it is asked for.
LAYERS = (
    ("bench",),
    ("decoding.app", "decoding.cli", "decoding.__main__"),
    ("decoding.probe",),
    (
        "decoding",
        "decoding.engine",
        "decoding.session",
        "decoding.runtime",
        "decoding.stats",
        "decoding.loading",
    ),
    ("decoding.planning",),
    ("decoding.speculation",),
    ("decoding.option", "decoding.settings", "decoding.planning.defaults"),
    ("parallel",),
    ("offload",),
)
MACHINE_PATH = re.compile(
    r"(?<![\w.~/$}-])/(?:home|root|work|tmp|private|Users|mnt|media|scratch|opt|srv)/\w"
)
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int | None:
    """Return how low a module stands, by the longest name in LAYERS; None if it is not ours."""
    names = module.split(".")
    for length in range(len(names), 0, -1):
        for number, layer in enumerate(LAYERS):
            if ".".join(names[:length]) in layer:
                return number
    return None


def imported(source: str) -> list[tuple[int, str]]:
    """Return (level, dotted name) of every import, wherever it stands. Level 0 is absolute."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append((node.level, node.module or ""))
    return names


def tracked() -> list[Path]:
    """Return what git would commit, as text."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode:
        pytest.skip("not a clone")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


@every_file
def test_imports_go_down_the_layers_only(path: Path) -> None:
    own = layer_of(module_of(path))
    assert own is not None
    for level, name in imported(path.read_text()):
        assert level == 0, f"{path} has a relative import of {name}"
        assert name.split(".")[0] not in ("tests", "demo", "support"), f"{path} imports {name}"
        other = layer_of(name)
        face = path == ROOT / "decoding/__init__.py"
        assert other is None or other >= own or face, f"{path} imports {name}"


def test_no_file_names_a_folder_of_a_machine() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert named == []


def test_a_folder_of_a_machine_is_seen_where_there_is_one() -> None:
    own = "/ho" + "me/somebody"  # in two parts, since this file is searched too
    for text in (f"in {own}/x", f'"{own}/x"', f"={own}"):
        assert MACHINE_PATH.search(text.replace("somebody", "s/omebody") + "/x"), text
    for text in ("/sys/devices/system/node", "/proc/self/maps", "a/tmp/b", "~/work/x", "$X/opt/y"):
        assert not MACHINE_PATH.search(text), text


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
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


def test_layers_are_found_by_the_longest_name() -> None:
    order = (
        "bench.speed.decode",
        "decoding.app.main",
        "decoding.probe.survey",
        "decoding.engine",
        "decoding.planning.profile",
        "decoding.speculation.verify",
        "decoding.option",
        "parallel.ranks.process_group",
        "offload.cache.base",
    )
    assert [layer_of(name) for name in order] == list(range(len(LAYERS)))
    assert layer_of("decoding") == layer_of("decoding.session")
    assert layer_of("torch.nn") is None
