"""A long text as consecutive spans that end where a chapter, a paragraph or a sentence does."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from decoding.text.encoding import check_whole_characters, token_starts
from offload.errors import InvalidRequestError
from offload.layout import ceil_div

_SLACK = 0.1  # share of the room left free, so that spans can end at better places
_CHAPTER = (
    "chapter|book|part|volume|act|scene|canto|letter|section|chapitre|livre|partie|tome|kapitel|"
    "buch|teil|abschnitt|capítulo|libro|parte|capitolo|hoofdstuk|deel|глава|часть|том|книга"
)
_ORDINAL = (
    r"\d|[ivxlcdm]+\b|(?:the[ \t]+)?(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|"
    r"twelve|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last)\b"
)
_HEADING = re.compile(
    r"#{1,2} \S"  # Markdown's
    rf"|[ \t]*(?:{_CHAPTER})[ \t]+(?:{_ORDINAL})[^\n]{{0,70}}(?:\n|$)"
    r"|[ \t]*第[\d一二三四五六七八九十百千零\u3007]{1,9}[章回节節卷部篇][^\n]{0,70}(?:\n|$)",
    re.IGNORECASE,
)
_HEADING_LENGTH = 80  # characters; a longer line alone is a paragraph
_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
# Where a span may end, from best to worst, and the share of a span's length by which it may differ
# from where spans would be equal: before a heading, after that many blank lines, ...
_BLANK_SHARES = {3: 0.2, 2: 0.15, 1: 0.1}
# ... and after a match of these.
_ENDS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\n\s*",
        r"[.!?…][\"'”\u2019»)\]]*\s+|[。\uff01\uff1f][”\u2019」』\uff09]*\s*",
        r"\s+",
    )
)
_END_SHARE = 0.05


@dataclass(frozen=True)
class Span:
    """The characters [start, end) of a text, and how many tokens they have, nearly."""

    start: int
    end: int
    tokens: int


def split_text(
    tokenizer: Any,
    text: str,
    max_tokens: int,
    fits: Callable[[str], bool] = lambda part: True,
    min_count: int = 1,
) -> list[Span]:
    """Return consecutive spans that cover a text, each of at most `max_tokens` tokens.

    As few as leave some slack, and nearly equally long: a span ends at a chapter or at several
    blank lines if there are some within a fifth of its length, else at a paragraph within a tenth,
    else at the nearest line, sentence or word. Spaces belong to the span before them.

    Args:
        tokenizer: a fast tokenizer.
        text: a text of any length.
        max_tokens: the maximum number of tokens of a span.
        fits: whether a span's text fits where it is to be used; its tokens may differ there.
        min_count: the minimum number of spans.

    Raises InvalidRequestError for a text that cannot be encoded as UTF-8, and for one that cannot
    be split so; TierForceError if the tokenizer does not report the offsets of tokens.
    """
    check_whole_characters(text)
    limit = max_tokens - min(max_tokens // 8, 8 + max_tokens // 256)  # tokens change at cuts
    if limit > 0:
        starts = token_starts(tokenizer, text, max_tokens)
        count = max(min_count, ceil_div(len(starts), max(1, int((1 - _SLACK) * limit))))
        max_count = 2 * count + 1
        while count <= max_count:
            spans = list(_spans(text, starts, count, limit))
            has_room = len(spans) >= min_count and all(
                span.tokens <= max_tokens and fits(text[span.start : span.end]) for span in spans
            )
            if has_room:
                return spans
            count += ceil_div(count, 16)
    raise InvalidRequestError(
        f"the text cannot be split into parts of at most {max(0, max_tokens)} tokens: use a longer "
        "`context`."
    )


def _spans(text: str, starts: Sequence[int], count: int, max_tokens: int) -> Iterator[Span]:
    """Yield `count` spans, or fewer if the text has few places to end them.

    `starts` (T,) holds the index of the first character of each token.
    """
    ends, first, total = [0], 0, len(starts)
    # half of the slack is kept for the spans that follow
    reserved = int((1 - _SLACK / 2) * max_tokens)
    for remaining in range(count, 1, -1):
        ideal = (total - first) / remaining
        high = min(first + max_tokens, total - 1)
        low = min(high, max(first + 1, total - (remaining - 1) * reserved))
        end = _best_end(text, starts, round(first + ideal), ideal, (low, high))
        if end > ends[-1]:  # several tokens may be one character
            ends.append(end)
            first = bisect_left(starts, end)
    ends.append(len(text))
    tokens = [bisect_left(starts, end) for end in ends]
    for (start, end), (before, after) in zip(pairwise(ends), pairwise(tokens), strict=True):
        yield Span(start, end, after - before)


def _best_end(
    text: str, starts: Sequence[int], middle: int, length: float, limits: tuple[int, int]
) -> int:
    """Return the index of the character after a span of nearly `length` tokens.

    It is near the start of token `middle`, and at a token within `limits`.
    """
    middle = min(max(middle, limits[0]), limits[1])

    def nearest(ends: Iterable[int], share: float) -> int | None:
        low, high = _window(starts, middle, share * length, limits)
        found = [end for end in ends if low <= end <= high]
        return min(found, key=lambda end: abs(end - starts[middle]), default=None)

    low, high = _window(starts, middle, max(_BLANK_SHARES.values()) * length, limits)
    blanks = [
        match
        for match in _BLANK_LINES.finditer(text, max(0, low - _HEADING_LENGTH), high)
        if not _is_heading(text, match.start())
    ]
    headings = [match.end() for match in blanks if _HEADING.match(text, match.end())]
    if (end := nearest(headings, _BLANK_SHARES[3])) is not None:
        return end
    for count, share in _BLANK_SHARES.items():
        ends = [match.end() for match in blanks if match[0].count("\n") > count]
        if (end := nearest(ends, share)) is not None:
            return end
    low, high = _window(starts, middle, _END_SHARE * length, limits)
    for pattern in _ENDS:
        matches = pattern.finditer(text, max(0, low - 1), high)
        ends = [match.end() for match in matches if not _is_heading(text, match.start())]
        if (end := nearest(ends, _END_SHARE)) is not None:
            return end
    return starts[middle]


def _window(
    starts: Sequence[int], middle: int, distance: float, limits: tuple[int, int]
) -> tuple[int, int]:
    """Return the characters at which the tokens around `middle` start."""
    low, high = max(limits[0], int(middle - distance)), min(limits[1], int(middle + distance))
    return starts[low], starts[high]


def _is_heading(text: str, end: int) -> bool:
    """Return whether the line that ends at `end` seems to be a heading, which begins a span."""
    start = text.rfind("\n", max(0, end - _HEADING_LENGTH), end) + 1
    line = text[start:end].strip()
    is_alone = start > 0 and not text[max(0, start - 2) : start].strip("\r\n")
    return bool(is_alone and line and line[-1] not in ".,;:!?…\"'”\u2019»)-—")
