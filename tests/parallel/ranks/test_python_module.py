"""Processes that run our modules import nothing from the current folder, whatever is in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallel.ranks.python_module import module_arguments


@pytest.mark.parametrize("is_listed", [True, False])
def test_modules_of_the_current_folder_are_not_imported(
    is_listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry of sys.path, as an interactive session has, is the current folder."""
    for name in ("json", "typing", "runpy", "decoding", "typer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    if is_listed:
        monkeypatch.syspath_prepend("")
    command = [sys.executable, *module_arguments("decoding.cli"), "--version"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("tierforce ")
