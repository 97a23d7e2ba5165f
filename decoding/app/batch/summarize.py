"""Batch summaries: one durable record per document."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from decoding.app.batch.assignment import Assignment
from decoding.app.batch.documents_in_progress import DocumentsInProgress, Work, description
from decoding.app.batch.job import BatchJob, model_digest, model_name
from decoding.app.batch.report import Report, conclude_finished
from decoding.app.documents.document import Document, DocumentText
from decoding.app.documents.listing import find_documents
from decoding.app.options import Common
from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.results.records import Records
from decoding.app.terminal.loading import load_engine
from decoding.app.terminal.messages import (
    LongestDocument,
    counts_line,
    fitting_concurrency,
    say_what_fits,
)
from decoding.app.terminal.pace import Pace, Size
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts
from decoding.app.terminal.streams import counted, say, silence_transformers, warn
from decoding.engine.engine import Engine
from decoding.engine.request import Request, RequestState
from decoding.engine.stats import Stats
from decoding.text.long_text import PromptBuilder
from decoding.text.tools.channels import answer_text
from offload.dtypes import dtype_name
from offload.errors import InvalidRequestError, TierForceError
from offload.layout import ceil_div
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
    destination: Destination,
    assignment: Assignment,
    concurrency: int | None,
    interrupts: Interrupts,
) -> None:
    """Summarise the documents of `source` into `destination`; every rank calls it.

    `concurrency` requests are decoded together; None for as many as fit at no cost to each. Raises
    TierForceError if the job cannot start, and at the end if documents failed.
    """
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    documents: list[Document] = []
    with group.sync_errors():
        if group.rank == 0:
            documents = list_documents(source, destination)
            say_assignment(assignment, common)
    folder = resolve(common.model, group)
    with ExitStack() as files:
        results = None
        due: list[Document] = []
        with group.sync_errors():
            job = make_job(common, folder, assignment)
            if group.rank == 0:
                ids = [document.id for document in documents]
                results = files.enter_context(ResultFiles(destination, ids))
                due = due_documents(documents, results.records, job)
                if due:
                    results.start()
        if group.broadcast(not due):
            if results is not None:
                conclude_finished(documents, results)
            return
        engine = load_engine(common, group, folder)
        with group.sync_errors():
            engine.grammars.compile_optional(job.grammar)
            builder = PromptBuilder(
                engine.tokenizer, job.format, engine.context, job.max_new_tokens
            )
        with group.sync_errors():
            longest = longest_document(due, builder, job)
        longest, count = group.broadcast((longest, len(due)))
        if longest is not None:
            count *= longest.prompts  # more than there are, mostly
        concurrency = min(
            count,
            concurrency
            or fitting_concurrency(engine, longest.tokens if longest else 0, common.max_new_tokens),
        )
        say_what_fits(engine, longest, common, concurrency)
        if results is None:
            engine.run_worker()
            return
        with make_display(documents, due, job) as display:
            report = Report(documents, due, results, display)
            interrupts.on_exit = report.interrupt
            progress = DocumentsInProgress(
                builder, job, results.records.parts, report.add, report.progress
            )
            summaries = Summaries(engine, progress, job, concurrency, display)
            summaries.generate({document.id: document.read for document in due})
        engine.close()
        report.conclude(engine.context)


def list_documents(source: Source, destination: Destination) -> list[Document]:
    """Return the documents, and print which files are skipped and which fields are not read.

    Raises as `find_documents`, and if the input is in the folder of results.
    """
    destination.check_input(source.path)
    own = {destination.path, destination.records}
    listing = find_documents(source.path, own, source.include)
    if listing.unknown_fields:
        fields = [
            f'"{name}" ({counted(count, "line")})' for name, count in listing.unknown_fields.items()
        ]
        warn(
            f"{source.path} has fields that are not read: {_joined(fields)}. A line has id and "
            "text, and may have instruction or questions."
        )
    for reason, names in listing.skipped.items():
        say(f"skipped, {reason}: {_joined(names)}")
    if listing.unreadable:
        names = [str(path) for path in listing.unreadable]
        warn(f"folders or links that cannot be read are skipped: {_joined(names)}")
    return listing.documents


def _joined(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def say_assignment(assignment: Assignment, common: Common) -> None:
    """Print how many questions are asked, and what makes them slow."""
    instructions = assignment.instructions
    if instructions.are_questions:
        say(f"{counted(len(instructions.strings), 'question')} about each document")
    for line in assignment.warnings(common.settings.deterministic):
        warn(line)


def make_job(common: Common, folder: Path, assignment: Assignment) -> BatchJob:
    """Return the settings that all documents of a batch share."""
    return BatchJob(
        model=model_name(common.model),
        draft=model_name(common.draft) if common.draft is not None else None,
        weights=model_digest(folder),
        instructions=assignment.instructions,
        format=assignment.format,
        max_new_tokens=common.max_new_tokens,
        context=common.settings.context,
        dtype=common.settings.dtype,
        rope=common.settings.rope,
        sampling=common.sampling,
        deterministic=common.settings.deterministic,
        splits=assignment.splits,
    )


def longest_document(
    documents: Sequence[Document], builder: PromptBuilder, job: BatchJob
) -> LongestDocument | None:
    """Return the longest of the largest text and the largest few of other formats, whose size says
    less; None if they cannot be read.
    """
    by_size = sorted(documents, key=lambda document: document.size, reverse=True)
    longest, longest_tokens = None, 0
    for is_text in (True, False):
        largest = (document for document in by_size if document.is_text == is_text)
        for document in islice(largest, None if is_text else _CANDIDATES):
            with suppress(InvalidRequestError):
                found = document.read()
                own = found.identity.instructions or job.instructions
                tokens, (prompt,), _ = builder.sizes(found.text, own, splits=False)
                if tokens > longest_tokens:
                    longest_tokens = tokens
                    # parts leave some room free
                    parts = ceil_div(tokens, prompt) + 1 if job.splits and tokens > prompt else 1
                    count = max(len(own.strings), len(job.instructions.strings))
                    longest = LongestDocument(document.id, prompt, parts * count)
                if is_text:
                    break
    return longest


def due_documents(documents: Sequence[Document], records: Records, job: BatchJob) -> list[Document]:
    """Return the documents without a finished record of this job: the same text, model,
    instructions, sampling, and treatment of documents longer than the context.

    Warns about finished records with other settings.
    """

    def is_unchanged(document: Document) -> bool:
        record = records.finished[document.id]
        with suppress(InvalidRequestError):  # no longer readable: its new record will say why
            identity = document.identify()
            own = identity.instructions or job.instructions
            is_same = record.digest in (None, job.digest(identity.digest, own))
            return is_same and job.is_current(record, own)
        return False

    finished = [document for document in documents if document.id in records.finished]
    unchanged = {document: is_unchanged(document) for document in finished}
    due = [document for document in documents if not unchanged.get(document)]
    for document in set(documents).difference(due):
        records.parts.finish(document.id)
    outdated = len(finished) - sum(unchanged.values())
    if outdated:
        warn(
            f"{outdated} finished records in {records.path} are of another text, instruction, "
            "question, template, system message, schema, model, sampling or --long: their "
            "documents are processed again, and the old records stay."
        )
    return due


@dataclass(frozen=True)
class _WorkRequest(Request):
    """A request for a task of a document."""

    work: Work | None = None


class Summaries:
    """Gives the tasks of documents in progress to an engine, as soon as it has room; on rank 0."""

    def __init__(
        self,
        engine: Engine,
        progress: DocumentsInProgress,
        job: BatchJob,
        concurrency: int,
        display: Display,
    ):
        self.engine, self.progress, self.job = engine, progress, job
        self.concurrency, self.display = concurrency, display

    def generate(self, readers: Mapping[str, Callable[[], DocumentText]]) -> None:
        """Summarise documents; `readers` maps ids to functions that read them. Raises RankLost."""
        for state in self.engine.generate_batch(self._requests(readers), self.concurrency):
            assert isinstance(state.request, _WorkRequest)
            work = state.request.work
            assert work is not None
            if state.error is not None:
                self.progress.fail(work, *description(state.error))
                self.display.remove(work.name)
                continue
            answer = answer_of(self.engine, state)
            report_answer(work.name, answer, self.display, is_part=bool(work.task.name))
            self.display.pace.finish(work.document, work.name, answer)
            self.progress.finish(work, answer)

    def _requests(
        self, readers: Mapping[str, Callable[[], DocumentText]]
    ) -> Iterator[Request | None]:
        """Yield the requests of each document, once the engine has room for them; None while tasks
        depend on others that are being processed.
        """
        for id, read in _read_ahead(readers):
            yield from self._ready()
            self.display.begin(id)
            begin(self.progress, id, read, self.engine.context, self.display)
        while self.progress:
            yield from self._ready()
            yield None

    def _ready(self) -> Iterator[Request]:
        """Yield a request for each task that can be processed now."""
        grammar = self.engine.grammars.compile_optional(self.job.grammar)
        for work in self.progress.work():
            if work.task.name:
                self.display.begin(work.name)
            begin_request(self.display.pace, work)
            yield _WorkRequest(
                work.prompt.tolist(),
                self.job.max_new_tokens,
                self.job.sampling,
                work.truncated_tokens,
                partial(self._on_prefill, work),
                work.name,
                partial(self._on_stats, work),
                room=work.task.room,
                shared=work.task.shared(work.prompt),
                grammar=grammar if work.task.is_last else None,
                work=work,
            )

    def _on_prefill(self, work: Work, done: int, total: int) -> None:
        self.display.pace.prefill(work.document, work.name, done / total)
        self.display.prefill(work.name, done, total)

    def _on_stats(self, work: Work, stats: Stats) -> None:
        cached = stats.reused_tokens + stats.loaded_tokens
        self.display.pace.decode(work.document, work.name, stats.new_tokens, cached)
        self.display.decode(work.name, self.job.max_new_tokens, stats)


def make_display(
    documents: Sequence[Document],
    due: Sequence[Document],
    job: BatchJob,
    is_live: bool = True,
) -> Display:
    """Return the display of a batch; `is_live` as in `Pace`."""
    sizes = {each.id: Size(each.size, each.named_kind, each.is_text) for each in due}
    pace = Pace(sizes, job.max_new_tokens, is_live)
    return Display(len(documents), sys.stderr, len(documents) - len(due), pace)


def begin_request(pace: Pace, work: Work) -> None:
    """Let the pace of a batch count a request for a task."""
    truncated = work.truncated_tokens
    pace.request(work.document, work.name, len(work.prompt), work.reads, truncated)


def begin(
    progress: DocumentsInProgress,
    id: str,
    read: Callable[[], DocumentText],
    context: int,
    display: Display,
) -> None:
    """Begin a document, and warn about what it lacks; record an error if it cannot be read."""
    try:
        document = read()
    except TierForceError as error:
        progress.record_error(id, *description(error))
        return
    display.pace.begin(id, len(document.text))
    if document.warning is not None:
        display.warn(f"{id}: {document.warning}")
    if truncated_tokens := progress.begin(id, document):
        display.warn(
            f"{id}: longer than the context of {context} tokens: the last {truncated_tokens} "
            "tokens were dropped"
        )


def report_answer(name: str, answer: Mapping[str, Any], display: Display, is_part: bool) -> None:
    """Warn if none of an answer's tokens are for the reader; print the line of a part."""
    if answer["new_tokens"] and not answer["summary"]:
        display.warn(
            f"{name}: none of its {answer['new_tokens']} new tokens are for the reader, perhaps "
            "because they ended within the model's reasoning. Use more --max-new-tokens."
        )
    if is_part:
        display.remove(name)
        display.say(f"{name}: {counts_line(answer)}")


def answer_of(engine: Engine, state: RequestState) -> dict[str, Any]:
    """Return the answer of a finished request, its counts and the engine's, for a record."""
    device = engine.group.device
    return {
        "summary": answer_text(engine.tokenizer, state.tokens).strip(),
        **state.stats.as_dict(),
        "dtype": dtype_name(engine.runtime.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": engine.group.size,
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
