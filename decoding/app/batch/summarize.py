"""Batch summaries: one durable record per document."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from decoding.app.batch.job import BatchJob, model_digest, model_name
from decoding.app.batch.records import Records
from decoding.app.documents.document import Document, DocumentText
from decoding.app.documents.listing import find_documents
from decoding.app.environment import installed_version
from decoding.app.options import Common, as_flags
from decoding.app.terminal.messages import (
    LongestDocument,
    fitting_concurrency,
    say_what_fits,
    summary_line,
)
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts, signal_source
from decoding.app.terminal.streams import say, silence_transformers, warn
from decoding.engine.engine import Engine
from decoding.engine.request import Request, RequestState
from decoding.text.channels import answer_text
from decoding.text.prompt import Template
from offload.dtypes import dtype_name
from offload.errors import InvalidRequestError, TierForceError
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

_MAX_NAMES = 100  # skipped files shown per reason
_CANDIDATES = 3  # documents of other formats than text that are read to find the longest


@dataclass(frozen=True)
class Source:
    """Where documents are, and patterns of the files that are documents; by default by suffix."""

    path: Path
    include: Sequence[str] = ()


def run(
    common: Common,
    source: Source,
    output: Path,
    instruction: str,
    concurrency: int | None,
    interrupts: Interrupts,
) -> None:
    """Summarise the documents of `source` into `output`; every rank calls it.

    `concurrency` documents are decoded together; None for as many as fit at no cost to each. Raises
    TierForceError if the job cannot start, and at the end if documents failed.
    """
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    documents: list[Document] = []
    with group.sync_errors():
        if group.rank == 0:
            documents = list_documents(source, output)
    folder = resolve(common.model, group)
    with ExitStack() as files:
        records = None
        due: list[Document] = []
        with group.sync_errors():
            job = make_job(common, folder, instruction)
            if group.rank == 0:
                records = files.enter_context(Records(output))
                due = due_documents(documents, records, job)
        if group.broadcast(not due):
            say(f"all {len(documents)} documents are already finished in {output}")
            return
        engine = Engine.from_pretrained(folder, common.draft, common.settings, group=group)
        with group.sync_errors():
            template = Template.summary(engine.tokenizer, instruction)
        longest = longest_document(engine, due, template, common.max_new_tokens)
        longest, count = group.broadcast((longest, len(due)))
        concurrency = min(
            count,
            concurrency
            or fitting_concurrency(engine, longest.tokens if longest else 0, common.max_new_tokens),
        )
        say_what_fits(engine, longest, common, concurrency)
        if records is None:
            engine.run_worker()
            return
        with Display(len(documents), sys.stderr) as display:
            results = Results(documents, due, records, display)
            interrupts.on_exit = results.report_interrupt
            summaries = Summaries(engine, template, job, concurrency, display, results.add)
            summaries.generate({document.id: document.read for document in due})
        engine.close()
    results.conclude(engine.context)


def list_documents(source: Source, output: Path) -> list[Document]:
    """Return the documents, and print which files are skipped. Raises as `find_documents`."""
    listing = find_documents(source.path, output, source.include)
    for reason, names in listing.skipped.items():
        say(f"skipped, {reason}: {_joined(names)}")
    if listing.unreadable:
        names = [str(path) for path in listing.unreadable]
        warn(f"folders or links that cannot be read are skipped: {_joined(names)}")
    return listing.documents


def _joined(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def make_job(common: Common, folder: Path, instruction: str) -> BatchJob:
    """Return the settings that all documents of a batch share."""
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
    """The results of a batch: records on disk, and lines on the terminal."""

    def __init__(
        self,
        documents: Sequence[Document],
        due: Sequence[Document],
        records: Records,
        display: Display,
    ):
        """Print the names of the documents that are already finished."""
        self.documents, self.records, self.display = documents, records, display
        self.failed = 0
        is_due = {document.id for document in due}
        for document in documents:
            if document.id not in is_due:
                display.end(document.id, f"{document.id}: already finished, skipped")

    def add(self, record: dict[str, Any], line: str) -> None:
        """Write the record of a document, and print its line. Raises TierForceError."""
        self.failed += "error" in record
        self.records.append(record)
        self.display.end(record["id"], f"{record['id']}: {line}")

    def report_interrupt(self, name: str) -> None:
        """Print how many documents were finished when a signal ended the batch."""
        self.display.stop()
        safe = f"{len(self.records.finished)} finished records are safe in {self.records.path}"
        say(f"interrupted ({signal_source(name)}); {safe}: run the same command to resume")

    def conclude(self, context: int) -> None:
        """Print the totals of the batch. Raises TierForceError if documents failed."""
        finished = [self.records.finished.get(document.id) for document in self.documents]
        truncated = sum(record.is_truncated for record in finished if record is not None)
        count, path = len(self.documents), self.records.path
        line = f"{count - self.failed} of {count} documents summarised in {path}"
        if truncated:
            line += f", {truncated} of them truncated to the context of {context:,} tokens"
        say(line)
        if self.failed:
            raise TierForceError(
                f"{self.failed} of {count} documents failed; their records in {path} say why."
            )


def longest_document(
    engine: Engine, documents: Sequence[Document], template: Template, max_new_tokens: int
) -> LongestDocument | None:
    """Return the longest of the largest text and the largest few of other formats, whose size says
    less; None if they cannot be read.
    """
    max_prompt = engine.context - max_new_tokens
    by_size = sorted(documents, key=lambda document: document.size, reverse=True)
    longest: LongestDocument | None = None
    for is_text in (True, False):
        largest = (document for document in by_size if document.is_text == is_text)
        for document in islice(largest, None if is_text else _CANDIDATES):
            with suppress(InvalidRequestError):
                prompt, _ = template.build(engine.tokenizer, document.read().text, max_prompt)
                if longest is None or len(prompt) > longest.tokens:
                    longest = LongestDocument(document.id, len(prompt))
                if is_text:
                    break
    return longest


def due_documents(documents: Sequence[Document], records: Records, job: BatchJob) -> list[Document]:
    """Return the documents without a finished record of this job: the same text, model, instruction
    and sampling.

    Warns about finished records with other settings.
    """

    def is_unchanged(document: Document) -> bool:
        digest = records.finished[document.id].digest
        with suppress(InvalidRequestError):  # no longer readable: its new record will say why
            return digest is None or digest == job.digest(document.digest())
        return False

    finished = [document for document in documents if document.id in records.finished]
    unchanged = {document: is_unchanged(document) for document in finished}
    due = [document for document in documents if not unchanged.get(document)]
    outdated = len(finished) - sum(unchanged.values())
    if outdated:
        warn(
            f"{outdated} finished records in {records.path} are of another text, instruction, "
            "model or sampling: their documents are summarised again, and the old records stay."
        )
    return due


class Summaries:
    """The summaries of a batch, each recorded as soon as it is finished; on rank 0.

    The record of a failed document has `error` in place of `summary`, and the batch continues.
    """

    def __init__(
        self,
        engine: Engine,
        template: Template,
        job: BatchJob,
        concurrency: int,
        display: Display,
        on_record: Callable[[dict[str, Any], str], None],
    ):
        """`on_record` is called with each document's record and terminal line."""
        self.engine, self.template, self.job = engine, template, job
        self.concurrency, self.display, self.on_record = concurrency, display, on_record
        self._fields: dict[str, dict[str, Any]] = {}  # fields of records, by id

    def generate(self, readers: Mapping[str, Callable[[], DocumentText]]) -> None:
        """Summarise documents; `readers` maps ids to functions that read them. Raises RankLost."""
        for state in self.engine.generate_batch(self._requests(readers), self.concurrency):
            if state.error is not None:
                self.on_record(*failure(state.request.name, state.error))
            else:
                record = self._record(state)
                if not record["summary"] and state.tokens:
                    warn(
                        f"{record['id']}: none of its {len(state.tokens)} new tokens are for the "
                        "reader, perhaps because they ended within the model's reasoning. Use more "
                        "--max-new-tokens."
                    )
                self.on_record(record, summary_line(state.stats))

    def _requests(self, readers: Mapping[str, Callable[[], DocumentText]]) -> Iterator[Request]:
        """Yield a request per document, once the engine has room for it."""
        max_new_tokens, context = self.job.max_new_tokens, self.engine.context
        for id, read in _read_ahead(readers):
            self.display.begin(id)
            try:
                document = read()
                prompt, truncated_tokens = self.template.build(
                    self.engine.tokenizer, document.text, context - max_new_tokens
                )
            except TierForceError as error:
                self.on_record(*failure(id, error))
                continue
            if document.warning is not None:
                self.display.warn(f"{id}: {document.warning}")
            if truncated_tokens:
                self.display.warn(
                    f"{id}: longer than the context of {context} tokens: the last "
                    f"{truncated_tokens} tokens were dropped"
                )
            self._fields[id] = {
                "digest": self.job.digest(document.digest),
                "source": document.source,
            }
            yield Request(
                prompt,
                max_new_tokens,
                self.job.sampling,
                truncated_tokens,
                partial(self.display.prefill, id),
                id,
                partial(self.display.decode, id, max_new_tokens),
            )

    def _record(self, state: RequestState) -> dict[str, Any]:
        engine, id = self.engine, state.request.name
        device = engine.group.device
        return {
            "id": id,
            "summary": answer_text(engine.tokenizer, state.tokens).strip(),
            **state.stats.as_dict(),
            "truncated_tokens": state.request.truncated_tokens,
            **self.job.as_dict(),
            "dtype": dtype_name(engine.runtime.dtype),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": engine.group.size,
            "date": _timestamp(),
            **self._fields.pop(id),
            "versions": versions(),
        }


def _read_ahead(
    readers: Mapping[str, Callable[[], DocumentText]],
) -> Iterator[tuple[str, Callable[[], DocumentText]]]:
    """Yield each document with a function that returns its text, as the reader does.

    While a document is processed the next one is read: converting a large one takes seconds.
    """
    pool = ThreadPoolExecutor(1)
    ahead: tuple[str, Future[DocumentText]] | None = None
    try:
        for id, read in readers.items():
            current, ahead = ahead, (id, pool.submit(read))
            if current is not None:
                yield current[0], current[1].result
        if ahead is not None:
            yield ahead[0], ahead[1].result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def failure(id: str, error: TierForceError) -> tuple[dict[str, Any], str]:
    """Return the record and the terminal line of a failed document."""
    reason = as_flags(str(error))
    record = {
        "id": id,
        "error": reason,
        "kind": type(error).__name__,
        "date": _timestamp(),
        "versions": versions(),
    }
    return record, f"failed: {reason}"


def _timestamp() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine times and output."""
    return {name: installed_version(name) for name in ("tierforce", "torch", "transformers")}
