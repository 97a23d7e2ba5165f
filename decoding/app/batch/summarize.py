"""Batch summaries: documents in, one durable record each out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoding.app.batch.documents import SUFFIXES, Document, find_documents
from decoding.app.batch.job import BatchJob, model_digest, model_name
from decoding.app.batch.records import Records
from decoding.app.environment import installed_version
from decoding.app.options import Common, as_flags
from decoding.app.terminal.messages import Longest, say_what_fits, summary_line
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts, signal_source
from decoding.app.terminal.streams import say, silence_transformers, warn
from decoding.config.defaults import MAX_CONCURRENCY
from decoding.engine.engine import Engine
from decoding.engine.request import Request
from decoding.engine.scheduler import Completion
from decoding.text.prompt import Template
from offload.dtypes import dtype_name
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup


def run(
    common: Common,
    source: Path,
    output: Path,
    instruction: str,
    concurrency: int | None,
    interrupts: Interrupts,
) -> None:
    """Summarise the documents of `source` into `output`; every rank calls it.

    `concurrency` documents share the memory; None for as many as do so at no cost to each. Raises
    TierForceError for what keeps the job from starting, and at its end where documents failed.
    """
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    documents: list[Document] = []
    with group.sync_errors():
        if group.rank == 0:
            documents = listed(source, output)
    folder = resolve(common.model, group)
    with ExitStack() as files:
        records = None
        due: list[Document] = []
        with group.sync_errors():
            job = job_of(common, folder, instruction)
            if group.rank == 0:
                records = files.enter_context(Records(output))
                due = due_documents(documents, records, job)
        if group.broadcast(not due):
            say(f"all {len(documents)} documents were finished before, in {output}")
            return
        engine = Engine.from_pretrained(folder, common.draft, common.settings, group=group)
        with group.sync_errors():
            template = Template.summary(engine.tokenizer, instruction)
        longest = longest_prompt_tokens(engine, due, template, common.max_new_tokens)
        longest, count = group.broadcast((longest, len(due)))
        concurrency = min(
            count, concurrency or choose_concurrency(engine, longest, common.max_new_tokens)
        )
        say_what_fits(engine, longest, common, concurrency)
        if records is None:
            engine.run_worker()
            return
        with Display(len(documents), sys.stderr) as display:
            results = Results(documents, due, records, display)
            interrupts.last_words = results.last_words
            summaries = Summaries(engine, template, job, concurrency, display, results.add)
            summaries.write({document.id: document.read for document in due})
        engine.close()
    results.conclude(engine.context)


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


def job_of(common: Common, folder: Path, instruction: str) -> BatchJob:
    """Return what is asked of every document."""
    return BatchJob(
        model=model_name(common.model),
        draft=model_name(common.draft) if common.draft is not None else None,
        weights=model_digest(folder),
        instruction=instruction,
        max_new_tokens=common.max_new_tokens,
        context=common.settings.context,
        dtype=common.settings.dtype,
        rope=common.settings.rope,
        sampling=common.sampling,
        deterministic=common.settings.deterministic,
    )


class Results:
    """What has become of the documents of a batch: records on disk, and lines on the screen."""

    def __init__(
        self,
        documents: Sequence[Document],
        due: Sequence[Document],
        records: Records,
        display: Display,
    ):
        """Show which of the documents are not due."""
        self.documents, self.records, self.display = documents, records, display
        self.failed = 0
        is_due = {document.id for document in due}
        for document in documents:
            if document.id not in is_due:
                display.end(document.id, f"{document.id}: finished before, skipped")

    def add(self, record: dict[str, Any], line: str) -> None:
        """Take the record of a document, and what is said of it. Raises TierForceError."""
        self.failed += "error" in record
        self.records.append(record)
        self.display.end(record["id"], f"{record['id']}: {line}")

    def last_words(self, name: str) -> None:
        """Say how far the batch is that a signal ends."""
        self.display.stop()
        safe = f"{len(self.records.finished)} finished records are safe in {self.records.path}"
        say(f"interrupted ({signal_source(name)}); {safe}: run the same command to go on")

    def conclude(self, context: int) -> None:
        """Say how the batch went. Raises TierForceError where documents failed."""
        finished = [self.records.finished.get(document.id) for document in self.documents]
        cut = sum(record.cut for record in finished if record is not None)
        count, path = len(self.documents), self.records.path
        done = f"{count - self.failed} of {count} documents summarised in {path}"
        if cut:
            done += f", {cut} of them cut: their ends are beyond the context of {context:,} tokens"
        say(done)
        if self.failed:
            raise TierForceError(
                f"{self.failed} of {count} documents failed; their records in {path} say why."
            )


def longest_prompt_tokens(
    engine: Engine, documents: Sequence[Document], template: Template, new: int
) -> Longest | None:
    """Find the largest document that can be read; None where none can."""
    for document in sorted(documents, key=lambda document: document.size, reverse=True):
        try:
            return Longest(
                document.id,
                len(template.build(engine.tokenizer, document.read(), engine.context - new)[0]),
            )
        except InvalidRequestError:
            continue
    return None


def due_documents(documents: Sequence[Document], records: Records, job: BatchJob) -> list[Document]:
    """Return those without a finished record of this very job: the same text, asked of the same
    model, by the same law.

    Warns of records that an earlier job of another kind has left.
    """
    due, changed = [], 0
    for document in documents:
        if (finished := records.finished.get(document.id)) is not None:
            with suppress(InvalidRequestError):  # it could be read once; its new record will tell
                if finished.digest in (None, job.digest(document.read())):
                    continue
            changed += 1
        due.append(document)
    if changed:
        warn(
            f"{changed} finished records in {records.path} are of another text, instruction, model "
            "or sampling law: these documents are summarised again, and their old records stay."
        )
    return due


def choose_concurrency(engine: Engine, longest: Longest | None, new: int) -> int:
    """Return how many documents share the memory at no cost to each; all ranks call it."""
    if longest is None:
        return 1
    try:
        return engine.max_concurrency(longest.tokens, new, MAX_CONCURRENCY)
    except InsufficientMemoryError:
        return 1


class Summaries:
    """Summaries of one job, each with a record as soon as it is done; on rank 0.

    A document that cannot be processed gets a record with `error` in place of `summary`, and the
    batch goes on.
    """

    def __init__(
        self,
        engine: Engine,
        template: Template,
        job: BatchJob,
        concurrency: int,
        display: Display,
        done: Callable[[dict[str, Any], str], None],
    ):
        """`done` takes the record of each document, and what is said of it."""
        self.engine, self.template, self.job = engine, template, job
        self.concurrency, self.display, self.done = concurrency, display, done
        self._digests: dict[str, str] = {}

    def write(self, texts: Mapping[str, Callable[[], str]]) -> None:
        """Summarise documents, given by their ids what reads each. Raises RankLost."""
        for written in self.engine.generate_batch(self._requests(texts), self.concurrency):
            if written.error is not None:
                self.done(*failure(written.request.name, written.error))
            else:
                self.done(self._record(written), summary_line(written.stats))

    def _requests(self, texts: Mapping[str, Callable[[], str]]) -> Iterator[Request]:
        """Yield what is asked of each document, read when there is room for it."""
        new, context = self.job.max_new_tokens, self.engine.context
        for id, read in texts.items():
            self.display.begin(id)
            try:
                text = read()
                prompt, dropped = self.template.build(self.engine.tokenizer, text, context - new)
            except TierForceError as error:
                self.done(*failure(id, error))
                continue
            if dropped:
                self.display.warn(
                    f"{id}: longer than the context of {context} tokens; the last {dropped} tokens "
                    "were dropped"
                )
            self._digests[id] = self.job.digest(text)
            yield Request(
                prompt,
                new,
                self.job.sampling,
                dropped,
                partial(self.display.prefill, id),
                id,
                partial(self.display.decode, id, new),
            )

    def _record(self, written: Completion) -> dict[str, Any]:
        engine, id = self.engine, written.request.name
        device = engine.group.device
        return {
            "id": id,
            "summary": engine.tokenizer.decode(written.tokens, skip_special_tokens=True).strip(),
            **written.stats.as_dict(),
            "truncated_tokens": written.request.truncated_tokens,
            **self.job.as_dict(),
            "dtype": dtype_name(engine.runtime.dtype),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": engine.group.size,
            "date": _now(),
            "digest": self._digests.pop(id),
            "versions": versions(),
        }


def failure(id: str, error: TierForceError) -> tuple[dict[str, Any], str]:
    """Return the record of a document that has failed, and what is said of it."""
    reason = as_flags(str(error))
    record = {
        "id": id,
        "error": reason,
        "kind": type(error).__name__,
        "date": _now(),
        "versions": versions(),
    }
    return record, f"failed: {reason}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of what the numbers and the text depend on."""
    return {name: installed_version(name) for name in ("tierforce", "torch", "transformers")}
