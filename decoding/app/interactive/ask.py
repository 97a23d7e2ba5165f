"""`ask`: questions, optionally about a document of any length."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from decoding.app.batch.summarize import answer_of, report_answer
from decoding.app.interactive.chat import conversation, load_chat
from decoding.app.interactive.chat_session import talk_room
from decoding.app.interactive.generate import check_complete, generate
from decoding.app.options import Common, as_flags
from decoding.app.terminal.messages import (
    LongestDocument,
    fitting_concurrency,
    say_what_fits,
)
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts
from decoding.app.terminal.streams import warn, write
from decoding.engine.engine import Engine, Progress
from decoding.engine.request import Request
from decoding.grammars.grammar import CUT, CompiledGrammar, Grammar
from decoding.text.detokenizer import detokenize_stream
from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.long_text import PromptBuilder, Rounds, Task
from offload.errors import InvalidRequestError, TierForceError


def run(
    common: Common,
    document: Path | None,
    questions: tuple[str, ...],
    format: PromptFormat,
    splits: bool,
    interrupts: Interrupts,
) -> None:
    """Answer questions on standard output; all ranks call it.

    The system message and the schema of `format` are used. A document longer than the context is
    truncated, or with `splits` each of its parts is asked, and the answers are merged. Raises
    TierForceError on failure.
    """
    engine, chat, text = load_chat(common, document, format.system, format.for_answer(""))
    grammar = None if format.schema is None else Grammar(format.schema)
    with engine.group.sync_errors():
        compiled = engine.grammars.compile_optional(grammar)
    splits = splits and chat is not None and chat.truncated_tokens > 0
    if engine.group.broadcast(splits):
        name = document.name if document is not None else ""
        parts = _Parts(engine, common, questions, format, compiled, name)
        parts.ask(text, interrupts)
        return
    answers = _Answers(engine, questions, interrupts, compiled is not None)
    with conversation(engine, chat, common, "without --long cut it is read in parts") as opened:
        if opened is None:
            return
        for index, question in enumerate(questions):
            asked = format.for_answer(question)
            answers.stream(index, partial(opened.ask, asked, grammar=compiled))
            opened.clear()
    answers.conclude()


class _Answers:
    """Answers on standard output; if there are several, each below its question."""

    def __init__(
        self, engine: Engine, questions: Sequence[str], interrupts: Interrupts, in_json: bool
    ):
        self.engine, self.questions, self.interrupts = engine, questions, interrupts
        self._in_json = in_json
        self._written = self._failed = 0

    def stream(self, index: int, pieces: Callable[[Progress], Iterator[str]]) -> None:
        """Write an answer as it is generated.

        Raises InvalidRequestError if there is only one question, and it cannot be answered, or its
        JSON was cut.
        """
        with Display(1, sys.stderr) as display:
            self.interrupts.stop_first(display.stop)
            try:
                generate(
                    self.engine, lambda progress: self._below(index, pieces(progress)), display
                )
                if self._in_json:
                    check_complete(self.engine)
            except InvalidRequestError as error:
                self.fail(index, error)

    def write(self, index: int, answer: str) -> None:
        """Write an answer that is known."""
        for piece in self._below(index, iter([f"{answer}\n"])):
            write(piece)

    def fail(self, index: int, error: InvalidRequestError) -> None:
        """Report a question that cannot be answered; others are. Raises it if there are none."""
        if len(self.questions) == 1:
            raise error
        self._failed += 1
        warn(f"question {index + 1} of {len(self.questions)}: {as_flags(str(error))}")

    def conclude(self) -> None:
        """Raise TierForceError if questions failed."""
        if self._failed:
            count = len(self.questions)
            raise TierForceError(f"{self._failed} of {count} questions could not be answered.")

    def _below(self, index: int, pieces: Iterator[str]) -> Iterator[str]:
        """Yield the question as a heading, if there are several, and then the answer."""
        first = next(pieces, "")  # raises before the heading is written
        if len(self.questions) > 1:
            blank = "\n" if self._written else ""
            self._written += 1
            yield f"{blank}## {self.questions[index]}\n\n"
        yield first
        yield from pieces


class _Parts:
    """Questions about a text longer than the context, whose parts are asked."""

    def __init__(
        self,
        engine: Engine,
        common: Common,
        questions: tuple[str, ...],
        format: PromptFormat,
        grammar: CompiledGrammar | None,
        name: str,
    ):
        """Prepare on all ranks. Raises TierForceError if the chat template is broken."""
        self.engine, self.common, self.name, self.questions = engine, common, name, questions
        self._grammar = grammar
        self._cut = set[int]()  # indices of answers in JSON that are incomplete
        context, new = engine.context, common.max_new_tokens
        # the parts do not depend on the questions, so that the prompt cache can hold them
        kept = talk_room(context, new)
        with engine.group.sync_errors():
            self.builder = PromptBuilder(engine.tokenizer, format, context, new, kept)

    def ask(self, text: str, interrupts: Interrupts) -> None:
        """Ask each part, and print the merged answers; all ranks call it.

        Raises TierForceError on failure.
        """
        engine, common, new = self.engine, self.common, self.common.max_new_tokens
        tasks: Sequence[Task] = []
        written = _Answers(engine, self.questions, interrupts, self._grammar is not None)
        with engine.group.sync_errors():
            if engine.group.rank == 0:
                asked = self._check(written)
                own = tuple(self.questions[index] for index in asked)
                rounds = self.builder.rounds(text, Instructions(own, are_questions=True))
                tasks = next(rounds)
        longest = LongestDocument(self.name, engine.context - new, len(tasks))
        longest = engine.group.broadcast(longest)
        concurrency = min(longest.prompts, fitting_concurrency(engine, longest.tokens, new))
        say_what_fits(engine, longest, common, concurrency)
        if engine.group.rank:
            engine.run_worker()
            return
        with Display(1, sys.stderr) as display:
            interrupts.stop_first(display.stop)
            answers = self._answers(rounds, tasks, concurrency, display)
            for index, answer in sorted(answers.items()):
                if index in self._cut:
                    written.fail(asked[index], InvalidRequestError(CUT))
                elif isinstance(answer, str):
                    written.write(asked[index], answer)
                else:
                    written.stream(asked[index], partial(self._stream, answer, display))
        engine.close()
        written.conclude()

    def _check(self, written: _Answers) -> list[int]:
        """Return the indices of the questions that are short enough; report others.

        Raises InvalidRequestError if there are none.
        """
        error: InvalidRequestError | None = None
        asked = list[int]()
        for index, question in enumerate(self.questions):
            try:
                self.builder.check_question(question)
                asked.append(index)
            except InvalidRequestError as raised:
                error = raised
                written.fail(index, raised)
        if error is not None and not asked:
            raise error
        return asked

    def _answers(
        self, rounds: Rounds, tasks: Sequence[Task], concurrency: int, display: Display
    ) -> dict[int, str | Task]:
        """Return the answer to each question, or its task in the last round.

        Raises TierForceError.
        """
        found = dict[int, str | Task]()
        while not all(task.is_last for task in tasks):
            answers, cut = dict[str, str](), set[str]()
            requests = (self._request(task, display) for task in tasks)
            for state in self.engine.generate_batch(requests, concurrency):
                name = state.request.name
                if state.error is not None:
                    raise TierForceError(f"{name}: {state.error}") from state.error
                answer = answer_of(self.engine, state)
                report_answer(name, answer, display, is_part=True)
                answers[name] = answer["summary"]
                if answer["finish_reason"] == "length" and state.request.grammar is not None:
                    cut.add(name)
            own = [answers[task.name_in(self.name)] for task in tasks]
            pairs = zip(tasks, own, strict=True)
            self._cut |= {task.index for task in tasks if task.name_in(self.name) in cut}
            found |= {task.index: answer for task, answer in pairs if task.is_last}
            tasks = rounds.send(own)
        return found | {task.index: task for task in tasks}

    def _stream(self, task: Task, display: Display, progress: Progress) -> Iterator[str]:
        """Yield the answer to a task in pieces of whole characters."""
        request = self._request(task, display, progress)
        with closing(self.engine.submit(request)) as tokens:
            yield from detokenize_stream(self.engine.tokenizer, tokens)

    def _request(self, task: Task, display: Display, progress: Progress | None = None) -> Request:
        name, new = task.name_in(self.name), self.common.max_new_tokens
        if progress is None:
            display.begin(name)
            progress = partial(display.prefill, name)
        prompt = self.builder.prompt(task)[0].tolist()
        return Request(
            prompt,
            new,
            self.common.sampling,
            0,
            progress,
            name,
            partial(display.decode, name, new),
            room=task.room,
            shared=task.shared(prompt),
            grammar=self._grammar if task.is_last else None,
        )
