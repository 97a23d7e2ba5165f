"""`ask`: questions, optionally about a document of any length."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from decoding.app.batch.summarize import answer_of, report
from decoding.app.interactive.chat import conversation, load_chat
from decoding.app.interactive.generate import generate, write
from decoding.app.options import Common
from decoding.app.terminal.messages import (
    LongestDocument,
    fitting_concurrency,
    say_what_fits,
)
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts
from decoding.engine.chat import talk_room
from decoding.engine.engine import Engine, Progress
from decoding.engine.request import Request
from decoding.text.detokenizer import detokenize_stream
from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.long_text import PromptBuilder, Rounds, Task
from offload.errors import TierForceError


def run(
    common: Common,
    document: Path | None,
    questions: tuple[str, ...],
    system: str | None,
    splits: bool,
    interrupts: Interrupts,
) -> None:
    """Answer questions on standard output; all ranks call it.

    A document longer than the context is truncated, or with `splits` each of its parts is asked,
    and the answers are merged. Raises TierForceError on failure.
    """
    engine, chat, text = load_chat(common, document, system)
    splits = splits and chat is not None and chat.truncated_tokens > 0
    if engine.group.broadcast(splits):
        name = document.name if document is not None else ""
        parts = _Parts(engine, common, questions, system, name)
        parts.ask(text, interrupts)
        return
    with conversation(engine, chat, common, "without --long cut it is read in parts") as opened:
        if opened is None:
            return
        for index, question in enumerate(questions):
            _begin_answer(questions, index)
            with Display(1, sys.stderr) as display:
                interrupts.stop_first(display.stop)
                generate(engine, partial(opened.ask, question), display)
            opened.clear()


def _begin_answer(questions: Sequence[str], index: int) -> None:
    """Write the question, as a heading, if there are several."""
    if len(questions) > 1:
        blank = "\n" if index else ""
        write(f"{blank}## {questions[index]}\n\n")


class _Parts:
    """Questions about a text longer than the context, whose parts are asked."""

    def __init__(
        self,
        engine: Engine,
        common: Common,
        questions: tuple[str, ...],
        system: str | None,
        name: str,
    ):
        """Prepare on all ranks. Raises TierForceError if the chat template is broken."""
        self.engine, self.common, self.name = engine, common, name
        self.instructions = Instructions(questions, are_questions=True)
        context, new = engine.context, common.max_new_tokens
        # the parts do not depend on the questions, so that the prompt cache can hold them
        kept = talk_room(context, new)
        with engine.group.sync_errors():
            format = PromptFormat(system=system)
            self.builder = PromptBuilder(engine.tokenizer, format, context, new, kept)

    def ask(self, text: str, interrupts: Interrupts) -> None:
        """Ask each part, and print the merged answers; all ranks call it.

        Raises TierForceError on failure.
        """
        engine, common, new = self.engine, self.common, self.common.max_new_tokens
        tasks: Sequence[Task] = []
        with engine.group.sync_errors():
            if engine.group.rank == 0:
                rounds = self.builder.rounds(text, self.instructions)
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
            _begin_answer(self.instructions.strings, index)
            if isinstance(answer, str):
                write(f"{answer}\n")
                continue
            with Display(1, sys.stderr) as display:
                interrupts.stop_first(display.stop)
                generate(engine, partial(self._stream, answer, display), display)
        engine.close()

    def _answers(
        self, rounds: Rounds, tasks: Sequence[Task], concurrency: int, display: Display
    ) -> dict[int, str | Task]:
        """Return the answer to each question, or its task in the last round.

        Raises TierForceError.
        """
        found = dict[int, str | Task]()
        while not all(task.is_last for task in tasks):
            answers = dict[str, str]()
            requests = (self._request(task, display) for task in tasks)
            for state in self.engine.generate_batch(requests, concurrency):
                name = state.request.name
                if state.error is not None:
                    raise TierForceError(f"{name}: {state.error}") from state.error
                answer = answer_of(self.engine, state)
                report(name, answer, display, is_part=True)
                answers[name] = answer["summary"]
            own = [answers[task.name_in(self.name)] for task in tasks]
            pairs = zip(tasks, own, strict=True)
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
        )
