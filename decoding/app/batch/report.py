"""What a batch says about its documents: a line for each as it ends, and the totals."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any

from decoding.app.documents.document import Document
from decoding.app.results.destination import ResultFiles
from decoding.app.results.records import Finished
from decoding.app.results.rendering import length_notes
from decoding.app.terminal.messages import counts_line
from decoding.app.terminal.pace import duration
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import signal_source
from decoding.app.terminal.streams import counted, say
from offload.errors import TierForceError


class Report:
    """The results of a batch: files on disk, and lines on the terminal."""

    def __init__(
        self,
        documents: Sequence[Document],
        due: Sequence[Document],
        results: ResultFiles,
        display: Display,
    ):
        """Print how many documents are already finished."""
        self.documents, self.results, self.display = documents, results, display
        self.failed = 0
        self._start = time.monotonic()
        if count := len(documents) - len(due):
            say(f"already finished: {count:,} of {counted(len(documents), 'document')}")

    def add(self, record: dict[str, Any]) -> None:
        """Write the record of a document, and print its line. Raises TierForceError."""
        record = self.results.add(record)
        id = record["id"]
        if "error" in record:
            self.failed += 1
            line = f"{id} failed: {record['error']}"
        else:
            counts = counts_line(record, self.display.seconds(id))
            line = "; ".join([f"{id}: {counts}", *length_notes(record)])
            answers = record.get("answers", ())
            if cut := [each["error"] for each in answers if "error" in each]:
                line += f"; {len(cut)} of {len(answers)} answers have an error: {cut[0]}"
        self.display.end(id, line)

    def progress(self, id: str, number: int, finished: int, count: int, passages: int) -> None:
        """Show how far a document is that takes several answers."""
        self.display.pace.update(id, number, finished, count, passages)
        if number > 1:
            self.display.update(id, finished, count, "merging")
        elif count > 1:
            what = "parts" if passages == count else "answers"
            self.display.update(id, finished, count, f"{finished:,} of {count:,} {what}")

    def interrupt(self, name: str) -> None:
        """Print how many documents were finished when a signal ended the batch."""
        self.display.stop()
        records = self.results.records
        count = len(records.finished)
        safe = f"{counted(count, 'finished record')} {'is' if count == 1 else 'are'} safe in "
        safe += str(records.path)
        if parts := records.parts.count:
            safe += f", with {counted(parts, 'answer')} about others beside it"
        say(f"interrupted ({signal_source(name)}); {safe}: run the same command to resume")

    def conclude(self, context: int) -> None:
        """Put the results in order, and print the totals.

        Raises TierForceError if that fails, or documents failed.
        """
        finished = _finished(self.documents, self.results)
        truncated = sum(record.is_truncated for record in finished)
        split = sum(record.part_instructions is not None for record in finished)
        count = counted(len(self.documents), "document")
        seconds = duration(time.monotonic() - self._start)
        line = f"{len(self.documents) - self.failed:,} of {count} finished, in {seconds}"
        if split:
            line += f", {split} of them in parts, longer than the context of {context:,} tokens"
        if truncated:
            line += f", {truncated} of them truncated to the context of {context:,} tokens"
        try:
            self.results.finish()
        finally:
            say(f"{line}: {_place(self.results)}")
        if self.failed:
            raise TierForceError(
                f"{self.failed:,} of {count} failed; their records in {self.results.records.path} "
                "say why."
            )
        _check_answers(finished, self.results)


def conclude_finished(documents: Sequence[Document], results: ResultFiles) -> None:
    """Put the results in order, and say that an earlier job has finished all documents.

    Raises TierForceError if that fails, or answers have an error.
    """
    results.finish()
    count = len(documents)
    which = "the document is" if count == 1 else f"all {count:,} documents are"
    say(f"{which} already finished: {_place(results)}")
    _check_answers(_finished(documents, results), results)


def _finished(documents: Sequence[Document], results: ResultFiles) -> list[Finished]:
    """Return what is known of the documents that are finished."""
    found = results.records.finished
    return [found[document.id] for document in documents if document.id in found]


def _place(results: ResultFiles) -> str:
    """Return where results are, and how to read them."""
    path, records = results.destination.path, results.records.path
    if path == records:
        return f"{path}, which `tierforce show {shlex.quote(str(path))}` prints"
    return f"{path}, with records in {records}"


def _check_answers(finished: Sequence[Finished], results: ResultFiles) -> None:
    """Raise TierForceError if answers about documents have an error in place of data."""
    if cut := sum(record.cut for record in finished):
        have = "has" if cut == 1 else "have"
        raise TierForceError(
            f"{counted(cut, 'answer')} {have} an error in place of data; the records in "
            f"{results.records.path} say why."
        )
