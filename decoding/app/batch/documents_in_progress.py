"""Documents of a batch from their text to their record, part by part; it knows no engine."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, cast

from decoding.app.batch.job import BatchJob
from decoding.app.documents.document import DocumentText
from decoding.app.environment import installed_version
from decoding.app.options import as_flags
from decoding.app.results.part_answers import DEVICE_FIELDS, FIELDS, SUMS, PartAnswers
from decoding.grammars.grammar import json_value
from decoding.text.instructions import Instructions
from decoding.text.long_text import PromptBuilder, Rounds, Task
from offload.errors import InvalidRequestError, TierForceError


@dataclass(frozen=True)
class Work:
    """A task of a document, to be given to an engine."""

    document: str  # id
    task: Task
    index: int  # in its round
    prompt: array[int]  # (T,) tokens
    truncated_tokens: int  # tokens dropped from the document
    digest: str  # `BatchJob.prompt_digest`
    reads: bool = True  # no earlier task has left its passage in a cache

    @property
    def name(self) -> str:
        """The name for people."""
        return self.task.name_in(self.document)


@dataclass
class _Outcome:
    """What there is so far of the answer to an instruction."""

    answer: dict[str, Any] = field(default_factory=dict)  # the last one
    parts: list[dict[str, Any]] = field(default_factory=list)  # parts in the record
    merges: list[dict[str, Any]] = field(default_factory=list)

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The counts of all its requests."""
        return [*self.parts, *self.merges] or [self.answer]


@dataclass
class _Document:
    """A document in progress."""

    fields: dict[str, Any]  # fields of its record
    instructions: Instructions
    rounds: Rounds
    outcomes: list[_Outcome]  # one for each instruction
    tasks: Sequence[Task] = ()  # those of the current round
    number: int = 0  # rounds that have begun
    passages: int = 1  # distinct contents of the tasks
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)  # keys are indices of tasks

    @property
    def ends(self) -> bool:
        """Whether it ends with the round, which is a single task."""
        return len(self.tasks) == 1 and self.tasks[0].is_last


class DocumentsInProgress:
    """The documents that are being summarised.

    A document gets one record, with `error` in place of `summary` if it fails. The answers about
    parts of documents are on disk before that (`PartAnswers`).
    """

    def __init__(
        self,
        builder: PromptBuilder,
        job: BatchJob,
        answers: PartAnswers,
        on_record: Callable[[dict[str, Any]], None],
        on_progress: Callable[[str, int, int, int, int], None] = lambda *_: None,
    ):
        """Begin without documents.

        Args:
            builder: makes prompts.
            job: the settings.
            answers: answers on disk.
            on_record: called with the record of each document.
            on_progress: called with an id, the number of the document's current round, how many of
                its tasks are finished, how many there are, and about how many passages.
        """
        self._builder, self._job, self._answers = builder, job, answers
        self._on_record, self._on_progress = on_record, on_progress
        self._documents: dict[str, _Document] = {}
        self._tasks = deque[tuple[str, int]]()  # ids, and indices in rounds

    def __bool__(self) -> bool:
        """Return whether a document is in progress."""
        return bool(self._documents)

    def __contains__(self, id: str) -> bool:
        """Return whether this document is in progress."""
        return id in self._documents

    def begin(self, id: str, document: DocumentText) -> int:
        """Begin a document; return how many of its tokens are dropped.

        Raises TierForceError if answers about its parts cannot be written.
        """
        instructions = document.identity.instructions or self._job.instructions
        digest = self._job.digest(document.identity.digest, instructions)
        fields = {"digest": digest, "source": document.source}
        rounds = self._builder.rounds(document.text, instructions, self._job.splits)
        outcomes = [_Outcome() for _ in instructions.strings]
        begun = self._documents[id] = _Document(fields, instructions, rounds, outcomes)
        self._advance(id)
        return max((task.truncated_tokens for task in begun.tasks), default=0)

    def work(self) -> Iterator[Work]:
        """Yield the tasks that can be given to an engine now, those of earlier documents first.

        Tasks whose answers are on disk are skipped.
        """
        while self._tasks:
            id, index = self._tasks.popleft()
            if (document := self._documents.get(id)) is None:  # failed
                continue
            task = document.tasks[index]
            try:
                prompt, truncated = self._builder.prompt(task)
            except TierForceError as error:
                self.record_error(id, *description(error))
                continue
            digest = self._job.prompt_digest(prompt.tobytes(), document.instructions, task.is_last)
            work = Work(id, task, index, prompt, truncated, digest, self._reads(task))
            # the record has more than the answers on disk, if it has one answer
            answer = None if document.ends else self._answers.get(digest, id)
            if answer is not None:
                self._take(work, answer)
            else:
                yield work

    def finish(self, work: Work, answer: dict[str, Any]) -> None:
        """Take the answer to a task: `summary` and the counts of its request.

        Raises TierForceError if it cannot be written.
        """
        document = self._documents.get(work.document)
        if document is None or not document.ends:
            self._answers.add(work.digest, work.document, answer)
        self._take(work, answer)

    def fail(self, work: Work, kind: str, reason: str) -> None:
        """End a document with the error of a task; its other tasks are dropped.

        `kind` is the name of the exception's class.
        """
        if work.document in self._documents:
            reason = f"{work.task.name}: {reason}" if work.task.name else reason
            self.record_error(work.document, kind, reason)

    def record_error(self, id: str, kind: str, reason: str) -> None:
        """End a document, which need not have begun, with an error."""
        self._documents.pop(id, None)
        self._on_record(
            {
                "id": id,
                "error": as_flags(reason),
                "kind": kind,
                "date": _timestamp(),
                "versions": versions(),
            }
        )

    def _take(self, work: Work, answer: dict[str, Any]) -> None:
        id, document = work.document, self._documents.get(work.document)
        if document is None:  # another task failed
            return
        reason = self._data(answer).get("error") if work.task.is_last else None
        if reason is not None and not document.instructions.are_questions:
            self.fail(work, InvalidRequestError.__name__, reason)
            return
        document.answers[work.index] = {**answer, "truncated_tokens": work.truncated_tokens}
        self._report(id, document)
        if len(document.answers) == len(document.tasks):
            answers = [document.answers[index] for index in range(len(document.tasks))]
            for task, each in zip(document.tasks, answers, strict=True):
                _add(document, task, each)
            self._advance(id, [each["summary"] for each in answers])

    def _advance(self, id: str, answers: Sequence[str] | None = None) -> None:
        """Begin a round of a document, the next one after these answers; end it after the last one,
        or if that fails.
        """
        document = self._documents[id]
        document.answers = {}
        try:
            # sending None begins the first round
            document.tasks = document.rounds.send(cast(Sequence[str], answers))
        except StopIteration:
            del self._documents[id]
            self._on_record(self._record(id, document))
            return
        except TierForceError as error:
            self.record_error(id, *description(error))
            return
        document.number += 1
        document.passages = sum(map(self._reads, document.tasks))
        self._report(id, document)
        tasks = [(id, index) for index in range(len(document.tasks))]
        if answers is None:
            if not document.ends:
                self._answers.open()  # fails before the work, if it fails
            self._tasks.extend(tasks)
        else:  # merges come first: a finished document is worth more than two begun ones
            self._tasks.extendleft(reversed(tasks))

    def _reads(self, task: Task) -> bool:
        """Return whether no earlier task of its round leaves its passage in a cache."""
        is_shared = self._builder.format.shares_document and not self._job.deterministic
        return task.index == 0 or task.parts is not None or not is_shared

    def _report(self, id: str, document: _Document) -> None:
        finished, count = len(document.answers), len(document.tasks)
        self._on_progress(id, document.number, finished, count, document.passages)

    def _record(self, id: str, document: _Document) -> dict[str, Any]:
        instructions, outcomes = document.instructions, document.outcomes
        if instructions.are_questions:
            pairs = zip(instructions.strings, outcomes, strict=True)
            requests = [each for outcome in outcomes for each in outcome.requests]
            answers = [outcome.answer for outcome in outcomes]
            own = {
                "answers": [
                    {
                        "question": question,
                        "answer": outcome.answer["summary"],
                        **self._data(outcome.answer),
                        **_counts(outcome),
                    }
                    for question, outcome in pairs
                ],
                **_totals(requests),
                "truncated_tokens": max(each["truncated_tokens"] for each in answers),
                **{name: answers[-1][name] for name in DEVICE_FIELDS},
            }
        else:
            (outcome,) = outcomes
            own = dict(outcome.answer)
            if outcome.parts:
                own = {"summary": own["summary"], **_counts(outcome)}
                own |= {name: outcome.answer[name] for name in DEVICE_FIELDS}
            own = {"summary": own.pop("summary"), **self._data(outcome.answer), **own}
            own["instruction"] = instructions.strings[0]
        if outcomes[0].parts:
            own["part_instruction"] = self._job.format.part
            own["merge_instruction"] = self._job.format.merge_instruction(instructions)
        return {
            "id": id,
            **own,
            **self._job.as_dict(),
            "date": _timestamp(),
            **document.fields,
            "versions": versions(),
        }

    def _data(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the field with the value of a final answer, if it is in JSON.

        It is null, with an `error`, if the answer was cut.
        """
        if self._job.grammar is None:
            return {}
        try:
            return {"data": json_value(answer["summary"], answer["finish_reason"])}
        except InvalidRequestError as error:
            return {"data": None, "error": as_flags(str(error))}


def _add(document: _Document, task: Task, answer: dict[str, Any]) -> None:
    """Add an answer to what there is for its instruction."""
    outcome = document.outcomes[task.index]
    if task.is_last:
        outcome.answer = answer
    own = {name: answer[name] for name in FIELDS}
    if not task.is_last and not document.instructions.are_questions:
        own = {"summary": answer["summary"], **own}  # those to questions would be too many
    if task.characters is not None:
        outcome.parts.append({"characters": task.characters, **own})
    elif task.parts is not None:
        outcome.merges.append({"parts": task.parts, **own})


def _counts(outcome: _Outcome) -> dict[str, Any]:
    """Return the counts of a question's requests, or of those for a document in parts."""
    answer = outcome.answer
    if not outcome.parts:
        return {name: answer[name] for name in (*FIELDS, "truncated_tokens")}
    return {
        **_totals(outcome.requests),
        "finish_reason": answer["finish_reason"],
        "truncated_tokens": 0,
        "parts": outcome.parts,
        "merges": outcome.merges,
    }


def _totals(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of the counts of requests, and what follows from them."""
    sums = {name: round(sum(each[name] for each in answers), 4) for name in SUMS}
    after_first = sums["new_tokens"] - len(answers)
    return {
        **sums,
        "concurrency": max(each["concurrency"] for each in answers),
        "ms_per_token": 1e3 * sums["decode_s"] / after_first if after_first > 0 else None,
    }


def description(error: TierForceError) -> tuple[str, str]:
    """Return the name of an exception's class, and its message."""
    return type(error).__name__, str(error)


def _timestamp() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine times and output."""
    return {name: installed_version(name) for name in ("tierforce", "torch", "transformers")}
