"""Incremental detokenization: new tokens as text, as they are generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_INCOMPLETE = "\ufffd"  # decoded character whose bytes are not complete yet


def detokenize_stream(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they are generated, in whole characters, without special tokens.

    The text of a token may depend on the tokens before it, so a few of them are decoded again with
    it; and a character may need several tokens. The concatenation is the text of all tokens.
    """
    window: list[int] = []  # tokens of the last yielded text, and all after them
    yielded = 0  # tokens of the window whose text has been yielded

    def decode(count: int) -> str:
        return tokenizer.decode(
            window[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    for token in tokens:
        window.append(token)
        text, prefix = decode(len(window)), decode(yielded)
        if len(text) > len(prefix) and not text.endswith(_INCOMPLETE):
            yield text[len(prefix) :]
            window = window[yielded:]
            yielded = len(window)
    rest = decode(len(window))[len(decode(yielded)) :]
    if rest:  # an incomplete character at the end
        yield rest
