"""A conversation: each prompt is what the chat template makes of all messages so far."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

from decoding.config.defaults import NEW_TOKENS
from decoding.engine.conversation import DEFAULT_ROOM
from decoding.engine.engine import Engine
from decoding.engine.request import Progress
from decoding.speculation.sampling import Sampling
from decoding.text.detokenizer import detokenize_stream
from decoding.text.encoding import truncate_to
from decoding.text.prompt import MARK, chat_tokens, tokens_around
from offload.errors import InvalidRequestError, TierForceError

_WHAT = "a conversation"


class Chat:
    """A conversation, maybe about a document, which stands before the first message.

    It is meant for inside an engine's `conversation`, which prefills only what follows the longest
    common prefix with the turn before: a template that rewrites earlier turns, as those do that
    drop a model's thoughts, costs a prefill of what it changed (`Stats.discarded_tokens`).
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
        if not engine.tokenizer.chat_template:
            raise TierForceError("the tokenizer has no chat template: use an instruct model.")
        self.messages: list[dict[str, str]] = []
        self.truncated_tokens = 0  # of the document
        self._before = ""  # the document, before the first message
        # a template that cannot take a later turn is told of before anything is read
        self._prefix([*_turn("a", "b"), *_turn(MARK)])
        if document is not None:
            self._before = self._truncate(document) + "\n\n"
        self.tokens = self._prefix(_turn(self._before + MARK))  # of the last prompt and its answer

    def prefill(self, progress: Progress | None = None) -> None:
        """Read the document before anything is asked; there has to be one."""
        text = self._generate(self.tokens, self.max_new_tokens, progress)
        with closing(text):
            next(text, None)  # nothing is read before something is asked for

    def ask(self, question: str, progress: Progress | None = None) -> Generator[str, None, None]:
        """Yield the answer, in pieces of whole characters.

        Where the generator is closed, the answer is what was written by then. Raises InvalidRequestError
        where the context has no room for it; an answer that ends by an error was not said.
        """
        context, messages = self.engine.context, [*self.messages, *_turn(question)]
        messages[0] = {**messages[0], "content": self._before + messages[0]["content"]}
        prompt = chat_tokens(self.engine.tokenizer, messages, context, _WHAT)
        room = context - len(prompt)
        if room < 1:
            raise InvalidRequestError(
                f"the conversation has come to {len(prompt):,} tokens, with the question, and the "
                f"context is {context:,}: begin a new one, or use a longer `context`."
            )
        answer: list[int] = []
        tokens = self._generate(prompt, min(self.max_new_tokens, room), progress)
        try:
            with closing(tokens):
                yield from detokenize_stream(self.engine.tokenizer, _noted(tokens, answer))
        except GeneratorExit:
            self._add_turn(question, prompt, answer)
            raise
        self._add_turn(question, prompt, answer)

    def restore(self, messages: Iterable[tuple[str, str]]) -> None:
        """Let this have been said, after the document: questions with their answers."""
        self.clear()
        for question, answer in messages:
            self.messages += _turn(question, answer)

    def clear(self) -> None:
        """Begin anew, with the same document."""
        self.messages = []

    def _generate(
        self, prompt: list[int], new: int, progress: Progress | None
    ) -> Generator[int, None, None]:
        return self.engine.generate(prompt, new, self.sampling, progress, self.name)

    def _add_turn(self, question: str, prompt: list[int], answer: list[int]) -> None:
        self.tokens = [*prompt, *answer]
        text = self.engine.tokenizer.decode(
            answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self.messages += _turn(question, text)

    def _prefix(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of what the template writes before `MARK`."""
        return tokens_around(self.engine.tokenizer, messages, _WHAT)[0]

    def _truncate(self, document: str) -> str:
        """Return as much of the document as leaves room to talk."""
        context = self.engine.context
        talk = max(self.max_new_tokens, min(DEFAULT_ROOM, context // 8))
        room = context - self.max_new_tokens - talk
        if room < 1:
            raise InvalidRequestError(
                f"no room left for the document: the context is {context:,} tokens, and answers "
                f"may take {self.max_new_tokens:,} of them. Use fewer `max_new_tokens`."
            )
        document, self.truncated_tokens = truncate_to(self.engine.tokenizer, document, room)
        return document


def _turn(question: str, answer: str | None = None) -> list[dict[str, str]]:
    """Return a question, and its answer where there is one, as messages."""
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return messages


def _noted(tokens: Iterable[int], into: list[int]) -> Iterator[int]:
    """Yield tokens and add them to a list."""
    for token in tokens:
        into.append(token)
        yield token
