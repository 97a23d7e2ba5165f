"""The documents of a batch beforehand: their tokens and parts, and the predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from decoding.app.documents.listing import find_documents
from decoding.app.hardware.document_times import DocumentTimes
from decoding.app.hardware.plan_view import Plans
from decoding.app.options import as_flags
from decoding.app.terminal.pace import duration
from decoding.app.terminal.streams import counted, printable
from decoding.models.loading import load_tokenizer
from decoding.planning.planner import Planner
from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.long_text import PromptBuilder
from offload.errors import InvalidRequestError, TierForceError
from parallel.formats.locate import find_local


@dataclass(frozen=True)
class InputDocument:
    """A document, and the tokens of its prompts; or why it cannot be read or processed."""

    id: str
    tokens: int = 0  # tokens of the document as one prompt
    parts: tuple[int, ...] = ()  # tokens of each part's prompt
    merges: tuple[int, ...] = ()  # tokens of each prompt that merges answers, at most
    answers: int = 1  # questions, or one summary
    seconds: float = 0.0  # predicted
    error: str | None = None


class InputPlan:
    """The documents of an input, for a model."""

    def __init__(
        self,
        source: Path,
        include: Sequence[str],
        model: str,
        instructions: Instructions,
        splits: bool,
    ):
        """List the documents, and load the model's tokenizer. Raises TierForceError."""
        listing = find_documents(source, include=include)
        self._sources, self._splits = listing.documents, splits
        self._instructions = instructions
        skipped = sum(map(len, listing.skipped.values())) + len(listing.unreadable)
        self.notes = [f"files that summarize would leave out: {skipped:,}"] if skipped else []
        if listing.unknown_fields:
            names = ", ".join(f'"{name}"' for name in listing.unknown_fields)
            self.notes.append(f"fields that are not read: {names}")
        path = find_local(model) or Path(model)
        self._tokenizer = load_tokenizer(path.parent if path.suffix == ".json" else path)
        self.documents: list[InputDocument] = []
        self.concurrency = 1

    def read(self, context: int, max_new_tokens: int) -> int:
        """Read the documents; return the tokens of the longest prompt, 0 if none can be read.

        Raises TierForceError if the tokenizer is unusable.
        """
        builder = PromptBuilder(self._tokenizer, PromptFormat(), context, max_new_tokens)
        for source in self._sources:
            try:
                found = source.read()
                own = found.identity.instructions or self._instructions
                sizes = builder.sizes(found.text, own, self._splits)
                self.documents.append(InputDocument(source.id, *sizes, len(own.strings)))
            except InvalidRequestError as error:
                reason = as_flags(str(error))
                self.documents.append(InputDocument(source.id, error=reason))
        return max(max((*each.parts, *each.merges), default=0) for each in self.documents)

    def predicted(self, planner: Planner, plans: Plans) -> InputPlan:
        """Return it with the seconds of each document, if it shares forwards as `plans.shared`."""
        prompts = sum(len(each.parts) * each.answers for each in self.documents)
        other = copy(self)
        other.concurrency = min(plans.shared.concurrency, max(1, prompts))
        times = DocumentTimes(planner, plans.best, other.concurrency)
        other.documents = [
            replace(each, seconds=times.seconds(each.parts, each.merges, each.answers))
            for each in self.documents
        ]
        return other

    def check(self) -> None:
        """Raise TierForceError if there are documents, and all fail."""
        if self.documents and all(each.error is not None for each in self.documents):
            raise TierForceError(
                "no document of the input can be summarised: see the reason of each."
            )

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of all documents."""
        return sum(each.seconds for each in self.documents)

    def table(self) -> Table:
        """Return a row per document, and their sums."""
        title = "The documents, each answer as long as it may be. Times are predicted:"
        table = Table(title=title, title_justify="left", box=None)
        table.add_column("")
        has_questions = any(each.answers > 1 for each in self.documents)
        for name in ("tokens", "parts", *(["answers"] if has_questions else []), "time"):
            table.add_column(name, justify="right")
        for each in self.documents:
            name = escape(printable(each.id))
            if each.error is not None:
                blank = [""] * (len(table.columns) - 2)
                table.add_row(f"{name}: {escape(printable(each.error))}", *blank, "fails")
            else:
                is_cut = len(each.parts) == 1 and each.parts[0] < each.tokens
                parts = "its beginning" if is_cut else f"{len(each.parts)}"
                answers = [f"{each.answers}"] if has_questions else []
                table.add_row(name, f"{each.tokens:,}", parts, *answers, duration(each.seconds))
        table.add_section()
        readable = sum(each.error is None for each in self.documents)
        label = counted(readable, "document")
        if self.concurrency > 1:
            label += f", {self.concurrency} at a time"
        tokens = sum(each.tokens for each in self.documents)
        count = sum(len(each.parts) for each in self.documents)
        asked = sum(each.answers for each in self.documents if each.error is None)
        total = [f"{asked:,}"] if has_questions else []
        table.add_row(label, f"{tokens:,}", f"{count:,}", *total, duration(self.seconds))
        return table

    def as_dict(self) -> dict[str, Any]:
        """Return the documents and their sums, for JSON."""
        return {
            "documents": [asdict(each) for each in self.documents],
            "concurrency": self.concurrency,
            "seconds": self.seconds,
        }
