"""Incremental detokenization: new tokens as text, as they are generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from decoding.text.tools.channels import ChannelFilter

_INCOMPLETE = "\ufffd"  # decoded character whose bytes are not complete yet


class Detokenizer:
    """Turns tokens into text, in whole characters, without special tokens and other channels.

    The text of a token may depend on the tokens before it, so a few of them are decoded again with
    it; and a character may need several tokens. The concatenation is the text of all tokens shown.
    """

    def __init__(self, tokenizer: Any, shown: Mapping[int, str] | None = None):
        """Return text of special tokens, too, if they are among those `shown`.

        Of an answer with channels all text is returned if its markers are.
        """
        self._tokenizer, self._shown = tokenizer, shown or {}
        self._channels = ChannelFilter(tokenizer, self._shown)
        self._window: list[int] = []  # tokens of the last text, and all after them
        self._done = 0  # tokens of the window whose text has been returned

    def feed(self, token: int) -> str | None:
        """Return the text that a token completes; None if the token is not for the user."""
        if not self._channels.shows(token):
            return None
        if (name := self._shown.get(token)) is not None:
            text = self.rest() + name
            self._window, self._done = [], 0
            return text
        self._window.append(token)
        text, prefix = self._decode(len(self._window)), self._decode(self._done)
        if len(text) <= len(prefix) or text.endswith(_INCOMPLETE):
            return ""
        self._window = self._window[self._done :]
        self._done = len(self._window)
        return text[len(prefix) :]

    def rest(self) -> str:
        """Return the text after the last token: an incomplete character."""
        return self._decode(len(self._window))[len(self._decode(self._done)) :]

    def _decode(self, count: int) -> str:
        text: str = self._tokenizer.decode(
            self._window[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def detokenize_stream(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they are generated, as a `Detokenizer` returns it."""
    detokenizer = Detokenizer(tokenizer)
    for token in tokens:
        if text := detokenizer.feed(token):
            yield text
    if text := detokenizer.rest():
        yield text
