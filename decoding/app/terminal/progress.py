"""Live progress on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from decoding.app.terminal.pace import Pace
from decoding.app.terminal.streams import printable
from decoding.engine.stats import Stats

_INTERVAL_S = 30.0  # between two lines where there is no terminal
_MAX_NAMES = 3  # documents in such a line


class _Heartbeat:
    """A thread that calls a function every now and then."""

    def __init__(self, call: Callable[[], None]):
        self._call, self._stopped = call, threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="progress", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self._call()


class Display:
    """One bar for the batch, with its pace, and one for each document in progress: the share of its
    prompt that is read, then the tokens that are written.

    Where there is no terminal, a line every 30 s says the same. Document names are never parsed as
    markup, and their control characters are escaped. A closed terminal is ignored.
    """

    def __init__(self, documents: int, stream: TextIO, finished: int = 0, pace: Pace | None = None):
        """Begin with so many of the documents finished."""
        self.pace = pace or Pace({}, 1)
        self.console = console = Console(file=stream)
        self._documents, self._finished = documents, finished
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._batch = self._progress.add_task(
            self._count, total=documents, completed=finished, detail="", visible=documents > 1
        )
        self._tasks: dict[str, TaskID] = {}  # keys are names of documents and parts
        self._details: dict[str, str] = {}  # keys are the same names
        self._heartbeat = _Heartbeat(self._say_status)

    def __enter__(self) -> Display:
        self._progress.start()
        if not self.console.is_terminal:
            self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, name: str) -> None:
        self._details[name] = ""
        self._tasks[name] = self._progress.add_task(printable(name), total=1, detail="")

    def prefill(self, name: str, done: int, total: int) -> None:
        self.pace.prefill(name, done / total)
        self._update(name, done, total, f"{100 * done // total}% read")

    def decode(self, name: str, max_new_tokens: int, stats: Stats) -> None:
        self.pace.decode(name, stats.new_tokens)
        self._update(name, stats.new_tokens, max_new_tokens, f"{stats.new_tokens} tokens written")

    def answers(self, name: str, finished: int, answers: int, passages: int) -> None:
        """Show how many answers about a document are finished, if it takes several."""
        self.pace.update(name, finished, answers, passages)
        if answers > 1:
            self._update(name, finished, answers, f"{finished} of {answers} answers")

    def end(self, name: str, line: str) -> None:
        """Remove the bar of a finished document, and print its line, with its number of several."""
        self._finished += 1
        self.pace.end(name)
        self.remove(name)
        number = f"{self._finished:,} of {self._documents:,}: " if self._documents > 1 else ""
        self.say(f"{number}{line}")
        self._progress.update(self._batch, completed=self._finished, description=self._count)

    def remove(self, name: str) -> None:
        """Remove a bar, if it is still there."""
        self._details.pop(name, None)
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line above the bars."""
        self.console.print(
            printable(line), style=style, highlight=False, markup=False, soft_wrap=True
        )

    def warn(self, line: str) -> None:
        self.say(f"warning: {line}", "yellow")

    def stop(self) -> None:
        self._heartbeat.stop()
        self._progress.stop()

    @property
    def _count(self) -> str:
        return f"{self._finished:,} of {self._documents:,} documents"

    def _update(self, name: str, done: int, total: int, detail: str) -> None:
        if name in self._tasks:
            self._details[name] = detail
            self._progress.update(self._tasks[name], completed=done, total=total, detail=detail)
            self._progress.update(self._batch, detail=str(self.pace))

    def _say_status(self) -> None:
        """Print what the bars show, in a line; nothing between two documents."""
        if details := list(self._details.items()):  # another thread may change them
            names = [f"{name}: {detail}" if detail else name for name, detail in details]
            more = len(names) - _MAX_NAMES
            shown = "; ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
            count = self._count if self._documents > 1 else ""
            self.say("; ".join(filter(None, [count, shown, str(self.pace)])))


@contextmanager
def waiting(what: str, stream: TextIO) -> Iterator[None]:
    """Show what takes time."""
    with Display(1, stream) as display:
        display.begin(what)
        yield
