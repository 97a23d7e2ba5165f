"""How a measurement is kept: a table for people, and one JSON document.

The document also has the options, the command, the machine and the commit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import typer
from transformers.utils import logging

from bench.harness.tables import show
from bench.harness.text import BUILT_IN, long_text
from offload.errors import TierForceError

_OPTIONS: dict[str, Any] = {}  # of the benchmark that runs


def benchmark(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command, so that the document it saves says which options it ran with.

    What it raises as a TierForceError is one line for the person who typed it.
    """
    signature = inspect.signature(main)

    @wraps(main)
    def command(*args: Any, **options: Any) -> None:
        cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        _OPTIONS.clear()
        _OPTIONS.update(bound.arguments)
        try:
            main(*args, **options)
        except TierForceError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        finally:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(threads)

    return command


def prepare(threads: int) -> None:
    """Keep transformers quiet, and give this process so many cores and threads (0: as it has)."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        torch.set_num_threads(threads)


def settings() -> dict[str, Any]:
    """Return the options of the benchmark that runs, paths by their names, texts with a digest."""
    named = {
        name: _name(each) if isinstance(each, Path) or os.sep in str(each) else each
        for name, each in _OPTIONS.items()
    }
    if "text" in _OPTIONS:
        text = long_text(_OPTIONS["text"])
        named["text"] = named["text"] or BUILT_IN
        named["text_sha256"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return named


def environment() -> dict[str, Any]:
    """Return the machine, the versions, the command and the commit of this run."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
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


def publish(
    output: Path,
    title: str,
    rows: Sequence[Any],
    ratios: Mapping[str, float] | None = None,
    **more: Any,
) -> None:
    """Print rows as a table and their ratios as lines; keep both, and whatever else there is."""
    show(title, rows)
    for claim, value in (ratios or {}).items():
        print(f"{claim}: {value:.2f}")
    save(output, {"rows": rows} | ({} if ratios is None else {"ratios": ratios}) | more)


def save(path: Path, document: dict[str, Any], quiet: bool = False) -> None:
    """Write the document, and say where unless `quiet`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"settings": settings(), **document, "environment": environment()}
    path.write_text(json.dumps(kept, indent=2, default=asdict) + "\n")
    if not quiet:
        print(f"written to {path}")


def _command() -> str:
    """Return what was typed, with the name of a file or folder in place of its path."""
    main = sys.modules["__main__"].__spec__
    module = main.name.removesuffix(".__main__") if main else sys.argv[0]
    return shlex.join(
        ["python", "-m", _without_folders(module), *map(_without_folders, sys.argv[1:])]
    )


def _without_folders(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return option + equals + (_name(value) if os.sep in value else value)


def _name(path: str | Path) -> str:
    return Path(os.path.abspath(path)).name


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


@cache  # a search of all that is installed, for every row that is kept
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
