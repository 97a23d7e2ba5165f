"""A conversation through a chat template, token by token: what was said is never reworded."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from decoding.conversation import ROOM
from decoding.engine import Engine
from decoding.pieces import pieces
from decoding.planning.defaults import NEW_TOKENS
from decoding.prompt import parts_around, plain_tokens
from decoding.speculation.sampling import Sampling
from decoding.writing import Progress
from offload.errors import DocumentError, TierForceError

_MARKS = [f"\ue000{number}\ue000" for number in range(5)]  # stand for messages
_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Dialogue:
    """What a chat template puts around messages, as tokens."""

    opening: list[int]  # before the first message
    answer: list[int]  # between a message and its answer
    turn: list[int]  # between an answer and the next message

    @classmethod
    def of(cls, tokenizer: Any) -> Dialogue:
        """Read the tokenizer's template. Raises TierForceError where it cannot be gone on with."""
        if not tokenizer.chat_template:
            raise TierForceError("the tokenizer has no chat template: use an instruct model.")
        messages = [
            {"role": _ROLES[number % 2], "content": mark} for number, mark in enumerate(_MARKS)
        ]
        parts = parts_around(tokenizer, messages, _MARKS, "a conversation")
        opening, _, turn, _, next_turn, answer = parts
        if turn != next_turn:
            raise TierForceError(
                "the tokenizer's chat template words later turns otherwise than the first: what "
                "was read could not be gone on with."
            )
        return cls(opening, answer, turn)


class Chat:
    """A conversation, maybe about a document, which stands before the first message.

    It is meant for inside an engine's `conversation`, where only what is new is read.
    """

    def __init__(
        self,
        engine: Engine,
        max_new_tokens: int = NEW_TOKENS,
        sampling: Sampling | None = None,
        document: str | None = None,
        name: str = "",
    ):
        """Begin. Raises TierForceError where the model's template does not do.

        Args:
            engine: on rank 0.
            max_new_tokens: of an answer, at most.
            sampling: the law of answers; by default `Sampling()`, as on the command line.
            document: a text to talk about; of one too long for the context the end is dropped.
            name: what people call it, where it is kept on disk (`Settings.keep`).
        """
        self.name = name
        self.engine, self.max_new_tokens = engine, max_new_tokens
        self.sampling = sampling or Sampling()
        self.dialogue = Dialogue.of(engine.tokenizer)
        self.messages: list[dict[str, str]] = []
        self.dropped_tokens = 0  # of the document
        self._begun = list(self.dialogue.opening)
        if document is not None:
            self._begun += self._cut(document)
            self._begun += plain_tokens(engine.tokenizer, "\n\n")
        self.tokens = list(self._begun)  # all that was said

    def read(self, progress: Progress | None = None) -> None:
        """Read the document before anything is asked; there has to be one."""
        text = self._written(self._begun, self.max_new_tokens, progress)
        with closing(text):
            next(text, None)  # nothing is read before something is asked for

    def ask(self, question: str, progress: Progress | None = None) -> Generator[str, None, None]:
        """Yield the answer, in pieces of whole characters.

        Where the generator is closed, the answer is what was written by then. Raises DocumentError
        where the context has no room for it; an answer that ends by an error was not said.
        """
        asked = self._asked(self.tokens, question)
        room = self.engine.context - len(asked)
        if room < 1:
            raise DocumentError(
                f"the conversation has come to {len(asked):,} tokens, with the question, and the "
                f"context is {self.engine.context:,}: begin a new one, or use a longer `context`."
            )
        new = min(self.max_new_tokens, room)
        answer: list[int] = []
        tokens = self._written(asked, new, progress)
        try:
            with closing(tokens):
                yield from pieces(self.engine.tokenizer, _noted(tokens, answer))
        except GeneratorExit:
            self._said(question, asked, answer)
            raise
        self._said(question, asked, answer)

    def restore(self, messages: Iterable[tuple[str, str]]) -> None:
        """Let this have been said, after the document: questions with their answers."""
        self.clear()
        for question, answer in messages:
            asked = self._asked(self.tokens, question)
            words = plain_tokens(self.engine.tokenizer, answer)
            self._said(question, asked, words, answer)

    def clear(self) -> None:
        """Begin anew, with the same document."""
        self.tokens, self.messages = list(self._begun), []

    def _written(
        self, prompt: list[int], new: int, progress: Progress | None
    ) -> Generator[int, None, None]:
        return self.engine.generate(prompt, new, self.sampling, progress, self.name)

    def _asked(self, tokens: list[int], question: str) -> list[int]:
        """Return the tokens of a conversation so far with one more question."""
        turn = self.dialogue.turn if self.messages else []
        words = plain_tokens(self.engine.tokenizer, question)
        return [*tokens, *turn, *words, *self.dialogue.answer]

    def _said(
        self, question: str, asked: list[int], tokens: list[int], answer: str | None = None
    ) -> None:
        """Note an answer's tokens behind those of what was asked."""
        self.tokens = [*asked, *tokens]
        if answer is None:
            answer = self.engine.tokenizer.decode(tokens, skip_special_tokens=True)
        for role, content in zip(_ROLES, (question, answer), strict=True):
            self.messages.append({"role": role, "content": content})

    def _cut(self, document: str) -> list[int]:
        """Return the document's tokens, as many as leave room to talk."""
        tokens = plain_tokens(self.engine.tokenizer, document)
        context = self.engine.context
        talk = max(self.max_new_tokens, min(ROOM, context // 8))
        room = context - self.max_new_tokens - talk
        if room < 1:
            raise DocumentError(
                f"no room left for the document: the context is {context:,} tokens, and answers "
                f"may take {self.max_new_tokens:,} of them. Use fewer `max_new_tokens`."
            )
        self.dropped_tokens = max(0, len(tokens) - room)
        return tokens[:room]


def _noted(tokens: Iterable[int], into: list[int]) -> Iterator[int]:
    """Yield tokens and add them to a list."""
    for token in tokens:
        into.append(token)
        yield token
