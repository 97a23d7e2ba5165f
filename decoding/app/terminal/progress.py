"""Live progress on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from decoding.app.terminal.pace import Pace
from decoding.app.terminal.streams import counted, printable
from decoding.engine.stats import Stats

_INTERVAL_S = 30.0  # between two lines where there is no terminal
_MAX_NAMES = 3  # documents in such a line
_WIDE = 100  # columns of a terminal with room for bars and times


class _Rows:
    """Rows on a terminal: one for the batch, if it has several documents, and one for each document
    or part in progress.
    """

    def __init__(self, console: Console, documents: int, pace: Pace, has_rows: bool):
        self._name_width = max(16, console.width // 4)
        name = Column(no_wrap=True, min_width=self._name_width)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=name),
            *([BarColumn(bar_width=24)] if console.width >= _WIDE else []),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True)),
            *([TimeElapsedColumn()] if console.width >= _WIDE else []),
            console=console,
            transient=True,
            disable=not has_rows,
        )
        # the pace is formatted whenever the row is drawn
        self._batch = self.progress.add_task(
            "", total=documents, detail=pace, visible=documents > 1
        )
        self._rows: dict[str, TaskID] = {}

    def count(self, finished: int, description: str) -> None:
        self.progress.update(self._batch, completed=finished, description=description)

    def begin(self, name: str) -> None:
        shown = _shortened(printable(name), self._name_width)
        self._rows[name] = self.progress.add_task(shown, total=1, detail="")

    def update(self, name: str, done: int, total: int, detail: str) -> None:
        self.progress.update(self._rows[name], completed=done, total=total, detail=detail)

    def remove(self, name: str) -> None:
        self.progress.remove_task(self._rows.pop(name))


class Display:
    """How far a batch is, with its pace, and each document in progress: the share of its prompt
    that is read, then the tokens that are written.

    It is shown in rows on a terminal, and elsewhere in a line every 30 s. Document names are never
    parsed as markup, and their control characters are escaped. A closed terminal is ignored.
    """

    def __init__(self, documents: int, stream: TextIO, finished: int = 0, pace: Pace | None = None):
        """Begin with so many of the documents finished."""
        self.pace = pace or Pace({}, 1)
        self.console = Console(file=stream)
        self._documents, self._finished = documents, finished
        self._has_rows = stream.isatty() and not self.console.is_dumb_terminal
        self._rows = _Rows(self.console, documents, self.pace, self._has_rows)
        self._rows.count(finished, self._count())
        # documents and parts in progress: the time when each began, and how far it is
        self._details: dict[str, tuple[float, str]] = {}
        self._stopped, self._printing = threading.Event(), threading.Lock()

    def __enter__(self) -> Display:
        self._rows.progress.start()
        if not self._has_rows:
            threading.Thread(target=self._say_status, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, name: str) -> None:
        self._details[name] = time.monotonic(), ""
        self._rows.begin(name)

    def prefill(self, name: str, done: int, total: int) -> None:
        self.update(name, done, total, f"{100 * done // total}% read")

    def decode(self, name: str, max_new_tokens: int, stats: Stats) -> None:
        count = stats.new_tokens
        self.update(name, count, max_new_tokens, f"{counted(count, 'token')} written")

    def update(self, name: str, done: int, total: int, detail: str) -> None:
        """Show how far a document is, if it has begun."""
        if name in self._details:
            self._details[name] = self._details[name][0], detail
            self._rows.update(name, done, total, detail)

    def end(self, name: str, line: str) -> None:
        """Remove a finished document, and print its line, with its number of several."""
        self._finished += 1
        self.pace.end(name)
        self.remove(name)
        number = f"{self._finished:,} of {self._documents:,}: " if self._documents > 1 else ""
        self.say(f"{number}{line}")
        self._rows.count(self._finished, self._count())

    def remove(self, name: str) -> None:
        """Remove a document or a part, if it is still there."""
        if self._details.pop(name, None) is not None:
            self._rows.remove(name)

    def seconds(self, name: str) -> float | None:
        """Return how long ago a document has begun; None if it has not."""
        return time.monotonic() - self._details[name][0] if name in self._details else None

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line above the rows."""
        self.console.print(
            printable(line), style=style, highlight=False, markup=False, soft_wrap=True
        )

    def warn(self, line: str) -> None:
        self.say(f"warning: {line}", "yellow")

    def stop(self) -> None:
        """Remove all rows; no line about them follows."""
        self._stopped.set()
        with self._printing:
            self._rows.progress.stop()

    def _count(self) -> str:
        return f"{self._finished:,} of {self._documents:,} documents"

    def _say_status(self) -> None:
        """Print what rows would show every now and then, in a line, until the end."""
        while not self._stopped.wait(_INTERVAL_S):
            with self._printing:
                details = list(self._details.items())  # another thread may change them
                names = [f"{name}: {each}" if each else name for name, (_, each) in details]
                shown = names[:_MAX_NAMES]
                if more := len(names) - len(shown):
                    shown.append(f"and {more} more")
                count = self._count() if self._finished < self._documents > 1 else ""
                line = "; ".join(filter(None, [count, *shown, str(self.pace)]))
                if line and not self._stopped.is_set():
                    self.say(line)


def _shortened(name: str, width: int) -> str:
    """Return a name without its middle, if it has more than `width` characters."""
    if len(name) <= width:
        return name
    end = width // 2
    return f"{name[: width - end - 1]}…{name[-end:]}"
