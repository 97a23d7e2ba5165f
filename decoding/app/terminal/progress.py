"""Live progress on a terminal, and plain lines elsewhere."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from decoding.app.terminal.streams import printable
from decoding.engine.stats import Stats


class Display:
    """One bar for the batch, and one for each document in progress: prefill percent, then tokens
    and acceptance rates.

    Document names are never parsed as markup, and their control characters are escaped. A closed
    terminal is ignored.
    """

    def __init__(self, documents: int, stream: TextIO):
        self.console = console = Console(file=stream)
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
            "documents", total=documents, detail="", visible=documents > 1
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, name: str) -> None:
        self._tasks[name] = self._progress.add_task(printable(name), total=1, detail="prefill")

    def prefill(self, name: str, done: int, total: int) -> None:
        self._update(name, done, total, f"prefill {100 * done // total}%")

    def decode(self, name: str, max_new_tokens: int, stats: Stats) -> None:
        acceptance = {level: rate for level, rate in stats.acceptance.items() if rate is not None}
        rates = " ".join(f"{level} {rate:.2f}" for level, rate in acceptance.items())
        accepted = f", acceptance {rates}" if rates else ""
        self._update(name, stats.new_tokens, max_new_tokens, f"{stats.new_tokens} tokens{accepted}")

    def parts(self, name: str, done: int, total: int) -> None:
        """Show how many answers about a document there are, if it takes several."""
        if total > 1:
            self._update(name, done, total, f"{done} of {total} answers")

    def end(self, name: str, line: str) -> None:
        """Remove the bar of a finished document, and print its line."""
        self.end_part(name, line)
        self._progress.advance(self._batch)

    def end_part(self, name: str, line: str) -> None:
        """Remove the bar of a finished part of a document, and print its line."""
        self.remove(name)
        self._print(line)

    def remove(self, name: str) -> None:
        """Remove a bar, if it is still there."""
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))

    def warn(self, line: str) -> None:
        self._print(f"warning: {line}", "yellow")

    def _print(self, line: str, style: str | None = None) -> None:
        self.console.print(
            printable(line), style=style, highlight=False, markup=False, soft_wrap=True
        )

    def stop(self) -> None:
        self._progress.stop()

    def _update(self, name: str, done: int, total: int, detail: str) -> None:
        if name in self._tasks:
            self._progress.update(self._tasks[name], completed=done, total=total, detail=detail)
