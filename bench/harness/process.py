"""Calls in a fresh process, which frees its memory and whose death is a result, too."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil

_POLL_S = 0.05
_START = "spawn"  # the child inherits no memory


class Died(Exception):
    """The process returned nothing; the message is the reason."""


def call_in_process(
    function: Callable[..., Any], *args: Any, limit_s: float = math.inf
) -> tuple[Any, float]:
    """Call a module-level function in a fresh process.

    Returns its result and the peak memory of its process in GB. The result is a `Died` if the
    process ends without one, or takes longer than `limit_s` seconds.
    """
    started, peak = time.monotonic(), 0.0
    with child_process(_send_result, function, args) as (child, pipe):
        try:
            while child.is_alive() and not pipe.poll(_POLL_S):
                peak = max(peak, _memory_gb(child.pid))
                if time.monotonic() - started > limit_s:
                    return Died(f"took more than {limit_s:.0f} s"), peak
            return (pipe.recv() if pipe.poll() else ending(child)), peak
        except EOFError:
            return ending(child), peak


@contextmanager
def child_process(
    function: Callable[..., None], *args: Any, end_by: int = signal.SIGTERM
) -> Iterator[tuple[Any, Any]]:
    """Run `function(pipe, *args)` in a process of its own during the body.

    Yields the process, and the receiving end of the pipe, which raises `EOFError` once the process
    has ended. After the body the process and its children get the signal `end_by`.
    """
    context: Any = multiprocessing.get_context(_START)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=function, args=(theirs, *args))
    try:
        with _delayed_interrupts():
            child.start()
        theirs.close()  # the child's death then closes the pipe
        yield child, ours
    finally:
        if child.pid is not None:
            for process in _family(child.pid):
                with suppress(psutil.Error):
                    process.send_signal(end_by)
            child.join()
        ours.close()


@contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the body.

    A process started in the body never receives it: this process ends it instead.
    """
    resource_tracker.ensure_running()  # starting it later would unblock interrupts
    received: list[int] = []  # signals that other threads received, which do not block them
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the child
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


def _send_result(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(function(*args))


def ending(child: Any) -> Died:
    """Return why a process that has ended, or is about to, returned nothing."""
    child.join()
    if child.exitcode == -9:
        return Died("killed, most likely for memory")
    return Died(f"exited with code {child.exitcode}")


def _memory_gb(pid: int | None) -> float:
    try:
        return sum(process.memory_info().rss for process in _family(pid)) / 1e9
    except psutil.Error:
        return 0.0


def _family(pid: int | None) -> list[psutil.Process]:
    """Return a process and its descendants, if it is still running."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
