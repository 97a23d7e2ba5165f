"""From what a request says to prompt tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from decoding.prompt import Template, parts_around, plain_tokens
from offload.errors import DocumentError, TierForceError


class Prompts:
    """Makes prompts on other threads than the engine's, with a tokenizer of its own.

    A tokenizer notes in itself how it is used, so two threads cannot share one.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = Lock()
        if tokenizer.chat_template:  # rendered once while the engine has nothing to do
            with suppress(TierForceError):  # whoever sends messages is told
                Template.chat(self._tokenizer)

    def of_text(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be continued."""
        with self._lock:
            template = Template.plain(self._tokenizer)
            return [*template.before, *plain_tokens(self._tokenizer, text)]

    def of_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, which an answer is to follow.

        What looks like a special token in a message is plain text. Raises TierForceError where the
        model's template cannot take them.
        """
        marks = [f"\ue000{number}\ue000" for number in range(len(messages))]
        marked = [
            {"role": each["role"], "content": mark}
            for each, mark in zip(messages, marks, strict=True)
        ]
        with self._lock:
            if not self._tokenizer.chat_template:
                raise DocumentError(
                    "this model has no chat template: ask /v1/completions to continue a text."
                )
            parts = parts_around(self._tokenizer, marked, marks, "these messages")
            words = [plain_tokens(self._tokenizer, each["content"]) for each in messages]
        tokens = list(parts[0])
        for word, part in zip(words, parts[1:], strict=True):
            tokens += word
            tokens += part
        return tokens
