"""Running the command: as its users do, or, where start-up is not the matter, in a fork of a
process that has imported it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from safetensors.torch import load_file, save_file
from torch import Tensor

DEMO = Path(__file__).parents[2] / "demo"
TARGET, DRAFT = DEMO / "target", DEMO / "draft"
MODELS = ("--model", str(TARGET), "--draft", str(DRAFT), "--device", "cpu")
STEADY = ("--dtype", "float32", "--temperature", "0")  # the same text on any number of ranks
BIN = Path(sys.executable).parent
TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node", "2", "-m", "decoding.cli")
PATIENCE = 60.0  # seconds; what takes longer hangs
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["decoding.app.generate", "decoding.app.summarize"])


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str


class Job:
    """A command under way. Its mark is in the environment of every process it starts."""

    def __init__(
        self,
        *arguments: str,
        command: tuple[str, ...] = (str(BIN / "tierforce"),),
        env: dict[str, str] | None = None,
    ):
        self.mark = uuid4().hex
        self.torchrun = command == TORCHRUN
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "passive",
            **(env or {}),
            "TIERFORCE_TEST": self.mark,
        }
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*command, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True
        )

    def processes(self) -> list[psutil.Process]:
        """All that is left of the command."""
        return [
            process
            for process in psutil.process_iter()
            if _environment(process).get("TIERFORCE_TEST") == self.mark
        ]

    def rank(self, number: int) -> psutil.Process | None:
        """The process of a rank, once it is there."""
        return next(
            (
                process
                for process in self.processes()
                if _environment(process).get("RANK") == str(number)
            ),
            None,
        )

    def finish(self, patience: float = PATIENCE) -> Finished:
        """Wait for the end of the command and of all its processes, at most `patience` seconds, or
        fail.
        """
        try:
            out, err = self.process.communicate(timeout=patience)
            assert not self.processes(), "the command left processes behind"
            assert self.torchrun or "Traceback" not in err, err
        finally:
            for process in self.processes():
                process.kill()
        return Finished(self.process.returncode, out, err)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Until the condition holds; fails when the command ends before, or takes too long."""
        wait_for(lambda: condition() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()[1]


def tierforce(*arguments: str, env: dict[str, str] | None = None) -> Finished:
    """The console script."""
    return Job(*arguments, env=env).finish()


def forked(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> Finished:
    """The command's own `main` in a process of its own, a few seconds sooner. `before`, a module's
    own, is called in it first.
    """
    process = _forks.Process(target=_main, args=(arguments, folder / "out", folder / "err", before))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the command hangs")
    out, err = ((folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
    assert "Traceback" not in err, err
    return Finished(process.exitcode, out, err)


def _main(
    arguments: tuple[str, ...], out: Path, err: Path, before: Callable[[], None] | None
) -> None:
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["tierforce", *arguments]
    os.sched_getaffinity = lambda _: {0}  # on a busy machine two threads wait for each other
    if before:
        before()
    from decoding.app.main import main

    main()


def refused(result: Finished) -> str:
    """Fails unless the command ended as one that cannot start has to; returns the one line it
    said.
    """
    assert result.code > 0, result
    assert result.out == ""
    assert result.err.startswith("tierforce: "), result.err
    assert result.err.count("\n") == 1, result.err
    assert result.err.endswith("\n")
    return result.err


def records(path: Path) -> list[dict[str, Any]]:
    """Of an output file in which every line must be whole."""
    *whole, torn = path.read_text(encoding="utf-8").split("\n")
    assert not torn
    return [json.loads(line) for line in whole]


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def variant(
    folder: Path,
    source: Path = TARGET,
    edit: Callable[[dict[str, Tensor]], Any] | None = None,
    **config: Any,
) -> tuple[str, ...]:
    """A changed copy of a checkpoint in `folder`: `edit` works on its tensors, `config` replaces
    fields. Returns its --model.
    """
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if edit:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
    return "--model", str(folder), "--device", "cpu"


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
