"""Text to token ids, in bounded time and memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from offload.errors import InvalidRequestError, TierForceError

_MAX_CHARS_PER_TOKEN = 8  # more than the average of any language
_PART_CHARS_PER_TOKEN = 2  # small parts, to tokenize little more than the limit
_MIN_PART_CHARS = 1 << 16
_PRIVATE_USE = range(0xE000, 0x110000)


class ContextLengthError(InvalidRequestError):
    """A prompt is far longer than the context; at least `tokens` tokens were counted."""

    def __init__(self, tokens: int, context: int):
        super().__init__(
            f"the prompt is too long: it has at least {tokens:,} tokens, and the context is "
            f"{context:,}. Shorten it, or use a longer `context`."
        )
        self.tokens = tokens


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the offsets [start, end) of each token in the text, in characters."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without parsing special tokens in it.

    Raises InvalidRequestError for a text that cannot be encoded as UTF-8.
    """
    check_whole_characters(text)
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def prefix_tokens(tokenizer: Any) -> list[int]:
    """Return the token ids that a tokenizer puts before any text, such as <s>.

    Those that it puts after a text, such as </s>, are left out: a prompt is to be continued.
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
    """Raise InvalidRequestError for a text that cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has half a character, or bytes that are not UTF-8 (a lone surrogate at "
            f"index {error.start})."
        ) from error


def _parts(text: str, limit: int) -> Iterator[str]:
    """Yield a text in consecutive parts, each of a size proportional to `limit`.

    A text that is short enough to be tokenized at once is one part.
    """
    size = max(_MIN_PART_CHARS, _PART_CHARS_PER_TOKEN * limit)
    if len(text) <= max(_MIN_PART_CHARS, _MAX_CHARS_PER_TOKEN * limit):
        size = len(text)
    for start in range(0, len(text), size or 1):
        yield text[start : start + size]


def check_length(text: str, limit: int, count: Callable[[str], int]) -> None:
    """Raise ContextLengthError for a text that has far more than `limit` tokens.

    Only as much of the text is tokenized as the check needs. Cutting it into parts may change a few
    tokens at each cut, so a text that is only slightly too long is left to the caller.

    Args:
        text: a text of any length.
        limit: the maximum number of tokens.
        count: returns the number of tokens of a text.
    """
    tokens = 0
    for part in _parts(text, limit):
        if len(part) < len(text):  # one part is tokenized by the caller anyway
            tokens += count(part)
        if tokens > limit + limit // 4:
            raise ContextLengthError(tokens, limit)


def truncate_to(
    tokenizer: Any, text: str, max_tokens: int, keep_end: bool = False
) -> tuple[str, int]:
    """Return a text truncated to `max_tokens` tokens, and the number of dropped tokens.

    The end is cut off, or with `keep_end` the beginning, at whole characters. Memory is
    proportional to `max_tokens`.

    Raises InvalidRequestError for a text that cannot be encoded as UTF-8, and TierForceError for a
    text that is too long if the tokenizer does not report the offsets of tokens.
    """
    text, dropped = clip(tokenizer, text, max_tokens, keep_end)
    if not tokenizer.is_fast and len(plain_tokens(tokenizer, text)) <= max_tokens:
        return text, dropped
    encoded = _encode_with_offsets(tokenizer, text, split_special_tokens=True)
    if len(encoded.ids) <= max_tokens:
        return text, dropped
    excess = len(encoded.ids) - max(0, max_tokens)
    first, last = encoded.offsets[excess - 1][1], encoded.offsets[-excess][0]
    return text[first:] if keep_end else text[:last], dropped + excess


def token_starts(tokenizer: Any, text: str, limit: int) -> array[int]:
    """Return the indices (T,) of the first characters of a text's tokens.

    A text of far more than `limit` tokens is tokenized in parts, which may change a few at each
    cut. Raises TierForceError if the tokenizer does not report the offsets of tokens.
    """
    starts, done = array("q"), 0
    for part in _parts(text, limit):
        encoded = _encode_with_offsets(tokenizer, part, split_special_tokens=True)
        starts.extend(done + start for start, _ in encoded.offsets)
        done += len(part)
    return starts


def clip(tokenizer: Any, text: str, max_tokens: int, keep_end: bool) -> tuple[str, int]:
    """Return a text without the parts that surely exceed `max_tokens`, and their token count.

    The rest may still be slightly too long. Raises InvalidRequestError for a text that cannot be
    encoded as UTF-8.
    """
    check_whole_characters(text)
    parts, count, dropped = list[str](), 0, 0
    for part in _parts(text[::-1] if keep_end else text, max_tokens):
        part = part[::-1] if keep_end else part
        tokens = len(plain_tokens(tokenizer, part)) if len(part) < len(text) else 0
        if count > max_tokens + max_tokens // 4:
            dropped += tokens
        else:
            parts.append(part)
        count += tokens
    return "".join(reversed(parts) if keep_end else parts), dropped


class SpecialTokenGuard:
    """Keeps special tokens that occur in messages as plain text, whatever the template does.

    In rendered text, special tokens of the template and of a message cannot be distinguished.
    Therefore, before rendering, a marker character that no message has is inserted after every
    character of a message that could begin a special token. If a special token is then found at a
    marker, and only there, the marker stays in the text while it is tokenized, and the tokens of
    the marker are dropped. Everything else is tokenized as one text, as in transformers.
    """

    def __init__(self, tokenizer: Any, contents: Iterable[str]):
        """Guard the messages of one prompt, which have these `contents`."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._names = {token: each.content for token, each in added if each.special}
        used = set[str]().union(*contents)
        normalize = _normalize(tokenizer)
        firsts = {name[0] for name in self._names.values() if name}
        self._firsts = {each for each in used if {each, *normalize(each)} & firsts}
        self._mark = ""  # empty if no message needs one
        if self._firsts:
            used |= set(str(tokenizer.chat_template))
            unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
            self._mark = next((each for each in unused if each in normalize(each)), "")
            if not self._mark:
                raise InvalidRequestError(
                    "the messages use all private-use characters of Unicode; one must be unused."
                )

    def render(
        self, contents: Sequence[str], render_template: Callable[[Sequence[str]], str]
    ) -> str:
        """Return the rendered messages, for `encode`.

        Templates may look for these characters themselves, for example for <think>. If markers
        change the output of a template, fewer places are marked: those where the first two
        characters of a special token occur, or else only whole special tokens.

        Args:
            contents: the contents of the messages.
            render_template: renders messages with these contents.
        """
        if not self._mark:
            return render_template(contents)
        names = sorted(filter(None, self._names.values()), key=len, reverse=True)
        prefixes = dict.fromkeys(name[:2] for name in names)
        with suppress(Exception):  # errors of the template itself recur in the last rendering
            plain = render_template(contents)
            for patterns in (self._firsts, prefixes):
                guarded = render_template([self._insert_marks(each, patterns) for each in contents])
                if self.plain(guarded) == plain:
                    return guarded
        return render_template([self._insert_marks(each, names) for each in contents])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that `render` returned.

        Raises TierForceError if there are markers and the tokenizer does not report the offsets of
        tokens.
        """
        if not self._mark:
            return self._tokenizer(text, add_special_tokens=False).input_ids
        pieces = text.split(self._mark)  # a special token may begin at the end of all but the last
        _, encoded, ends = self._join(pieces, set())
        inside = self._pieces_in_special_tokens(encoded, ends)
        if not (split := {piece for pieces_of_token in inside for piece in pieces_of_token}):
            return encoded.ids
        text, encoded, ends = self._join(pieces, split)
        ids = []
        inside = self._pieces_in_special_tokens(encoded, ends)
        for token, (start, end), own in zip(encoded.ids, encoded.offsets, inside, strict=True):
            if own:  # a special token of one character, which a marker cannot split
                ids += plain_tokens(self._tokenizer, text[start:end].replace(self._mark, ""))
            elif text[start:end] != self._mark:
                ids.append(token)
        return ids

    def plain(self, text: str) -> str:
        """Return a text that `render` returned, without markers."""
        return text.replace(self._mark, "")

    def _insert_marks(self, content: str, patterns: Iterable[str]) -> str:
        """Return a message with a marker after the first character of each pattern in it."""
        for pattern in patterns:
            content = content.replace(pattern, pattern[0] + self._mark + pattern[1:])
        return content

    def _join(
        self, pieces: Sequence[str], split: Container[int]
    ) -> tuple[str, Encoded, dict[int, int]]:
        """Join pieces, with a marker after those with an index in `split`.

        Returns the text, its tokens, and the indices of all pieces but the last by the position of
        their last character.
        """
        parts, ends, length = list[str](), dict[int, int](), 0
        for index, piece in enumerate(pieces):
            part = piece + self._mark if index in split else piece
            if index + 1 < len(pieces):
                ends[length + len(piece) - 1] = index
            parts.append(part)
            length += len(part)
        text = "".join(parts)
        return text, _encode_with_offsets(self._tokenizer, text), ends

    def _pieces_in_special_tokens(
        self, encoded: Encoded, ends: Mapping[int, int]
    ) -> Iterator[list[int]]:
        """Yield for each token the pieces that end in it; none unless the token is special.

        A special token in which a piece ends is part of a message.
        """
        for token, span in zip(encoded.ids, encoded.offsets, strict=True):
            is_special = token in self._names
            yield [ends[at] for at in range(*span) if at in ends] if is_special else []


def _normalize(tokenizer: Any) -> Callable[[str], str]:
    """Return how a tokenizer normalizes text before it looks for special tokens."""
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    added = tokenizer.added_tokens_decoder.values()
    if normalizer is None or not any(each.special and each.normalized for each in added):
        return lambda text: text
    return normalizer.normalize_str


def _encode_with_offsets(tokenizer: Any, text: str, **options: bool) -> Encoded:
    """Tokenize a text. Raises TierForceError if the tokenizer does not report offsets."""
    if not tokenizer.is_fast:
        raise TierForceError(
            "the tokenizer does not report the offsets of its tokens: use a model folder with a "
            "tokenizer.json."
        )
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **options)
    return Encoded(encoding.input_ids, encoding.offset_mapping)
