"""A function in a process of its own: its memory goes with it, and its end is an answer too."""

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
_START = "spawn"  # a process that holds nothing of ours


class Died(Exception):
    """The process gave no answer; the message is the reason."""


def call_in_process(
    function: Callable[..., Any], *args: Any, limit_s: float = math.inf
) -> tuple[Any, float]:
    """Call a module's own function in a fresh process.

    Returns its answer and the most memory its process held, in GB. A `Died` takes the answer's
    place where the process ends without one, or takes longer than `limit_s` seconds.
    """
    started, peak = time.monotonic(), 0.0
    with child_process(_answer, function, args) as (child, pipe):
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
    """Run `function(pipe, *args)` in a process of its own meanwhile.

    Yields the process, and the end of the pipe that receives what it sends; `EOFError` says that it
    has ended. After the body the process gets the signal `end_by`, and so does all it has started.
    """
    context: Any = multiprocessing.get_context(_START)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=function, args=(theirs, *args))
    try:
        with _interrupts_wait():
            child.start()
        theirs.close()  # so that a child that dies ends the pipe
        yield child, ours
    finally:
        if child.pid is not None:
            for process in _family(child.pid):
                with suppress(psutil.Error):
                    process.send_signal(end_by)
            child.join()
        ours.close()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let a Ctrl-C wait until the body is done.

    A process that the body starts never gets one: it is ours, and we end the process.
    """
    resource_tracker.ensure_running()  # its own start would let interrupts through again
    came: list[int] = []  # through other threads, which block none
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which is inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _answer(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(function(*args))


def ending(child: Any) -> Died:
    """Return why a process that has ended, or is about to, gave no answer."""
    child.join()
    if child.exitcode == -9:
        return Died("killed, most likely for memory")
    return Died(f"ended with exit code {child.exitcode}")


def _memory_gb(pid: int | None) -> float:
    try:
        return sum(each.memory_info().rss for each in _family(pid)) / 1e9
    except psutil.Error:
        return 0.0


def _family(pid: int | None) -> list[psutil.Process]:
    """Return a process and all that it started, if it still runs."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
