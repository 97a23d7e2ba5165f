"""The layout of the code: which package may import which, no import cycles, the number of modules
of a package, and no paths of a particular machine.
"""

from __future__ import annotations

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("offload", "parallel", "decoding", "tierforce", "bench")
# A package imports only itself and packages listed before it. A module belongs to the longest of
# these names that is a prefix of its own.
IMPORT_ORDER = (
    ("offload",),
    ("offload.codec",),
    ("offload.memory",),
    ("offload.attention",),
    ("offload.kernels",),
    ("offload.recurrent",),
    ("offload.cache",),
    ("offload.retrieval",),
    ("offload.tiered",),
    ("offload.prefill",),
    ("parallel",),
    ("parallel.ranks",),
    ("parallel.formats", "parallel.formats.gguf"),
    ("parallel.config",),
    ("parallel.weights",),
    ("parallel.model",),
    ("parallel.execution",),
    ("decoding.config",),
    ("decoding.text.tools",),
    ("decoding.text",),
    ("decoding.grammars",),
    ("decoding.speculation",),
    ("decoding.planning",),
    ("decoding.prefix_cache",),
    ("decoding.models",),
    ("decoding.engine",),
    ("decoding",),  # the public names, imported on first use
    ("decoding.probe",),
    ("decoding.app",),
    ("decoding.app.terminal",),
    ("decoding.app.documents.formats",),
    ("decoding.app.documents",),
    ("decoding.app.results",),
    ("decoding.app.hardware",),
    ("decoding.app.batch",),
    ("decoding.app.interactive",),
    ("decoding.app.server.worker",),
    ("decoding.app.server.formats",),
    ("decoding.app.server.http",),
    ("decoding.app.server",),
    ("decoding.app.commands", "decoding.app.options_page"),
    ("decoding.app.main", "decoding.cli"),
    ("tierforce",),
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


def order_of(module: str) -> int | None:
    """Return a module's index in IMPORT_ORDER; None for a module of another project."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for number, names in enumerate(IMPORT_ORDER):
            if ".".join(parts[:length]) in names:
                return number
    return None


def imported(source: str) -> list[tuple[int, str]]:
    """Return (level, dotted name) of every import, also of local ones. Level 0 is absolute.

    For `from a import b`, both a and a.b are returned, since b may be a module.
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
    """Return the tracked text files."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


@every_file
def test_packages_import_only_preceding_ones(path: Path) -> None:
    own = order_of(module_of(path))
    assert own is not None
    for level, name in imported(path.read_text()):
        assert level == 0, f"{path} has a relative import of {name}"
        assert name.split(".")[0] not in ("tests", "demo", "support"), f"{path} imports {name}"
        other = order_of(name)
        is_lazy = path == ROOT / "decoding/__init__.py"
        assert other is None or other <= own or is_lazy, f"{path} imports {name}"


def test_imports_have_no_cycle() -> None:
    modules = {module_of(path): path for path in FILES}
    modules.pop("decoding")  # only imports on first use
    graph = {
        module: {name for _, name in imported(path.read_text()) if name in modules} - {module}
        for module, path in modules.items()
    }
    assert list(TopologicalSorter(graph).static_order())  # CycleError names the cycle


def test_packages_have_a_docstring_and_max_modules() -> None:
    folders = {path.parent for path in FILES}
    for folder in folders:
        init = folder / "__init__.py"
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init} has no docstring"
        modules = [each.name for each in folder.glob("[!_]*.py")]
        assert len(modules) <= MAX_MODULES, f"{folder} has {len(modules)} modules"
    assert {module_of(folder / "__init__.py") for folder in folders} == {
        name for names in IMPORT_ORDER for name in names if (ROOT / name.replace(".", "/")).is_dir()
    }


def test_no_file_contains_a_machine_path() -> None:
    matches = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert matches == []


def test_machine_paths_are_detected() -> None:
    home = "/ho" + "me/somebody"  # in two parts, since this file is searched too
    for text in (f"in {home}/x", f'"{home}/x"', f"={home}"):
        assert MACHINE_PATH.search(text.replace("somebody", "s/omebody") + "/x"), text
    for text in ("/sys/devices/system/node", "/proc/self/maps", "a/tmp/b", "~/work/x", "$X/opt/y"):
        assert not MACHINE_PATH.search(text), text


def test_every_kind_of_import_is_detected() -> None:
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


def test_a_module_belongs_to_the_longest_matching_name() -> None:
    for number, names in enumerate(IMPORT_ORDER):
        for name in names:
            assert order_of(name) == order_of(f"{name}.module") == number
    assert order_of("torch.nn") is None
