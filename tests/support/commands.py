"""Run the command in its own interpreter, like users, or, if start-up is not tested, in a fork of
a process that has already imported everything.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.ranks import PRELOAD, freeze_imports

DEMO = Path(__file__).parents[2] / "demo"
TARGET, DRAFT = DEMO / "target", DEMO / "draft"
MODELS = ("--model", str(TARGET), "--draft", str(DRAFT), "--device", "cpu")
GREEDY_FP32 = ("--dtype", "float32", "--temperature", "0")  # the same output on any number of ranks
BIN = Path(sys.executable).parent
TIERFORCE = ("tierforce",)
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "-m", "decoding.cli")
PATIENCE = 120.0  # seconds after which a command counts as hanging
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(PRELOAD)


@dataclass(frozen=True)
class Finished:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


class Running(ABC):
    """A running command, with all its processes."""

    process: Any  # with a pid
    torchrun: bool  # started by torchrun, which prints a traceback when a rank fails

    @abstractmethod
    def processes(self) -> list[psutil.Process]:
        """Return the command's live processes."""

    @abstractmethod
    def rank(self, number: int) -> psutil.Process | None:
        """Return the process of a rank; None until it has started."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether the main process has ended; others may still run."""

    @abstractmethod
    def wait(self, patience: float) -> Finished:
        """Wait for the main process to end; raises if it takes longer."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process."""
        os.kill(self.process.pid, number)

    def finish(self, patience: float = PATIENCE) -> Finished:
        """Wait at most `patience` seconds for the command to end; fail if a process is left."""
        try:
            finished = self.wait(patience)
            assert not self.processes(), "the command left processes running"
            assert self.torchrun or "Traceback" not in finished.err, finished.err
        finally:
            for process in self.processes():
                process.kill()
        return finished

    def wait_for(self, condition: Callable[[], Any], interval_s: float = 0.02) -> None:
        """Wait until the condition holds; fail if the command ends first, or it takes too long.

        `interval_s` is the polling interval, longer for conditions that slow the command down.
        """
        wait_for(lambda: condition() or self.has_ended(), interval_s)
        assert not self.has_ended(), self.wait(PATIENCE).err


class Job(Running):
    """A command in new interpreters, which take seconds to import everything. Its mark is in the
    environment of all its processes.
    """

    def __init__(
        self,
        *arguments: str,
        command: tuple[str, ...] = TIERFORCE,
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
        program, *options = command
        self.process = subprocess.Popen(
            [str(BIN / program), *options, *arguments],
            env=environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter()
            if _environment(process).get("TIERFORCE_TEST") == self.mark
        ]

    def rank(self, number: int) -> psutil.Process | None:
        return next(
            (
                process
                for process in self.processes()
                if _environment(process).get("RANK") == str(number)
            ),
            None,
        )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, patience: float) -> Finished:
        out, err = self.process.communicate(timeout=patience)
        return Finished(self.process.returncode, out, err)


class Fork(Running):
    """A command in a fork of a process that has imported it, with forked ranks. All else is as in a
    `Job`: torch's launcher is used, and ranks have their own sessions and environments.

    Its output is written to files beside `folder`, or standard output to `out`, a FIFO. `before`, a
    module-level function, is called first in each process of the command.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        command: tuple[str, ...] = TIERFORCE,
        out: Path | None = None,
        before: Callable[[], None] | None = None,
    ):
        self.torchrun = command == TORCHRUN
        self.folder = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
        self.is_piped = out is not None
        streams = (out or self.folder / "out", self.folder / "err")
        start = _Start(self.folder, (*command, *arguments), before)
        self.process = _forks.Process(target=start, args=streams)
        self.process.start()

    def processes(self) -> list[psutil.Process]:
        pids = [self.process.pid, *map(_read_pid, self.folder.glob("rank[0-9]"))]
        return [process for process in map(_live_process, pids) if process]

    def rank(self, number: int) -> psutil.Process | None:
        path = self.folder / f"rank{number}"
        return _live_process(_read_pid(path)) if path.exists() else None

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def wait(self, patience: float) -> Finished:
        self.process.join(patience)
        assert self.has_ended(), "the command hangs"
        out = "" if self.is_piped else (self.folder / "out").read_text(encoding="utf-8")
        err = (self.folder / "err").read_text(encoding="utf-8")
        return Finished(self.process.exitcode, out, err)


@dataclass(frozen=True)
class _Start:
    """The function that a fork runs."""

    folder: Path
    command: tuple[str, ...]
    before: Callable[[], None] | None

    def __call__(self, out: Path, err: Path) -> None:
        """Run the command, with these files for its output."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        freeze_imports()
        redirect(out, err)
        os.sched_getaffinity = lambda _: {0}  # two threads would wait for each other
        SubprocessHandler._popen = lambda _, command, environment: self._fork(command, environment)
        if self.command[: len(TORCHRUN)] == TORCHRUN:
            from torch.distributed.run import main

            sys.exit(main(self.command[1:]))
        self._run(self.command[1:])

    def _run(self, arguments: tuple[str, ...]) -> None:
        sys.argv = ["tierforce", *arguments]
        if self.before:
            self.before()
        from decoding.app.main import main

        main()

    def _fork(self, command: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen:
        """Fork a rank instead of starting the command of torch's launcher, which is never run: the
        rank does not return.
        """
        start_rank = partial(self._become_rank, command, environment)
        # Python's signal handlers stay: a rank whose peer is gone must not die of SIGPIPE.
        return subprocess.Popen(
            command, preexec_fn=start_rank, start_new_session=True, restore_signals=False
        )

    def _become_rank(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        # including the pipe whose closing tells Popen that the command has started
        os.closerange(3, 1024)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(environment)
        path = self.folder / f"rank{os.environ['RANK']}"
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        module = next(index for index, word in enumerate(command) if "decoding.cli" in word)
        self._run(command[module + 1 :])


def redirect(out: Path, err: Path) -> None:
    """Redirect the output of this process and its children to files."""
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)


def tierforce(*arguments: str, env: dict[str, str] | None = None) -> Finished:
    """Run the console script."""
    return Job(*arguments, env=env).finish()


def forked(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> Finished:
    """Run the command in a `Fork`."""
    return Fork(folder, *arguments, before=before).finish()


def refused(result: Finished) -> str:
    """Fail unless the command failed with one line on standard error; return that line."""
    assert result.code > 0, result
    assert result.out == ""
    assert result.err.startswith("tierforce: "), result.err
    assert result.err.count("\n") == 1, result.err
    assert result.err.endswith("\n")
    return result.err


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records of an output file, whose lines must all be complete."""
    *complete, torn = path.read_text(encoding="utf-8").split("\n")
    assert not torn
    return [json.loads(line) for line in complete]


def summarized(
    folder: Path, source: Path, *options: str, before: Callable[[], None] | None = None
) -> tuple[Finished, dict[str, Any]]:
    """Summarise documents greedily; return the result, and the records in the folder by id."""
    output = folder / "out.jsonl"
    paths = ("--input", str(source), "--output", str(output))
    result = forked(folder, "summarize", *MODELS, *GREEDY_FP32, *paths, *options, before=before)
    found = records(output) if output.exists() else []
    return result, {record["id"]: record for record in found}


def wait_for(condition: Callable[[], Any], interval_s: float = 0.02) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(interval_s)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def variant(
    folder: Path,
    source: Path = TARGET,
    edit: Callable[[dict[str, Tensor]], Any] | None = None,
    **config: Any,
) -> tuple[str, ...]:
    """Copy a checkpoint to `folder`, edit its tensors with `edit`, and replace config fields.

    Returns its --model and --device options.
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


def _live_process(pid: int) -> psutil.Process | None:
    """Return the process unless it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.Error:
        return None


def _read_pid(path: Path) -> int:
    return int(path.read_text())
