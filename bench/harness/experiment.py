"""Running a benchmark: its document is saved as it grows, and printed at the end.

A benchmark is a generator. After each measurement it yields its document so far: lists of rows
(dicts), mappings such as ratios, and single values. The saved document also has the options, the
command, the machine and the commit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import typer
from transformers.utils import logging

from bench.harness.tables import cell, heading, say, show
from bench.harness.text import BUILT_IN, long_text
from offload.errors import TierForceError

Row = dict[str, Any]
Document = dict[str, Any]
Measurement = Generator[Document, None, None]
ROOT = Path(__file__).parents[2]


def benchmark(
    title: str, hidden: Sequence[str] = ()
) -> Callable[[Callable[..., Measurement]], Callable[..., None]]:
    """Turn a benchmark into a command.

    Ctrl-C and TierForceErrors end it; the rows so far are kept.

    Args:
        title: title of its tables, with options in braces, as in `str.format`; {threads} is the
            number of threads actually used.
        hidden: columns that are saved, but not printed.
    """

    def decorate(main: Callable[..., Measurement]) -> Callable[..., None]:
        signature = inspect.signature(main)

        @wraps(main)
        def command(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options, document, failure = bound.arguments, Document(), None
            output = Path(str(options["output"]).replace("{name}", str(options.get("name"))))
            cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
            try:
                prepare(options.get("threads", 0))
                words = title.format(**{**options, "threads": torch.get_num_threads()})
                with closing(main(*bound.args, **bound.kwargs)) as documents:
                    for document in documents:
                        save(output, document, options)
            except KeyboardInterrupt:
                say("interrupted: finished rows are kept")
            except TierForceError as error:
                failure = str(error)
            finally:
                os.sched_setaffinity(0, cores)
                torch.set_num_threads(threads)
            if document:
                present(words, document, hidden)
                print(f"written to {output}")
            if failure is not None:
                typer.echo(failure, err=True)
                raise typer.Exit(1)

        return command

    return decorate


def prepare(threads: int) -> None:
    """Silence transformers, and limit this process to `threads` cores and threads (0: no limit)."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        torch.set_num_threads(threads)


def present(title: str, document: Document, hidden: Sequence[str] = ()) -> None:
    """Print a document: rows as tables, everything else as lines."""
    for name, part in document.items():
        if isinstance(part, list):
            show(title if name == "rows" else f"{heading(name)}: {title}", part, hidden)
        elif isinstance(part, Mapping):
            for key, value in part.items():
                print(f"{key}: {cell(value)}")
        else:
            print(f"{heading(name)}: {cell(part)}")


def save(path: Path, document: Document, options: Mapping[str, Any]) -> None:
    """Write a document, with the options of the run and its environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"settings": _settings(options), **document, "environment": environment()}
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


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


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with names in place of paths, and a digest of each text."""
    named = {name: _named(value) for name, value in options.items()}
    if "text" in options:
        named["text"] = named["text"] or BUILT_IN
        paths = options["text"] or None
        digest = [*map(_digest, paths)] if isinstance(paths, list) else _digest(paths)
        named["text_sha256"] = digest
    return named


def _named(value: Any) -> Any:
    """Return an option's value, with names in place of paths."""
    if isinstance(value, list):
        return [*map(_named, value)]
    return _name(value) if isinstance(value, Path) or os.sep in str(value) else value


@cache
def _digest(path: Path | None) -> str:
    return hashlib.sha256(long_text(path).encode()).hexdigest()[:12]


def _command() -> str:
    """Return the command line, with names in place of paths."""
    main = sys.modules["__main__"].__spec__
    module = main.name.removesuffix(".__main__") if main else sys.argv[0]
    return shlex.join(
        ["python", "-m", _without_folders(module), *map(_without_folders, sys.argv[1:])]
    )


def _without_folders(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return option + equals + (_name(value) if os.sep in value else value)


def _name(path: str | Path) -> str:
    """Return the relative path of a file in this project, and the name of any other."""
    whole = Path(os.path.abspath(path))
    return str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else whole.name


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


_CHANGES = "+changes" if _git("status", "--porcelain", "--", ".", ":!docs/results") else ""
COMMIT = _git("rev-parse", "HEAD") + _CHANGES  # at the start of the run


def _cpu() -> str:
    try:
        named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        named = None
    return named[1] if named else platform.processor()


@cache  # searches all installed packages, and is called for every saved row
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
