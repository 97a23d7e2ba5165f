"""Tokenization of the prompts in requests."""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from contextlib import suppress
from threading import Lock
from typing import Any

from decoding.app.server.worker.token_bytes import TokenBytes
from decoding.grammars.grammar import CompiledGrammar, Grammar, GrammarCompiler
from decoding.text.chat_template import ChatRendering
from decoding.text.encoding import plain_tokens
from decoding.text.prompt import MARK, PlainTemplate, Template, chat_tokens, tokens_around
from decoding.text.tools.channels import has_channels
from decoding.text.tools.forms import (
    Calling,
    form_of,
    marker_ids,
    unsupported_form,
)
from offload.errors import InvalidRequestError, TierForceError

_END_TOKENS = 16  # those that may begin a thought
_COUNTED_CHARACTERS = 1 << 18  # counted at a time, while other requests wait


class Prompts:
    """Tokenizes prompts and compiles grammars on other threads than the engine's.

    It has a tokenizer of its own: using one changes its state, so two threads cannot share it.
    """

    def __init__(self, tokenizer: Any, context: int, vocab: int, stop_tokens: Set[int]):
        """Prepare for a model with `vocab` tokens, and a context of `context` tokens."""
        self._tokenizer, self._context = copy.deepcopy(tokenizer), context
        self._grammars = GrammarCompiler(self._tokenizer, vocab, stop_tokens)
        self._token_bytes = TokenBytes(self._tokenizer)
        self._lock = Lock()
        if tokenizer.chat_template:  # rendered once now, while the engine is idle
            with suppress(TierForceError):  # reported to clients that send messages
                Template.chat(self._tokenizer)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar for the tokenizer. Raises InvalidRequestError."""
        with self._lock:
            self._grammars.prepare()  # uses the tokenizer
        return self._grammars.compile(grammar)

    def calling(self, prompt: Sequence[int]) -> Calling:
        """Return how the model calls tools in an answer to a prompt.

        Raises InvalidRequestError for an unsupported form.
        """
        with self._lock:
            self._check_template()
            form = form_of(str(self._tokenizer.get_chat_template(tools=[{}])))
            if has_channels(self._tokenizer) != form.has_channels:
                raise unsupported_form()
            end = self._tokenizer.decode(list(prompt[-_END_TOKENS:])).rstrip()
            ids = marker_ids(self._tokenizer, form)
            return Calling(form, ids, end.endswith(form.thoughts[0]))

    def tokenize_text(self, text: str, has_prefix: bool = True) -> list[int]:
        """Return the tokens of a text that is to be continued, after the tokenizer's own prefix.

        Raises InvalidRequestError if it is far longer than the context.
        """
        with self._lock:
            plain = Template.plain(self._tokenizer) if has_prefix else PlainTemplate([], [])
            return plain.fit(self._tokenizer, text, self._context)

    def count(self, text: str) -> tuple[int, int]:
        """Return the number of a text's tokens, and of the characters that were counted.

        Counting ends beyond twice the context. It is done in parts, between which other requests
        use the tokenizer; each cut may add a token.
        """
        tokens = counted = 0
        while counted < len(text) and tokens <= 2 * self._context:
            part = text[counted : counted + _COUNTED_CHARACTERS]
            with self._lock:
                tokens += len(plain_tokens(self._tokenizer, part))
            counted += len(part)
        return tokens, counted

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        with self._lock:
            return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Return the tokenizer's names of tokens."""
        with self._lock:
            return list(map(str, self._tokenizer.convert_ids_to_tokens(list(tokens))))

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token contributes within a text."""
        with self._lock:
            return list(map(self._token_bytes.bytes_of, tokens))

    def tokenize_messages(
        self, messages: Sequence[dict[str, Any]], rendering: ChatRendering | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the next answer.

        Special tokens in a message are plain text. Raises TierForceError if the model's template
        rejects the messages, ToolsError if it rejects only the tools, and InvalidRequestError for
        messages that are far longer than the context.
        """
        with self._lock:
            self._check_template()
            return chat_tokens(self._tokenizer, messages, self._context, rendering=rendering)

    def around_message(self) -> tuple[list[int], list[int]]:
        """Return the tokens before and after the text of a conversation's first message.

        Raises TierForceError if the model has no chat template that renders one.
        """
        with self._lock:
            self._check_template()
            messages = [{"role": "user", "content": MARK}]
            return tokens_around(self._tokenizer, messages, "a message")

    def special_tokens(self) -> list[int]:
        """Return the ids of the tokenizer's special tokens."""
        with self._lock:
            added = self._tokenizer.added_tokens_decoder.items()
            return [token for token, each in added if each.special]

    def _check_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions to continue a text."
            )
