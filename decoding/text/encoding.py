"""Text to token ids, in time and memory that the caller bounds."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from offload.errors import InvalidRequestError, TierForceError

_SURE_CHARS = 8  # a token, more than any language takes on average: longer texts are counted first
_PART_CHARS = 2  # a token of the limit, so that little more than the limit is tokenised
_MIN_CHARS = 1 << 16
_PRIVATE_USE = range(0xE000, 0x110000)


class ContextLengthError(InvalidRequestError):
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


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text in which nothing is taken for a special token.

    Raises InvalidRequestError for a text that cannot be written as UTF-8.
    """
    check_whole_characters(text)
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


def check_whole_characters(text: str) -> None:
    """Raise InvalidRequestError for a text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has half a character, or bytes that are not UTF-8: a lone surrogate at "
            f"index {error.start}."
        ) from error


def _parts(text: str, limit: int) -> Iterator[str]:
    """Yield a text in consecutive parts, each of which takes memory in proportion to `limit`.

    A text whose tokenisation is bounded already is one part.
    """
    size = max(_MIN_CHARS, _PART_CHARS * limit)
    if len(text) <= max(_MIN_CHARS, _SURE_CHARS * limit):
        size = len(text)
    for start in range(0, len(text), size or 1):
        yield text[start : start + size]


def check_length(text: str, limit: int, count: Callable[[str], int]) -> None:
    """Raise ContextLengthError for a text that has far more than `limit` tokens.

    Of a longer text only so much is tokenised as shows that. A cut between two parts may change
    a few tokens beside it, so a text that is only a little too long is left to the caller.

    Args:
        text: of any length.
        limit: tokens.
        count: returns the tokens of a text.
    """
    tokens = 0
    for part in _parts(text, limit):
        if len(part) < len(text):  # else the caller tokenises it as soon
            tokens += count(part)
        if tokens > limit + limit // 4:
            raise ContextLengthError(tokens, limit)


def truncate_to(tokenizer: Any, text: str, room: int, keep_end: bool = False) -> tuple[str, int]:
    """Return a text without what exceeds `room` of its tokens, and how many tokens that has.

    The end is cut off, or with `keep_end` the beginning: whole characters, in memory that grows
    with `room` alone. A longer text is returned whole where it may just fit.

    Raises InvalidRequestError for a text that cannot be written as UTF-8, and TierForceError for a
    tokenizer that cannot tell where a text is to be cut.
    """
    text, dropped = clip(tokenizer, text, room, keep_end)
    if not tokenizer.is_fast and len(plain_tokens(tokenizer, text)) <= room:
        return text, dropped
    found = _with_spans(tokenizer, text, split_special_tokens=True)
    if len(found.ids) <= room:
        return text, dropped
    excess = len(found.ids) - max(0, room)
    first, last = found.spans[excess - 1][1], found.spans[-excess][0]
    return text[first:] if keep_end else text[:last], dropped + excess


def clip(tokenizer: Any, text: str, room: int, keep_end: bool) -> tuple[str, int]:
    """Return as much of a text as may fit, and how many tokens the rest has.

    Raises InvalidRequestError for a text that cannot be written as UTF-8.
    """
    check_whole_characters(text)
    kept, count, dropped = list[str](), 0, 0
    for part in _parts(text[::-1] if keep_end else text, room):
        part = part[::-1] if keep_end else part
        tokens = len(plain_tokens(tokenizer, part)) if len(part) < len(text) else 0
        if count > room + room // 4:
            dropped += tokens
        else:
            kept.append(part)
        count += tokens
    return "".join(reversed(kept) if keep_end else kept), dropped


class SpecialTokenGuard:
    """Keeps what looks like a special token in a message as text, whatever a template does to it.

    A template's special tokens and a message's cannot be told apart once they are rendered. So a
    character that no message has is inserted after every character in a message that a special
    token could begin with, before the message is rendered. Where a special token is then found at
    such a place, and there alone, the inserted character stays while the text is tokenised, and
    its own tokens are dropped: all else is tokenised as one text, as transformers does it.
    """

    def __init__(self, tokenizer: Any, contents: Iterable[str]):
        """Guard the messages of one prompt, whose texts are `contents`."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._names = {token: each.content for token, each in added if each.special}
        used = set[str]().union(*contents)
        normalize = _normalize(tokenizer)
        firsts = {name[0] for name in self._names.values() if name}
        self._firsts = {each for each in used if {each, *normalize(each)} & firsts}
        self._mark = ""  # no message needs one
        if self._firsts:
            used |= set(str(tokenizer.chat_template))
            free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
            self._mark = next((each for each in free if each in normalize(each)), "")
            if not self._mark:
                raise InvalidRequestError("the messages use all of Unicode's private characters.")

    def render(self, contents: Sequence[str], write: Callable[[Sequence[str]], str]) -> str:
        """Return what a template writes, to be handed to `encode`.

        A template that looks for such characters itself, as those do that look for thoughts, sees
        them untouched, but in what looks like a special token.

        Args:
            contents: of the messages.
            write: renders messages of these contents.
        """
        if not self._mark:
            return write(contents)
        names = sorted(filter(None, self._names.values()), key=len, reverse=True)
        beginnings = dict.fromkeys(name[:2] for name in names)
        with suppress(Exception):  # of a template's own: what it raises at last is told
            plain = write(contents)
            for sought in (self._firsts, beginnings):
                guarded = write([self._marked(each, sought) for each in contents])
                if self.plain(guarded) == plain:
                    return guarded
        return write([self._marked(each, names) for each in contents])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text that `render` has returned.

        Raises TierForceError for a tokenizer that cannot tell the characters of its tokens, where
        messages have what a special token could begin with.
        """
        if not self._mark:
            return self._tokenizer(text, add_special_tokens=False).input_ids
        pieces = text.split(self._mark)  # each but the last ends where a special token may begin
        _, found, places = self._joined(pieces, set())
        if not (split := {place for each in self._in_messages(found, places) for place in each}):
            return found.ids
        text, found, places = self._joined(pieces, split)
        ids = []
        own = self._in_messages(found, places)
        for token, (start, end), inside in zip(found.ids, found.spans, own, strict=True):
            if inside:  # a name of one character, which nothing can be inserted into
                ids += plain_tokens(self._tokenizer, text[start:end].replace(self._mark, ""))
            elif text[start:end] != self._mark:
                ids.append(token)
        return ids

    def plain(self, text: str) -> str:
        """Return text that `render` has returned without the inserted characters."""
        return text.replace(self._mark, "")

    def _marked(self, content: str, names: Iterable[str]) -> str:
        """Return a message with the inserted character after the first one of each of `names`."""
        for name in names:
            content = content.replace(name, name[0] + self._mark + name[1:])
        return content

    def _joined(
        self, pieces: Sequence[str], split: Container[int]
    ) -> tuple[str, Encoded, dict[int, int]]:
        """Join pieces by the inserted character where they are `split`, else by nothing.

        Returns the text, its tokens, and the numbers of the pieces by where each ends in it.
        """
        parts, places, length = list[str](), dict[int, int](), 0
        for number, piece in enumerate(pieces):
            part = piece + self._mark if number in split else piece
            if number + 1 < len(pieces):
                places[length + len(piece) - 1] = number
            parts.append(part)
            length += len(part)
        text = "".join(parts)
        return text, _with_spans(self._tokenizer, text), places

    def _in_messages(self, found: Encoded, places: Mapping[int, int]) -> Iterator[list[int]]:
        """Yield, for each token, the pieces that end in it if it is special: it is a message's."""
        for token, span in zip(found.ids, found.spans, strict=True):
            is_special = token in self._names
            yield [places[at] for at in range(*span) if at in places] if is_special else []


def _normalize(tokenizer: Any) -> Callable[[str], str]:
    """Return what a tokenizer does to text before it looks for special tokens in it."""
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    added = tokenizer.added_tokens_decoder.values()
    if normalizer is None or not any(each.special and each.normalized for each in added):
        return lambda text: text
    return normalizer.normalize_str


def _with_spans(tokenizer: Any, text: str, **options: bool) -> Encoded:
    """Tokenise a text. Raises TierForceError for a tokenizer that cannot tell spans."""
    if not tokenizer.is_fast:
        raise TierForceError(
            "the tokenizer does not tell which characters its tokens stand for: use a model folder "
            "with a tokenizer.json."
        )
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **options)
    return Encoded(found.input_ids, found.offset_mapping)
