"""Batch summaries: documents in, one durable record each out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from decoding.app.batch.documents import SUFFIXES, Document, find_documents
from decoding.app.batch.job import Job, model_digest, model_name
from decoding.app.batch.records import Records
from decoding.app.options import Common, as_flags
from decoding.app.terminal.messages import Longest, describe, say_what_fits
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts, culprit
from decoding.app.terminal.streams import say, silence_transformers, warn
from decoding.config.defaults import MAX_TEXTS
from decoding.engine.engine import Engine
from decoding.engine.request import Request
from decoding.engine.scheduler import Written
from decoding.engine.stats import Stats
from decoding.speculation.sampling import Sampling
from decoding.text.prompt import Template
from offload.errors import DocumentError, FitError, TierForceError
from parallel.model.loading import resolve
from parallel.ranks.process_group import Group


def run(
    common: Common,
    source: Path,
    output: Path,
    instruction: str,
    at_once: int | None,
    interrupts: Interrupts,
) -> None:
    """Summarise the documents of `source` into `output`; every rank calls it.

    `at_once` documents share the memory; None for as many as do so at no cost to each. Raises
    TierForceError for what keeps the job from starting, and at its end where documents failed.
    """
    silence_transformers()
    group = Group.from_environment(common.device, warn)
    documents: list[Document] = []
    with group.together():
        if group.rank == 0:
            documents = listed(source, output)
    folder = resolve(common.model, group)
    with ExitStack() as files:
        records = None
        due: list[Document] = []
        with group.together():
            job = job_of(common, folder, instruction)
            if group.rank == 0:
                records = files.enter_context(Records(output))
                due = due_documents(documents, records, job)
        if group.broadcast(not due):
            say(f"all {len(documents)} documents were finished before, in {output}")
            return
        if records is not None:
            warn_of_changed(due, records)
        engine = Engine.from_pretrained(folder, common.draft, common.settings, group=group)
        with group.together():
            template = Template.summary(engine.tokenizer, instruction)
        longest = longest_prompt(engine, due, template, common.max_new_tokens)
        longest, count = group.broadcast((longest, len(due)))
        at_once = min(count, at_once or texts_at_once(engine, longest, common.max_new_tokens))
        say_what_fits(engine, longest, common, at_once)
        if records is None:
            engine.follow()
            return
        with Display(len(documents), sys.stderr) as display:
            interrupts.last_words = last_words(records, display)
            summaries = Summaries(engine, records, template, job, display, at_once)
            show_finished(documents, due, display)
            failed = summaries.write(due)
        engine.close()
    say_what_is_done(documents, records, failed, engine.context)


def listed(source: Path, output: Path) -> list[Document]:
    """List the documents, and say how many files are none. Raises as `find_documents` does."""
    listing = find_documents(source, output)
    if listing.skipped:
        say(f"skipped {listing.skipped} files that are not {' or '.join(SUFFIXES)}")
    if listing.unread:
        warn(
            f"{len(listing.unread)} folders or links in {source} cannot be read, first "
            f"{listing.unread[0]}: what lies there is left out."
        )
    return listing.documents


def job_of(common: Common, folder: Path, instruction: str) -> Job:
    """Return what is asked of every document."""
    return Job(
        model=model_name(common.model),
        draft=model_name(common.draft) if common.draft is not None else None,
        weights=model_digest(folder),
        instruction=instruction,
        max_new_tokens=common.max_new_tokens,
        context=common.settings.context,
        dtype=common.settings.dtype,
        rope=common.settings.rope,
        sampling=Sampling(**vars(common.sampling)),
        identical=common.settings.identical,
    )


def warn_of_changed(due: Sequence[Document], records: Records) -> None:
    """Say which records an earlier job of another kind has left."""
    if changed := sum(document.id in records.finished for document in due):
        warn(
            f"{changed} finished records in {records.path} are of another text, instruction, model "
            "or sampling law: these documents are summarised again, and their old records stay."
        )


def show_finished(documents: Sequence[Document], due: Sequence[Document], display: Display) -> None:
    """Show which documents are not due."""
    wanted = {document.id for document in due}
    for document in documents:
        if document.id not in wanted:
            display.end(document.id, f"{document.id}: finished before, skipped")


def last_words(records: Records, display: Display) -> Callable[[str], None]:
    """Return what a job says when a signal ends it."""

    def say_last_words(name: str) -> None:
        display.stop()
        safe = f"{len(records.finished)} finished records are safe in {records.path}"
        say(f"interrupted ({culprit(name)}); {safe}: run the same command to go on")

    return say_last_words


def say_what_is_done(
    documents: Sequence[Document], records: Records, failed: int, context: int
) -> None:
    """Say how the batch went. Raises TierForceError where documents failed."""
    finished = [records.finished.get(document.id) for document in documents]
    cut = sum(record.cut for record in finished if record is not None)
    done = f"{len(documents) - failed} of {len(documents)} documents summarised in {records.path}"
    if cut:
        done += f", {cut} of them cut: their ends are beyond the context of {context:,} tokens"
    say(done)
    if failed:
        raise TierForceError(
            f"{failed} of {len(documents)} documents failed; their records in {records.path} say "
            "why."
        )


def longest_prompt(
    engine: Engine, documents: Sequence[Document], template: Template, new: int
) -> Longest | None:
    """Find the largest document that can be read; None where none can."""
    for document in sorted(documents, key=lambda document: document.size, reverse=True):
        try:
            return Longest(
                document.id,
                len(template.fill(engine.tokenizer, document.read(), engine.context - new)[0]),
            )
        except DocumentError:
            continue
    return None


def due_documents(documents: Sequence[Document], records: Records, job: Job) -> list[Document]:
    """Return those without a finished record of this very job: the same text, asked of the same
    model, by the same law.
    """
    due = []
    for document in documents:
        if (finished := records.finished.get(document.id)) is not None:
            try:
                if finished.digest in (None, job.digest(document.read())):
                    continue
            except DocumentError:  # it could be read once; its new record will tell
                pass
        due.append(document)
    return due


def texts_at_once(engine: Engine, longest: Longest | None, new: int) -> int:
    """Return how many documents share the memory at no cost to each; all ranks call it."""
    if longest is None:
        return 1
    try:
        return engine.texts_that_fit(longest.tokens, new, MAX_TEXTS)
    except FitError:
        return 1


class Text(Protocol):
    """A document, wherever its text is."""

    @property
    def id(self) -> str: ...

    def read(self) -> str:
        """Return the text. Raises DocumentError."""
        ...


class Sink(Protocol):
    """What takes records, each as soon as it is there."""

    def append(self, record: dict[str, Any]) -> None: ...


class Shown(Protocol):
    """What shows how far documents are (`Display`)."""

    def begin(self, name: str) -> None: ...

    def prefill(self, name: str, done: int, total: int) -> None: ...

    def decode(self, name: str, most: int, stats: Stats) -> None: ...

    def end(self, name: str, line: str) -> None: ...

    def warn(self, line: str) -> None: ...


class Summaries:
    """Summaries of one job, each with a record as soon as it is done; on rank 0.

    A document that cannot be processed gets a record with `error` in place of `summary`, and the
    batch goes on.
    """

    def __init__(
        self,
        engine: Engine,
        records: Sink,
        template: Template,
        job: Job,
        display: Shown,
        at_once: int,
    ):
        self.engine, self.records, self.template, self.job = engine, records, template, job
        self.display, self.at_once = display, at_once
        self.failed = 0
        self._documents: dict[int, tuple[Text, str]] = {}  # with its text, by request

    def write(self, due: Sequence[Text]) -> int:
        """Summarise these documents; return how many failed. Raises RankLost."""
        for written in self.engine.write(self._requests(due), self.at_once):
            document, text = self._documents.pop(id(written.request))
            if written.error is not None:
                self._fail(document, written.error)
                continue
            self.records.append(self._record(document, text, written))
            self.display.end(document.id, f"{document.id}: {describe(written.stats)}")
        return self.failed

    def _requests(self, due: Sequence[Text]) -> Iterator[Request]:
        """Yield what is asked of each document, read when there is room for it."""
        new = self.job.max_new_tokens
        for document in due:
            self.display.begin(document.id)
            try:
                text = document.read()
                room = self.engine.context - new
                prompt, dropped = self.template.fill(self.engine.tokenizer, text, room)
            except TierForceError as error:
                self._fail(document, error)
                continue
            if dropped:
                self.display.warn(
                    f"{document.id}: longer than the context of {self.engine.context} tokens; the "
                    f"last {dropped} tokens were dropped"
                )
            request = Request(
                prompt,
                new,
                self.job.sampling,
                dropped,
                partial(self.display.prefill, document.id),
                document.id,
                partial(self.display.decode, document.id, new),
            )
            self._documents[id(request)] = document, text
            yield request

    def _fail(self, document: Text, error: TierForceError) -> None:
        record = error_record(document.id, error)
        self.failed += 1
        self.records.append(record)
        self.display.end(document.id, f"{document.id}: failed: {record['error']}")

    def _record(self, document: Text, text: str, written: Written) -> dict[str, Any]:
        engine = self.engine
        device = engine.group.device
        return {
            "id": document.id,
            "summary": engine.tokenizer.decode(written.tokens, skip_special_tokens=True).strip(),
            **written.stats.as_dict(),
            "dropped_tokens": written.request.dropped,
            **self.job.as_dict(),
            "dtype": str(engine.runtime.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": engine.group.size,
            "date": _now(),
            "digest": self.job.digest(text),
            "versions": versions(),
        }


def error_record(id: str, error: TierForceError) -> dict[str, Any]:
    """Return the record of a document that has failed."""
    return {
        "id": id,
        "error": as_flags(str(error)),
        "kind": type(error).__name__,
        "date": _now(),
        "versions": versions(),
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of what the numbers and the text depend on."""
    found = {}
    for name in ("tierforce", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
