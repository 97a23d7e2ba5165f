"""The wheel that setup.py builds is complete, and contains nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.commands import TARGET

ROOT = Path(__file__).parents[1]
PACKAGES = ("offload", "parallel", "decoding", "tierforce")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy, since a build leaves folders next to its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "bench", "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(source), str(source))
    (built,) = source.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-index", "--target", str(folder), str(wheel))
    return folder


def pip(command: str, *arguments: str) -> None:
    """Run pip without dependencies."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps")
    run = subprocess.run(
        [sys.executable, "-m", "pip", command, *quiet, *arguments], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def run_installed(site: Path, folder: Path, *arguments: str) -> str:
    """Run the installed command from another folder, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(site / "bin/tierforce"), *arguments]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_wheel_contains_exactly_our_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == set(PACKAGES)
    assert "decoding/planning/profiles.json" in names
    page = Path("decoding/app/server/http/page")
    assert {str(path.relative_to(ROOT)) for path in (ROOT / page).iterdir()} <= set(names)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    sources = {path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert {Path(name) for name in names if name.endswith(".py")} == sources


@pytest.mark.slow
def test_the_installed_command_runs_in_any_folder(site: Path, tmp_path: Path) -> None:
    code = (
        "import decoding, offload, parallel, tierforce; print(decoding.__file__)\n"
        "assert all(getattr(tierforce, name) for name in tierforce.__all__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    location = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=tmp_path, env=environment
    )
    assert Path(location.strip()).is_relative_to(site)
    assert "summarize" in run_installed(site, tmp_path, "--help")
    assert "1x4090" in run_installed(
        site, tmp_path, "plan", "--model", str(TARGET), "--hardware", "1x4090"
    )
    text = run_installed(
        site,
        tmp_path,
        *("generate", "--model", str(TARGET), "--device", "cpu"),
        *("--prompt", "It was", "--max-new-tokens", "2"),
    )
    assert text.strip()
