"""`tierforce summarize` as people run it, with its ranks, watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from bench.harness.record import publish
from bench.harness.tables import say
from bench.harness.text import long_text

_ROOT = Path(__file__).parents[2]


Target = Annotated[str, typer.Option(help="Target model; by default the built-in pair's.")]
Draft = Annotated[str, typer.Option(help="Draft model, likewise.")]
TARGET, DRAFT = (str(_ROOT / "demo" / name) for name in ("target", "draft"))


class Summarizing:
    """A job under way: the process that was started, and the ranks that it has started."""

    def __init__(self, arguments: Sequence[str], output: Path, log: Path):
        """What it says is appended to `log`; records go to `output`."""
        self.output, self.log = output, log
        self._said = log.stat().st_size if log.exists() else 0
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        with log.open("ab") as said:
            self.process = psutil.Popen(
                [sys.executable, "-m", "decoding", "summarize", *arguments, "--output", output],
                stdout=subprocess.DEVNULL,
                stderr=said,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        self._family: dict[int, psutil.Process] = {self.process.pid: self.process}

    def processes(self) -> list[psutil.Process]:
        """Return what is alive of the job, also where its parent is gone."""
        for process in list(self._family.values()):
            with suppress(psutil.Error):
                children = process.children(recursive=True)
                self._family |= {child.pid: child for child in children}
        return [process for process in self._family.values() if _is_alive(process)]

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the ranks that are alive."""
        ranks = {}
        for process in self.processes():
            with suppress(psutil.Error, KeyError):
                ranks[int(process.environ()["RANK"])] = process
        return ranks or {0: self.process}

    def said(self) -> str:
        """Return what this job has said so far."""
        with self.log.open("rb") as file:
            file.seek(self._said)
            return file.read().decode(errors="replace")

    def wait(self, limit_s: float) -> int | None:
        """Wait for the end of all its processes; return the exit code, None where one hangs."""
        until = time.monotonic() + limit_s
        while self.processes():
            if time.monotonic() > until:
                for process in self.processes():
                    with suppress(psutil.Error):
                        process.kill()
                return None
            time.sleep(0.02)
        return int(self.process.wait())


def on_two_ranks(target: str, draft: str) -> list[str]:
    """Return the options of a job of two ranks on the processor."""
    return ["--model", target, "--draft", draft, "--gpus", "2", "--device", "cpu"]


def conclude(output: Path, title: str, rows: Sequence[Any], wrong: list[str], **more: Any) -> None:
    """Publish rows with what is wrong, in words; raises typer.Exit where anything is."""
    publish(output, title, rows, wrong=wrong, **more)
    for line in wrong:
        say(line)
    if wrong:
        raise typer.Exit(1)


def whole_records(output: Path) -> list[dict[str, Any]]:
    """Return the records whose lines are complete."""
    if not output.exists():
        return []
    *lines, _ = output.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def pieces_of_text(text: Path | None, tokenizer: Any, lengths: Sequence[int]) -> list[str]:
    """Return pieces of a long text of about so many tokens, one behind the other, over again."""
    whole = long_text(text)
    sample = whole[:200_000]
    letters = len(sample) / len(tokenizer(sample).input_ids)  # of a token
    pieces, at = [], 0
    for length in lengths:
        size = int(length * letters)
        if at + size > len(whole):
            at = 0
        pieces.append(whole[at : at + size])
        at += size
    return pieces


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
