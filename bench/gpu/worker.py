"""The process that runs the parts of a GPU day, and the one that supervises it.

A kernel that hangs, or an invalid address, makes a CUDA process unusable: it is killed, and another
one runs the remaining parts. Parts share a process until one fails, since loading torch and a model
takes seconds.
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

_START_S = 120  # time limit to load torch and begin the first part
_END_S = 20  # time limit to exit after the last part


def _run(module: str, name: str, context: Context) -> None:
    """Run a part; its module is imported only in this process, which takes seconds."""
    getattr(import_module(module), name)(context)


_kernels = partial(partial, _run, "bench.gpu.kernels")
_forwards = partial(partial, _run, "bench.gpu.forwards")
_together = partial(_run, "bench.gpu.together", "together")
PARTS: dict[str, tuple[Callable[[Context], None], int]] = {  # function, and time limit in seconds
    "machine": (_kernels("machine"), 60),
    "pin": (_kernels("pin"), 60),
    "link": (_kernels("link"), 60),
    "flash": (_kernels("flash"), 60),
    "chunks": (_kernels("chunks"), 60),
    "fused": (_kernels("fused"), 90),
    "weights": (_kernels("weights"), 60),
    "resident": (_forwards("resident"), 120),
    "streamed": (_forwards("streamed"), 100),
    "split": (_forwards("split"), 100),
    "deterministic": (_forwards("deterministic"), 90),
    "plan": (_forwards("plan"), 130),
    "together": (_together, 120),
}


def run_parts(
    names: Sequence[str], choices: Choices, ends_at: float
) -> Generator[Row, None, list[str]]:
    """Run parts in a process of their own until one of them fails.

    Yields their rows, and returns the names of the remaining parts.

    Args:
        names: names of the parts.
        choices: the options.
        ends_at: deadline of all parts, by `time.monotonic`.
    """
    pending = list(names)
    started, limit = time.monotonic(), float(_START_S)
    with child_process(_work, names, choices, end_by=signal.SIGKILL) as (child, pipe):
        try:
            while pending:
                deadline = min(started + limit, ends_at)
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    seconds = time.monotonic() - started
                    reason = f"killed after {seconds:.0f} s: the time limit was reached"
                    yield row(pending.pop(0), "failed", reason)
                    return pending
                kind, content = pipe.recv()
                if kind == "row":
                    yield content
                elif kind == "begin":
                    started, limit = time.monotonic(), PARTS[pending[0]][1]
                else:
                    name = pending.pop(0)
                    yield row(name, "seconds", time.monotonic() - started, "s")
                    if content is not None:
                        yield row(name, "failed", content)
                        return pending
        except EOFError:
            yield row(pending.pop(0), "failed", f"its process {ending(child)}")
            return pending
        child.join(_END_S)  # a stand-in reports its faults at exit
        if child.exitcode != 0:
            reason = f"its process failed at exit (exit code {child.exitcode})"
            yield row(names[-1], "failed", reason)
    return pending


def _work(pipe: Any, names: Sequence[str], choices: Choices) -> None:
    """Run parts until one of them fails, and send their rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the supervising process
    prepare(0)

    with _device(choices), torch.inference_mode():
        context = Context(choices, lambda new_row: pipe.send(("row", new_row)))
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
    """Return the context of a stand-in, for a rehearsal on a machine without a GPU."""
    if not choices.rehearse:
        return nullcontext()
    sys.path.insert(0, str(ROOT / "tests"))  # only in a clone, not installed
    return import_module("standin").gpu_or_standin()


def _place(error: Exception) -> str:
    """Return the innermost place in this project where an error was raised."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            return f" ({path.relative_to(ROOT)}:{frame.lineno} in {frame.name})"
    return ""
