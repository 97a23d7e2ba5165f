"""New tokens as text, as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_PENDING = "\ufffd"  # what a character decodes to while some of its bytes are missing


def detokenize_stream(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they come, without special tokens, whole characters at a time.

    How a token decodes may depend on those before it, so a few of them are decoded again with it;
    and a character may take several tokens. The pieces joined are the text of all tokens.
    """
    window: list[int] = []  # the tokens of the last piece, and those behind it
    shown = 0  # tokens of the window whose text was yielded

    def decoded(count: int) -> str:
        return tokenizer.decode(
            window[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    for token in tokens:
        window.append(token)
        text, before = decoded(len(window)), decoded(shown)
        if len(text) > len(before) and not text.endswith(_PENDING):
            yield text[len(before) :]
            window = window[shown:]
            shown = len(window)
    rest = decoded(len(window))[len(decoded(shown)) :]
    if rest:  # of a character that was cut off
        yield rest
