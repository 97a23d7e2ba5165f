"""From what a request says to prompt tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from decoding.text.prompt import Template, chat_tokens
from offload.errors import InvalidRequestError, TierForceError


class Prompts:
    """Makes prompts on other threads than the engine's, with a tokenizer of its own.

    A tokenizer notes in itself how it is used, so two threads cannot share one.
    """

    def __init__(self, tokenizer: Any, context: int):
        """Make prompts for a model of so many tokens of `context`."""
        self._tokenizer, self._context = copy.deepcopy(tokenizer), context
        self._lock = Lock()
        if tokenizer.chat_template:  # rendered once while the engine has nothing to do
            with suppress(TierForceError):  # whoever sends messages is told
                Template.chat(self._tokenizer)

    def of_text(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be continued.

        Raises InvalidRequestError for one far longer than the context.
        """
        with self._lock:
            return Template.plain(self._tokenizer).fit(self._tokenizer, text, self._context)

    def of_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, which an answer is to follow.

        What looks like a special token in a message is plain text. Raises TierForceError where the
        model's template cannot take them, and InvalidRequestError where they are far longer than the
        context.
        """
        with self._lock:
            if not self._tokenizer.chat_template:
                raise InvalidRequestError(
                    "this model has no chat template: ask /v1/completions to continue a text."
                )
            return chat_tokens(self._tokenizer, messages, self._context)
