"""How a measurement is kept: a table for people, and one JSON document with the environment, the
command and the commit.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging


def prepare(threads: int) -> None:
    """Before a measurement: transformers keeps quiet, and torch has this many threads (0: as many
    as it likes).
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


def environment() -> dict[str, Any]:
    """The machine, the versions, the command and the commit of this run."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": COMMIT,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": {
            name: _version(name)
            for name in ("tierforce", "torch", "transformers", "accelerate", "flash-attn")
        },
    }


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows of like keys as a table."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(
            name, justify="right" if isinstance(rows[0][name], int | float) else "left"
        )
    for row in rows:
        table.add_row(
            *(
                "-" if value is None else _short(value) if isinstance(value, float) else str(value)
                for value in row.values()
            )
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def save(path: Path, document: dict[str, Any], quiet: bool = False) -> None:
    """Write the document, and say where unless `quiet`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**document, "environment": environment()}, indent=2) + "\n")
    if not quiet:
        print(f"written to {path}")


def _short(value: float) -> str:
    return f"{value:,.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3f}"


def _module() -> str:
    main = sys.modules["__main__"].__spec__
    return main.name.removesuffix(".__main__") if main else sys.argv[0]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


_CHANGES = "+changes" if _git("status", "--porcelain", "--", ".", ":!docs/results") else ""
COMMIT = _git("rev-parse", "HEAD") + _CHANGES  # when the run began, not when it is saved


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
