"""The process that runs the parts of a GPU day, and the one that watches it.

A kernel that hangs, or an address that is wrong, leaves nothing of a CUDA process to go on with: it
is ended, and another goes on with the parts that are left. Parts share a process as long as all is
well, for torch and a model take seconds to load.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.gpu.choices import Choices, Context, row
from bench.harness.experiment import ROOT, Row, prepare
from bench.harness.process import child_process, ending
from offload.errors import one_line

_START_S = 120  # until a process has loaded torch and begins its first part
_END_S = 20  # until it has ended after its last part


def _run(module: str, name: str, context: Context) -> None:
    """Run a part, whose module is loaded in the process that runs it: it takes seconds."""
    getattr(import_module(module), name)(context)


_kernels = partial(partial, _run, "bench.gpu.kernels")
_passes = partial(partial, _run, "bench.gpu.forwards")
PARTS: dict[str, tuple[Callable[[Context], None], int]] = {  # and the seconds that each may take
    "machine": (_kernels("machine"), 60),
    "pin": (_kernels("pin"), 60),
    "link": (_kernels("link"), 60),
    "flash": (_kernels("flash"), 60),
    "chunks": (_kernels("chunks"), 60),
    "fused": (_kernels("fused"), 90),
    "resident": (_passes("resident"), 120),
    "streamed": (_passes("streamed"), 100),
    "split": (_passes("split"), 100),
    "deterministic": (_passes("deterministic"), 90),
    "plan": (_passes("plan"), 130),
}


def run_parts(
    names: Sequence[str], choices: Choices, ends_at: float
) -> Generator[Row, None, list[str]]:
    """Run parts in a process of their own until one of them fails.

    Yields their rows, and returns the names of the parts that are left.

    Args:
        names: of the parts.
        choices: what they are given.
        ends_at: when all is to be over, by `time.monotonic`.
    """
    left, started, limit = list(names), time.monotonic(), float(_START_S)
    with child_process(_work, names, choices, end_by=signal.SIGKILL) as (child, pipe):
        try:
            while left:
                over_at = min(started + limit, ends_at)
                if not pipe.poll(max(0.0, over_at - time.monotonic())):
                    took = time.monotonic() - started
                    yield row(left.pop(0), "failed", f"ended after {took:.0f} s: its time was up")
                    return left
                kind, content = pipe.recv()
                if kind == "row":
                    yield content
                elif kind == "begin":
                    started, limit = time.monotonic(), PARTS[left[0]][1]
                else:
                    name = left.pop(0)
                    yield row(name, "seconds", time.monotonic() - started, "s")
                    if content is not None:
                        yield row(name, "failed", content)
                        return left
        except EOFError:
            yield row(left.pop(0), "failed", f"its process {ending(child)}")
            return left
        child.join(_END_S)  # in which a stand-in tells of faults that it has noted
        if child.exitcode != 0:
            what = f"its process did not end well (exit code {child.exitcode})"
            yield row(names[-1], "failed", what)
    return left


def _work(pipe: Any, names: Sequence[str], choices: Choices) -> None:
    """Run parts, and send what they report, until one of them fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the process that watches this one gets
    prepare(0)

    with _device(choices), torch.inference_mode():
        context = Context(choices, lambda found: pipe.send(("row", found)))
        for name in names:
            context.part = name
            pipe.send(("begin", None))
            failure = None
            try:
                PARTS[name][0](context)
            except Exception as error:
                traceback.print_exc()
                failure = f"{type(error).__name__}: {one_line(error)}{_place(error)}"
            pipe.send(("end", failure))
            if failure is not None:
                return


def _device(choices: Choices) -> AbstractContextManager[object]:
    """Return what stands in for a GPU in a rehearsal on a machine without one."""
    if not choices.rehearse:
        return nullcontext()
    sys.path.insert(0, str(ROOT / "tests"))  # a clone has it, an installation does not
    return import_module("standin").gpu_or_standin()


def _place(error: Exception) -> str:
    """Return where in this project an error was raised, last of all."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            return f" ({path.relative_to(ROOT)}:{frame.lineno} in {frame.name})"
    return ""
