"""Tests of whole jobs, short by default and at full length with `--full`:

    python -m pytest tests/system/test_soak.py --full --text middlemarch.txt -s

A full run takes up to an hour, prints its table and writes it to results/, as a benchmark does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.harness.experiment import present, save


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of full runs."""
    parser.addoption("--full", action="store_true", help="Run system tests at full length.")
    parser.addoption("--text", type=Path, help="File or folder; Python's reference by default.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the time limit per test in full runs."""
    if is_full(config):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


def is_full(config: pytest.Config) -> bool:
    """Return whether `--full` is set; pytest only knows it with this folder on its command line."""
    return bool(config.getoption("--full", default=False))


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return is_full(request.config)


@pytest.fixture(scope="session")
def text(request: pytest.FixtureRequest) -> Path | None:
    """Return the path of the long text; None is Python's language reference."""
    path: Path | None = request.config.getoption("--text", default=None)
    return path


@pytest.fixture
def record(full: bool, text: Path | None) -> Callable[..., None]:
    """Return a function that prints and saves a full run: `record(name, title, rows, **more)`."""

    def print_and_save(name: str, title: str, rows: list[dict[str, Any]], **more: Any) -> None:
        if full:
            document = {"rows": rows, **more}
            save(Path("results") / f"{name}.json", document, {"text": text})
            present(title, document)

    return print_and_save
