"""`ask`: one question, optionally about a document of any length."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from decoding.app.batch.summarize import answer_of, report
from decoding.app.interactive.chat import conversation, load_chat
from decoding.app.interactive.generate import generate
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
from decoding.text.instructions import Instructions
from decoding.text.long_text import PromptBuilder, Rounds, Task
from offload.errors import TierForceError

_MERGE = (
    "Above are answers to one question, each from another part of a text, in order. Parts that do "
    "not answer it do not matter. Answer it for the whole text: {instruction}"
)


def run(
    common: Common, document: Path | None, question: str, splits: bool, interrupts: Interrupts
) -> None:
    """Answer one question on standard output; all ranks call it.

    A document longer than the context is truncated, or with `splits` each of its parts is asked,
    and the answers are merged. Raises TierForceError on failure.
    """
    engine, chat, text = load_chat(common, document)
    splits = splits and chat is not None and chat.truncated_tokens > 0
    if engine.group.broadcast(splits):
        name = document.name if document is not None else ""
        _ask_parts(engine, common, name, text, question, interrupts)
        return
    hint = "without --long cut it is read in parts"
    with conversation(engine, chat, common, hint) as opened, Display(1, sys.stderr) as display:
        if opened is not None:
            interrupts.stop_first(display.stop)
            generate(engine, partial(opened.ask, question), display)


def _ask_parts(
    engine: Engine,
    common: Common,
    name: str,
    text: str,
    question: str,
    interrupts: Interrupts,
) -> None:
    """Ask each part of a text, and print the merged answers; all ranks call it."""
    group, new = engine.group, common.max_new_tokens
    tasks: Sequence[Task] = []
    with group.sync_errors():
        # the parts do not depend on the question, so that the prompt cache can hold them
        instructions = Instructions(question, merge=_MERGE)
        kept = talk_room(engine.context, new)
        builder = PromptBuilder(engine.tokenizer, instructions, engine.context, new, kept)
        if group.rank == 0:
            rounds = builder.rounds(text)
            tasks = next(rounds)
    longest = group.broadcast(LongestDocument(name, engine.context - new, len(tasks)))
    concurrency = min(longest.parts, fitting_concurrency(engine, longest.tokens, new))
    say_what_fits(engine, longest, common, concurrency)
    if group.rank:
        engine.run_worker()
        return
    with Display(1, sys.stderr) as display:
        interrupts.stop_first(display.stop)
        parts = _Parts(engine, common, builder, name, display)
        last = parts.last(rounds, tasks, concurrency)
        generate(engine, partial(parts.stream, last), display)
    engine.close()


class _Parts:
    """The requests about the parts of a text; on rank 0."""

    def __init__(
        self, engine: Engine, common: Common, builder: PromptBuilder, name: str, display: Display
    ):
        self.engine, self.common, self.builder = engine, common, builder
        self.name, self.display = name, display

    def last(self, rounds: Rounds, tasks: Sequence[Task], concurrency: int) -> Task:
        """Answer all tasks but the last one, which is returned. Raises TierForceError."""
        while not tasks[0].is_last:
            answers = dict[str, str]()
            requests = (self._request(task) for task in tasks)
            for state in self.engine.generate_batch(requests, concurrency):
                name = state.request.name
                if state.error is not None:
                    raise TierForceError(f"{name}: {state.error}") from state.error
                answer = answer_of(self.engine, state)
                report(name, answer, self.display, is_part=True)
                answers[name] = answer["summary"]
            tasks = rounds.send([answers[task.name_in(self.name)] for task in tasks])
        return tasks[0]

    def stream(self, task: Task, progress: Progress) -> Iterator[str]:
        """Yield the answer to a task in pieces of whole characters."""
        request = self._request(task, progress)
        with closing(self.engine.submit(request)) as tokens:
            yield from detokenize_stream(self.engine.tokenizer, tokens)

    def _request(self, task: Task, progress: Progress | None = None) -> Request:
        name, new = task.name_in(self.name), self.common.max_new_tokens
        if progress is None:
            self.display.begin(name)
            progress = partial(self.display.prefill, name)
        return Request(
            self.builder.prompt(task).tolist(),
            new,
            self.common.sampling,
            0,
            progress,
            name,
            partial(self.display.decode, name, new),
        )
