"""How the code is laid out: which room may import which, that imports make no circles, how many
modules a room has, and that no file names a folder of some machine.
"""

from __future__ import annotations

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("offload", "parallel", "decoding", "bench")
# A room imports itself and those before it. A module belongs to the room with the longest name that
# its own begins with.
ROOMS = (
    ("offload",),
    ("offload.codec",),
    ("offload.memory",),
    ("offload.attention",),
    ("offload.kernels",),
    ("offload.cache",),
    ("offload.retrieval",),
    ("offload.tiered",),
    ("parallel",),
    ("parallel.ranks",),
    ("parallel.formats",),
    ("parallel.config",),
    ("parallel.model",),
    ("parallel.execution",),
    ("decoding.config",),
    ("decoding.text",),
    ("decoding.speculation",),
    ("decoding.planning",),
    ("decoding.prefix_cache",),
    ("decoding.models",),
    ("decoding.engine",),
    ("decoding",),  # names what the package offers, and imports it on first use
    ("decoding.probe",),
    ("decoding.app",),
    ("decoding.app.terminal",),
    ("decoding.app.hardware",),
    ("decoding.app.batch",),
    ("decoding.app.interactive",),
    ("decoding.app.server.worker",),
    ("decoding.app.server.http",),
    ("decoding.app.server",),
    ("decoding.app.commands", "decoding.app.options_page"),
    ("decoding.app.main", "decoding.cli", "decoding.__main__"),
    ("bench.harness",),
    ("bench.peers",),
    ("bench.speed",),
    ("bench.drafts",),
    ("bench.checks",),
    ("bench.paper",),
    ("bench.gpu",),
    ("bench",),
)
MAX_MODULES = 12
MACHINE_PATH = re.compile(
    r"(?<![\w.~/$}-])/(?:home|root|work|tmp|private|Users|mnt|media|scratch|opt|srv)/\w"
)
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> int | None:
    """Return the place of a module's room in ROOMS; None for a module of another project."""
    names = module.split(".")
    for length in range(len(names), 0, -1):
        for number, room in enumerate(ROOMS):
            if ".".join(names[:length]) in room:
                return number
    return None


def imported(source: str) -> list[tuple[int, str]]:
    """Return (level, dotted name) of every import, wherever it is. Level 0 is absolute.

    `from a import b` may import a module a.b: both names are returned.
    """
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append((node.level, node.module or ""))
            names += [(node.level, f"{node.module or ''}.{alias.name}") for alias in node.names]
    return names


def tracked() -> list[Path]:
    """Return what git would commit, as text."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode:
        pytest.skip("not a clone")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


@every_file
def test_a_room_imports_those_before_it(path: Path) -> None:
    own = room_of(module_of(path))
    assert own is not None
    for level, name in imported(path.read_text()):
        assert level == 0, f"{path} has a relative import of {name}"
        assert name.split(".")[0] not in ("tests", "demo", "support"), f"{path} imports {name}"
        other = room_of(name)
        face = path == ROOT / "decoding/__init__.py"
        assert other is None or other <= own or face, f"{path} imports {name}"


def test_imports_make_no_circle() -> None:
    modules = {module_of(path): path for path in FILES}
    modules.pop("decoding")  # imports on first use only
    graph = {
        module: {name for _, name in imported(path.read_text()) if name in modules} - {module}
        for module, path in modules.items()
    }
    assert list(TopologicalSorter(graph).static_order())  # CycleError names a circle


def test_a_room_says_what_it_is_and_is_no_larger_than_a_dozen_modules() -> None:
    rooms = {path.parent for path in FILES}
    for room in rooms:
        init = room / "__init__.py"
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init} does not say what it is"
        modules = [each.name for each in room.glob("[!_]*.py")]
        assert len(modules) <= MAX_MODULES, f"{room} has {len(modules)} modules"
    assert {module_of(room / "__init__.py") for room in rooms} == {
        name for names in ROOMS for name in names if (ROOT / name.replace(".", "/")).is_dir()
    }


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
        (0, "d.e.f"),
        (0, "k"),
        (1, ""),
        (1, ".g"),
        (2, "i"),
        (2, "i.j"),
    ]
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


def test_rooms_are_found_by_the_longest_name() -> None:
    for number, names in enumerate(ROOMS):
        for name in names:
            assert room_of(name) == room_of(f"{name}.module") == number
    assert room_of("torch.nn") is None
