"""Text to token ids, in time and memory that the caller bounds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from offload.errors import DocumentError, TierForceError

_SURE_CHARS = 8  # a token, more than any language takes on average: longer texts are counted first
_PART_CHARS = 2  # a token of the limit, so that little more than the limit is tokenised
_MIN_CHARS = 1 << 16
_PRIVATE_USE = range(0xE000, 0x110000)


class ContextLengthError(DocumentError):
    """A prompt is far longer than the context; `tokens` of it were counted."""

    def __init__(self, tokens: int, context: int):
        super().__init__(
            f"the prompt has at least {tokens:,} tokens, and the context is {context:,}: shorten "
            "it, or use a longer `context`."
        )
        self.tokens = tokens


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the characters [start, end) of the text that each of them stands for."""

    ids: list[int]
    spans: list[tuple[int, int]]

    def cut(self, text: str, count: int, keep_end: bool) -> str:
        """Return the text without its last `count` tokens, or with `keep_end` without its first."""
        return text[self.spans[count][0] :] if keep_end else text[: self.spans[-count - 1][1]]


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text in which nothing is taken for a special token.

    Raises DocumentError for a text that cannot be written as UTF-8.
    """
    refuse_half_characters(text)
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def prefix_tokens(tokenizer: Any) -> list[int]:
    """Return the ids that a tokenizer puts before any text, such as <s>.

    What it would put after the text, such as </s>, ends a document: a prompt goes on.
    """
    encoding = tokenizer("a", return_special_tokens_mask=True)
    ids = []
    for token, is_added in zip(encoding.input_ids, encoding.special_tokens_mask, strict=True):
        if not is_added:
            break
        ids.append(token)
    ends = {tokenizer.eos_token_id} - {tokenizer.bos_token_id}
    return [token for token in ids if token not in ends]


def refuse_half_characters(text: str) -> None:
    """Raise DocumentError for a text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"the text has half a character, or bytes that are not UTF-8: a lone surrogate at "
            f"index {error.start}."
        ) from error


def parts(text: str, limit: int) -> Iterator[str]:
    """Yield a text in consecutive parts, each of which takes memory in proportion to `limit`.

    A text whose tokenisation is bounded already is one part.
    """
    size = max(_MIN_CHARS, _PART_CHARS * limit)
    if len(text) <= max(_MIN_CHARS, _SURE_CHARS * limit):
        size = len(text)
    for start in range(0, len(text), size or 1):
        yield text[start : start + size]


def check_length(tokenizer: Any, text: str, limit: int) -> None:
    """Raise ContextLengthError for a text that has far more than `limit` tokens.

    Of a longer text only so much is tokenised as shows that. A cut between two parts may change
    a few tokens beside it, so a text that is only a little too long is left to the caller.
    """
    refuse_half_characters(text)
    count = 0
    for part in parts(text, limit):
        if len(part) < len(text):  # else the caller tokenises it as soon
            count += len(plain_tokens(tokenizer, part))
        if count > limit + limit // 4:
            raise ContextLengthError(count, limit)


def clipped(tokenizer: Any, text: str, room: int, keep_end: bool = False) -> tuple[str, int]:
    """Return as much of a text as may fit, in bounded memory, and how many tokens the rest has.

    The text's end is the rest, or with `keep_end` its beginning.
    """
    refuse_half_characters(text)
    kept, count, dropped = list[str](), 0, 0
    whole = text[::-1] if keep_end else text
    for part in parts(whole, room):
        part = part[::-1] if keep_end else part
        tokens = len(plain_tokens(tokenizer, part)) if len(part) < len(text) else 0
        if count > room + room // 4:
            dropped += tokens
        else:
            kept.append(part)
        count += tokens
    return "".join(reversed(kept) if keep_end else kept), dropped


def plain_spans(tokenizer: Any, text: str) -> Encoded:
    """Return `plain_tokens` with the characters that each of them stands for.

    Raises TierForceError for a tokenizer that cannot tell them.
    """
    refuse_half_characters(text)
    return _with_spans(tokenizer, text, split_special_tokens=True)


class SpecialTokenGuard:
    """Keeps what looks like a special token in a message as text, whatever a template does to it.

    `protect` inserts a character that no message has into each such place, right after its first
    character. The message is then rendered and tokenised as any other, and `encode` drops the
    tokens of the inserted characters. All else is tokenised as one text, as transformers does it.
    """

    def __init__(self, tokenizer: Any, contents: Iterable[str]):
        """Guard the messages of one prompt, whose texts are `contents`."""
        self._tokenizer = tokenizer
        self._special = {
            token: added.content
            for token, added in tokenizer.added_tokens_decoder.items()
            if added.special and added.content
        }
        rests: dict[str, list[str]] = {}  # what follows the first character, by that character
        for name in self._special.values():
            rests.setdefault(name[0], []).append(re.escape(name[1:]))
        # a lookahead finds names that overlap; a plain first character is searched for fast
        self._names = re.compile(
            "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
            or "(?!)"
        )
        contents = list(contents)
        self._mark = ""  # no message needs one
        if any(map(self._names.search, contents)):
            used = set(str(tokenizer.chat_template)).union(*contents)
            free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
            if not (mark := next(free, "")):
                raise DocumentError("the messages use all of Unicode's private characters.")
            self._mark = mark

    def protect(self, content: str) -> str:
        """Return a message's text with the inserted characters."""
        if not self._mark:
            return content
        return self._names.sub(lambda found: found[0] + self._mark, content)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text that `protect`ed messages stand in.

        Raises TierForceError for a tokenizer that cannot tell the characters of its tokens, where
        there is something to protect.
        """
        if not self._mark:
            return self._tokenizer(text, add_special_tokens=False).input_ids
        ids = []
        found = _with_spans(self._tokenizer, text)
        for token, (start, end) in zip(found.ids, found.spans, strict=True):
            if text[start:end] == self._mark:
                continue
            if token in self._special and text[end : end + 1] == self._mark:
                # its name is one character, which nothing can be inserted into
                ids += plain_tokens(self._tokenizer, text[start:end])
            else:
                ids.append(token)
        return ids


def _with_spans(tokenizer: Any, text: str, **options: bool) -> Encoded:
    if not tokenizer.is_fast:
        raise TierForceError(
            "the tokenizer does not tell which characters its tokens stand for: use a model folder "
            "with a tokenizer.json."
        )
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **options)
    return Encoded(found.input_ids, found.offset_mapping)
