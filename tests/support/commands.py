"""Running the command: in interpreters of its own, as its users do, or, where start-up is not the
matter, in forks of a process that has imported all of it.
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

from support.ranks import PRELOAD

DEMO = Path(__file__).parents[2] / "demo"
TARGET, DRAFT = DEMO / "target", DEMO / "draft"
MODELS = ("--model", str(TARGET), "--draft", str(DRAFT), "--device", "cpu")
STEADY = ("--dtype", "float32", "--temperature", "0")  # the same text on any number of ranks
BIN = Path(sys.executable).parent
TIERFORCE = ("tierforce",)
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "-m", "decoding.cli")
PATIENCE = 120.0  # seconds; what takes longer hangs
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(PRELOAD)


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str


class Running(ABC):
    """A command under way, with all its processes."""

    process: Any  # has a pid
    torchrun: bool  # which has an account of its own, a traceback, of a rank that failed

    @abstractmethod
    def processes(self) -> list[psutil.Process]:
        """Return all that is left of the command."""

    @abstractmethod
    def rank(self, number: int) -> psutil.Process | None:
        """Return the process of a rank, once it is there."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Tell whether the command itself has ended; others of its processes may not have."""

    @abstractmethod
    def wait(self, patience: float) -> Finished:
        """Wait for the end of the command itself; raises where it takes longer."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command itself."""
        os.kill(self.process.pid, number)

    def finish(self, patience: float = PATIENCE) -> Finished:
        """Wait for the end of the command and of all its processes, at most `patience` seconds, or
        fail.
        """
        try:
            finished = self.wait(patience)
            assert not self.processes(), "the command left processes behind"
            assert self.torchrun or "Traceback" not in finished.err, finished.err
        finally:
            for process in self.processes():
                process.kill()
        return finished

    def wait_for(self, condition: Callable[[], Any], every: float = 0.02) -> None:
        """Wait until the condition holds; fails when the command ends before, or takes too long.

        `every`: seconds from one look to the next, where looking takes time from the command.
        """
        wait_for(lambda: condition() or self.has_ended(), every)
        assert not self.has_ended(), self.wait(PATIENCE).err


class Job(Running):
    """A command in interpreters of its own, which import all they need, in seconds. Its mark is in
    the environment of every process it starts.
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
    """A command in a fork of a process that has imported it, and so are its ranks. All else is as
    in a `Job`: the launcher is torch's, and ranks have sessions and environments of their own.

    What it writes is kept beside `folder`. `out`, a FIFO, takes standard output instead. `before`,
    a module's own, is called first in each process of the command.
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
        self.piped = out is not None
        streams = (out or self.folder / "out", self.folder / "err")
        start = _Start(self.folder, (*command, *arguments), before)
        self.process = _forks.Process(target=start, args=streams)
        self.process.start()

    def processes(self) -> list[psutil.Process]:
        pids = [self.process.pid, *map(_number_in, self.folder.glob("rank[0-9]"))]
        return [process for process in map(_running, pids) if process]

    def rank(self, number: int) -> psutil.Process | None:
        path = self.folder / f"rank{number}"
        return _running(_number_in(path)) if path.exists() else None

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def wait(self, patience: float) -> Finished:
        self.process.join(patience)
        assert self.has_ended(), "the command hangs"
        out = "" if self.piped else (self.folder / "out").read_text(encoding="utf-8")
        err = (self.folder / "err").read_text(encoding="utf-8")
        return Finished(self.process.exitcode, out, err)


@dataclass(frozen=True)
class _Start:
    """What a fork does instead of what it was."""

    folder: Path
    command: tuple[str, ...]
    before: Callable[[], None] | None

    def __call__(self, out: Path, err: Path) -> None:
        """Become the command, with these files for its output."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        redirect(out, err)
        os.sched_getaffinity = lambda _: {0}  # on a busy machine two threads wait for each other
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
        """Fork a rank in place of what torch's launcher would start. Its command is never run, for
        the rank does not return.
        """
        become = partial(self._become_rank, command, environment)
        # its signals stay as Python has them: a rank whose peer is gone is not to die of SIGPIPE
        return subprocess.Popen(
            command, preexec_fn=become, start_new_session=True, restore_signals=False
        )

    def _become_rank(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        # among them what tells Popen, by its end, that the command has started
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
        self._run(command[command.index("decoding.cli") + 1 :])


def redirect(out: Path, err: Path) -> None:
    """Let files take what this process, and those that it starts, write."""
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


def wait_for(condition: Callable[[], Any], every: float = 0.02) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(every)


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


def _running(pid: int) -> psutil.Process | None:
    """A process, unless it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.Error:
        return None


def _number_in(path: Path) -> int:
    return int(path.read_text())
