"""How fast a batch is, and how long the rest of it will take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from offload.layout import ceil_div

_REFRESH_S = 0.5  # the least time between two estimates
_ESTIMATES_PER_S = 5_000  # documents whose rest is estimated again


@dataclass(frozen=True)
class Size:
    """What is known of a document before it is read."""

    nbytes: int
    kind: str  # documents of one kind have about as many characters per byte
    is_text: bool = False


@dataclass(slots=True)
class _Request:
    """A request that is being processed."""

    tokens: int  # in its prompt
    reads: bool  # no earlier request has left its passage in a cache
    share: float = 0.0  # read, of its prompt
    read: float = 0.0  # tokens that count as read
    written: int = 0  # tokens


@dataclass(slots=True)
class _Document:
    """A document in progress, and its current round of prompts."""

    characters: float  # in this round
    passages: int = 1  # prompts that have all of them together
    answers: int = 1
    finished: int = 0  # answers
    later: int = 0  # answers in later rounds, at least
    requests: dict[str, _Request] = field(default_factory=dict)

    def rest(self, mean_answer: float) -> tuple[float, float]:
        """Return the characters and answers that are left, if answers have so many tokens."""
        requests = list(self.requests.values())  # another thread may change them
        read = ceil_div(self.finished, max(1, self.answers // self.passages))
        shares = read + sum(each.share for each in requests if each.reads)
        written = sum(min(1.0, each.written / max(1.0, mean_answer)) for each in requests)
        characters = self.characters * max(0.0, 1 - shares / self.passages)
        return characters, self.later + max(0.0, self.answers - self.finished - written)


@dataclass(slots=True)
class _Totals:
    """What has been read and written so far."""

    read_s: float = 0.0
    write_s: float = 0.0
    characters: float = 0.0  # read
    read: float = 0.0  # tokens
    written: int = 0  # tokens
    answers: int = 0  # finished ones
    answer_tokens: int = 0  # in these


class _Unread:
    """The documents that have not been read, whose characters are estimated by those that have."""

    def __init__(self, sizes: Mapping[str, Size]):
        self._sizes = dict(sizes)
        self._nbytes, self._characters = Counter[str](), Counter[str]()  # read ones, by kind
        self._count = 0  # documents that have been read
        self.longest = 0.0  # characters of a part, or of what is read of one that is cut
        self.is_split = False
        self.questions = 1

    def __len__(self) -> int:
        return len(self._sizes)

    def begin(self, id: str, characters: int) -> None:
        """Take out a document that has been read."""
        if (size := self._sizes.pop(id, None)) is not None:
            self._count += 1
            self._nbytes[size.kind] += size.nbytes
            self._characters[size.kind] += characters

    def drop(self, id: str) -> None:
        """Take out a document, if it is there, that has not been read."""
        self._sizes.pop(id, None)

    def rest(self) -> tuple[float, float]:
        """Return the characters of all, and how many answers there will be about them."""
        characters = answers = 0.0
        for size in list(self._sizes.values()):  # another thread may change them
            own, parts = self._estimate(size), 1
            if self.longest and self.is_split:
                parts = max(1, ceil(own / self.longest))
            elif self.longest:
                own = min(own, self.longest)
            characters += own
            answers += self.questions * (parts + (parts > 1))
        return characters, answers

    def _estimate(self, size: Size) -> float:
        if nbytes := self._nbytes[size.kind]:
            return size.nbytes * self._characters[size.kind] / nbytes
        if size.is_text:
            return size.nbytes
        return self._characters.total() / max(1, self._count)


class Pace:
    """The pace of a batch.

    Reading is assumed to take time in proportion to the characters of documents, and writing in
    proportion to tokens. Methods that are called for each token only count.
    """

    def __init__(
        self,
        sizes: Mapping[str, Size],
        max_new_tokens: int,
        is_live: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begin a batch.

        Args:
            sizes: the documents, by id.
            max_new_tokens: the maximum number of tokens of an answer.
            is_live: whether `prefill` and `decode` are called while requests are processed.
            clock: returns seconds.
        """
        self._unread = _Unread(sizes)
        self._max_new_tokens, self._is_live, self._clock = max_new_tokens, is_live, clock
        self._documents = dict[str, _Document]()
        self._totals = _Totals()
        self._last = clock()
        self._text, self._until = "", 0.0  # the last estimate, and when the next is due

    def begin(self, id: str, characters: int) -> None:
        """Begin a document, which has been read."""
        self._unread.begin(id, characters)
        self._documents[id] = _Document(characters)

    def update(self, id: str, number: int, finished: int, answers: int, passages: int) -> None:
        """Note how many answers of round `number` of a document are finished, and how many there
        are, about how many passages.
        """
        if (document := self._documents.get(id)) is None:
            return
        document.finished, document.answers, document.passages = finished, answers, passages
        if number > 1:  # the passages are answers
            document.characters = document.later = 0
            return
        self._unread.questions = answers // passages
        if passages > 1:
            document.later = answers // passages
            self._unread.is_split = True
            longest = document.characters / passages
            self._unread.longest = max(self._unread.longest, longest)

    def end(self, id: str) -> None:
        """End a document, also one that has failed."""
        self._unread.drop(id)
        self._documents.pop(id, None)

    def request(self, id: str, name: str, tokens: int, reads: bool, truncated: int = 0) -> None:
        """Begin a request about a document, with a prompt of `tokens`.

        `reads`: no earlier request has left its passage in a cache. `truncated` tokens of the
        document are left out.
        """
        if (document := self._documents.get(id)) is not None:
            if truncated and not document.requests and not document.finished:
                document.characters *= tokens / (tokens + truncated)
                self._unread.longest = max(self._unread.longest, document.characters)
            document.requests[name] = _Request(tokens, reads)

    def prefill(self, id: str, name: str, share: float) -> None:
        """Note which share of a request's prompt is read."""
        document, request = self._find(id, name)
        if request is not None:
            self._totals.read_s += self._since_last()
            request.share = share
            tokens = share * request.tokens if request.reads else 0.0  # others are mostly cached
            self._read(document, request, tokens)

    def decode(self, id: str, name: str, tokens: int, cached: int) -> None:
        """Note how many tokens of an answer are written, and of its prompt were in a cache."""
        document, request = self._find(id, name)
        if request is not None:
            self._totals.write_s += self._since_last()
            self._read(document, request, request.tokens - cached)
            self._write(request, tokens)

    def finish(self, id: str, name: str, counts: Mapping[str, Any]) -> None:
        """End a request, by the counts of its answer (`Stats.as_dict`)."""
        document, request = self._find(id, name)
        if request is None:
            return
        del document.requests[name]
        totals, cached = self._totals, counts["reused_tokens"] + counts["loaded_tokens"]
        self._read(document, request, request.tokens - cached)
        self._write(request, counts["new_tokens"])
        totals.answers += 1
        totals.answer_tokens += counts["new_tokens"]
        if not self._is_live:
            own = counts["time_to_first_token_s"], counts["decode_s"]
            if totals.answers == 1:
                self._last = self._clock() - sum(own)
            totals.read_s += own[0]
            totals.write_s += own[1]

    def seconds_left(self) -> float | None:
        """Return how long the rest will take; None as long as nothing is known."""
        totals = self._totals
        if not totals.characters or not (totals.answers or (totals.written and totals.write_s)):
            return None
        mean = totals.answer_tokens / totals.answers if totals.answers else self._max_new_tokens
        rests = [self._unread.rest()]
        rests += [each.rest(mean) for each in list(self._documents.values())]
        characters, answers = (sum(each) for each in zip(*rests, strict=True))
        seconds = characters * totals.read_s / totals.characters
        seconds += answers * mean * totals.write_s / max(1, totals.written)
        if not self._is_live:  # requests are processed in parallel
            seconds *= (self._clock() - self._last) / max(1e-9, totals.read_s + totals.write_s)
        return seconds

    def __str__(self) -> str:
        """Return the time that is left, and tokens per second, as far as they are known."""
        now = self._clock()
        if now >= self._until:
            documents = len(self._unread) + len(self._documents)
            self._until = now + max(_REFRESH_S, documents / _ESTIMATES_PER_S)
            self._text = self._describe()
        return self._text

    def _describe(self) -> str:
        totals, parts, rates = self._totals, list[str](), list[str]()
        if (seconds := self.seconds_left()) is not None:
            parts.append(f"about {rough_duration(seconds)} left")
        if self._is_live and totals.read_s and totals.read >= 1:
            rates.append(f"reading {totals.read / totals.read_s:,.0f}")
        if self._is_live and totals.write_s:
            rates.append(f"writing {totals.written / totals.write_s:,.1f}")
        if rates:
            parts.append(f"{', '.join(rates)} tokens/s")
        return "; ".join(parts)

    def _find(self, id: str, name: str) -> tuple[_Document, _Request | None]:
        document = self._documents.get(id) or _Document(0)
        return document, document.requests.get(name)

    def _since_last(self) -> float:
        now = self._clock()
        seconds, self._last = now - self._last, now
        return seconds

    def _read(self, document: _Document, request: _Request, tokens: float) -> None:
        """Count so many tokens of a request's prompt as read."""
        more = tokens - request.read
        request.read = tokens
        self._totals.read += more
        if request.reads:
            characters = document.characters / document.passages
            self._totals.characters += more / max(1, request.tokens) * characters

    def _write(self, request: _Request, tokens: int) -> None:
        self._totals.written += tokens - request.written
        request.written = tokens


def duration(seconds: float) -> str:
    """Return a readable time: 0.41 s, 12 s, 1 min 52 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{round(seconds, 3):.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rough_duration(seconds: float) -> str:
    """Return a time that is no more precise than an estimate: 20 s, 14 min, 2 h 5 min, 3 days."""
    if seconds < 95:
        return f"{max(10, 10 * round(seconds / 10))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
