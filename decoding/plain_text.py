"""Text to tokens and back: a text to be continued as it is, and new tokens as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from offload.errors import DocumentError

_PENDING = "\ufffd"  # what a character decodes to while some of its bytes are missing


def plain_tokens(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before any text, such as <s>, and the tokens of this one.

    What looks like a special token in the text is plain text.
    """
    tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return tokenizer("").input_ids, tokens


def keep_end(before: list[int], tokens: list[int], room: int) -> tuple[list[int], int]:
    """Return at most `room` tokens of a prompt, and how many were dropped to get there.

    The beginning of `tokens` is dropped, and never what stands `before` them. Raises DocumentError
    when there is no room for any.
    """
    space = room - len(before)
    if space < 1:
        raise DocumentError(
            f"no room left: the context has {max(0, room)} tokens for the prompt. Use a longer "
            "`context` or fewer `max_new_tokens`."
        )
    dropped = max(0, len(tokens) - space)
    return [*before, *tokens[dropped:]], dropped


def pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
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
