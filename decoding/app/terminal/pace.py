"""How fast a batch is, and how long the rest of it will take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from offload.layout import ceil_div

_ESTIMATES_PER_S = 5_000  # documents whose length is estimated again


@dataclass(frozen=True)
class Size:
    """What is known of a document before it is read."""

    nbytes: int
    kind: str  # documents of one kind have about as many characters per byte
    is_text: bool = False


@dataclass
class _Document:
    """A document in progress, and its current round of prompts."""

    characters: int  # in this round
    passages: int = 1  # prompts that have all of them together
    answers: int = 1
    finished: int = 0  # answers
    later: int = 0  # answers in later rounds, at least


@dataclass
class _Request:
    """A request that is being processed."""

    document: str
    tokens: int  # in its prompt
    reads: bool  # no earlier request has left its text in a cache
    read: float = 0.0  # share of the prompt
    written: int = 0  # tokens


@dataclass
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

    def __init__(self, sizes: Mapping[str, Size], clock: Callable[[], float]):
        self._sizes, self._clock = dict(sizes), clock
        self._nbytes, self._characters = Counter[str](), Counter[str]()  # read ones, by kind
        self._count = 0  # documents that have been read
        self._total = 0.0, 0.0
        self._until = 0.0  # the time when the total is out of date

    def read(self, id: str, characters: int) -> None:
        """Take a document that has been read."""
        size = self._sizes.pop(id, None)
        if len(self._sizes) < _ESTIMATES_PER_S:
            self._until = 0.0
        if size is not None and characters:
            self._count += 1
            self._nbytes[size.kind] += size.nbytes
            self._characters[size.kind] += characters

    def total(self, longest: float, questions: int) -> tuple[float, float]:
        """Return the characters of all, and how many answers there will be about them.

        A document of more than `longest` characters is split.
        """
        now = self._clock()
        if now >= self._until:
            characters = answers = 0.0
            for size in list(self._sizes.values()):  # another thread may change them
                own = self._estimate(size)
                parts = max(1, ceil(own / longest)) if longest else 1
                characters += own
                answers += questions * (parts + (parts > 1))
            self._total = characters, answers
            self._until = now + len(self._sizes) / _ESTIMATES_PER_S
        return self._total

    def _estimate(self, size: Size) -> float:
        if nbytes := self._nbytes[size.kind]:
            return size.nbytes * self._characters[size.kind] / nbytes
        if size.is_text:
            return size.nbytes
        return self._characters.total() / max(1, self._count)


class Pace:
    """The pace of a batch.

    Reading is assumed to take time in proportion to the characters of documents, and writing in
    proportion to tokens.
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
        self._unread = _Unread(sizes, clock)
        self._max_new_tokens, self._is_live, self._clock = max_new_tokens, is_live, clock
        self._documents = dict[str, _Document]()
        self._requests = dict[str, _Request]()
        self._totals = _Totals()
        self._longest, self._questions = 0.0, 1
        self._last = clock()

    def begin(self, id: str, characters: int) -> None:
        """Begin a document, which has been read."""
        self._unread.read(id, characters)
        self._documents[id] = _Document(characters)

    def update(self, id: str, finished: int, answers: int, passages: int) -> None:
        """Note how many answers of a document's current round are finished, and how many there
        are, about how many passages.
        """
        document = self._documents.get(id)
        if document is None or not answers:
            return
        if finished < document.finished:  # the next round, whose passages are short
            document.characters = document.later = 0
        if document.characters:
            self._questions = answers // passages
            if passages > 1:
                document.later = self._questions
                self._longest = max(self._longest, document.characters / passages)
        document.finished, document.answers, document.passages = finished, answers, passages

    def end(self, id: str) -> None:
        """End a document, also one that has failed."""
        self._unread.read(id, 0)
        self._documents.pop(id, None)
        for name in [name for name, each in self._requests.items() if each.document == id]:
            del self._requests[name]

    def request(self, name: str, document: str, tokens: int, reads: bool) -> None:
        """Begin a request with a prompt of `tokens`.

        `reads`: it reads a text that no earlier request has left in a cache.
        """
        self._requests[name] = _Request(document, tokens, reads)

    def prefill(self, name: str, share: float) -> None:
        """Note which share of a prompt is read."""
        if (request := self._requests.get(name)) is not None:
            self._totals.read_s += self._since_last()
            self._read(request, share)

    def decode(self, name: str, tokens: int) -> None:
        """Note how many tokens of an answer are written."""
        if (request := self._requests.get(name)) is not None:
            self._totals.write_s += self._since_last()
            self._write(request, tokens)

    def finish(self, name: str, counts: Mapping[str, Any]) -> None:
        """End a request, by the counts of its answer (`Stats.as_dict`)."""
        if (request := self._requests.pop(name, None)) is None:
            return
        totals = self._totals
        self._read(request, 1.0)
        self._write(request, counts["new_tokens"])
        totals.read -= counts["reused_tokens"] + counts["loaded_tokens"]
        totals.answers += 1
        totals.answer_tokens += counts["new_tokens"]
        if not self._is_live:
            own = counts["time_to_first_token_s"], counts["decode_s"]
            if totals.answers == 1:
                self._last = self._clock() - sum(own)
            totals.read_s += own[0]
            totals.write_s += own[1]

    @property
    def seconds_left(self) -> float | None:
        """Return how long the rest will take; None as long as nothing is known."""
        totals = self._totals
        if not (totals.characters and totals.written and totals.write_s):
            return None
        mean = totals.answer_tokens / totals.answers if totals.answers else self._max_new_tokens
        characters, answers = self._unread.total(self._longest, self._questions)
        requests = list(self._requests.values())  # another thread may change them
        for id, document in list(self._documents.items()):
            own = [each for each in requests if each.document == id]
            questions = max(1, document.answers // document.passages)
            read = ceil_div(document.finished, questions) + sum(
                each.read for each in own if each.reads
            )
            characters += document.characters * max(0.0, 1 - read / document.passages)
            answers += document.later + document.answers - document.finished
            answers -= sum(min(1.0, each.written / max(1.0, mean)) for each in own)
        seconds = characters * totals.read_s / totals.characters
        seconds += max(0.0, answers) * mean * totals.write_s / totals.written
        if not self._is_live:  # requests are processed in parallel
            seconds *= (self._clock() - self._last) / (totals.read_s + totals.write_s)
        return seconds

    def __str__(self) -> str:
        """Return the time that is left, and tokens per second, as far as they are known."""
        totals, parts = self._totals, list[str]()
        if (seconds := self.seconds_left) is not None:
            parts.append(f"about {rough_duration(seconds)} left")
        if self._is_live and totals.read_s and totals.read > 0:
            parts.append(f"{totals.read / totals.read_s:,.0f} tokens/s read")
        if self._is_live and totals.write_s:
            parts.append(f"{totals.written / totals.write_s:,.1f} written")
        return ", ".join(parts)

    def _since_last(self) -> float:
        now = self._clock()
        seconds, self._last = now - self._last, now
        return seconds

    def _read(self, request: _Request, share: float) -> None:
        document = self._documents.get(request.document)
        more = share - request.read
        request.read = share
        self._totals.read += more * request.tokens
        if document is not None and request.reads:
            self._totals.characters += more * document.characters / document.passages

    def _write(self, request: _Request, tokens: int) -> None:
        self._totals.written += tokens - request.written
        request.written = tokens


def duration(seconds: float) -> str:
    """Return a readable time: 0.41 s, 12 s, 1 min 52 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rough_duration(seconds: float) -> str:
    """Return a readable time that is no more precise than an estimate: 20 s, 14 min, 2 h 5 min."""
    if seconds < 55:
        return f"{max(10, 10 * round(seconds / 10))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
