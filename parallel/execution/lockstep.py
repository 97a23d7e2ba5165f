"""Passes on all ranks: rank 0 decides and announces, the others follow.

All that depends on randomness, drafts included, happens on rank 0 alone. Before each pass it sends
one small message: which models and caches, at what length each cache stands (the verdict of the
round before), and the tokens of the pass. So ranks cannot drift apart, and rank 0 may give up a
text between any two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload.cache.base import Cache
from offload.errors import TierForceError
from offload.memory.host import give_back
from parallel.execution.batched_forward import Pass
from parallel.model.transformer import Llama
from parallel.ranks.process_group import Group, on_device

# in place of how many texts share a pass
_OPEN = 0  # another text is opened
_CLOSE = -1  # one is over: its index follows
_EXTEND = -2  # one is read on: its index follows, and then a message of its own
_IDLE = -3  # nothing yet
_HEADER = 5  # numbers of each text in a pass: text, level, length of the cache, rows, tokens


@dataclass(frozen=True)
class Level:
    """One level of a text's hierarchy on this rank: a model, and the cache it runs on."""

    name: str
    model: Llama
    cache: Cache
    announced: bool = True  # all ranks make its passes together


@dataclass(frozen=True)
class _Extension:
    """What rank 0 tells the others of a text that is read on."""

    tokens: list[int]  # all of the text
    kept: int  # of which so many may stay in the caches
    rooms: list[int]  # new tokens for which there are to be larger ones, the first that fit
    lengths: list[int]  # of the announced levels' caches


class OpenText(Protocol):
    """A text whose caches are there."""

    levels: list[Level]  # those that are announced come first, in one order on all ranks
    max_tokens: int  # of its longest pass

    def make(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Make passes of one model as one: the first is on one of its caches.

        Others are on those of texts that share it. Returns the logits of each.
        """
        ...

    def forget(self, other: OpenText) -> None:
        """Let go of what passes that it shared with another text left here."""
        ...

    def extend(self, tokens: Sequence[int], kept: int, rooms: Sequence[int]) -> Tensor:
        """Read the text on, or another one with the same beginning; return the logits (1, V).

        Where there are to be larger caches, raises FitError on all ranks.
        """
        ...

    def close(self) -> None:
        """Let go of what the text holds on this rank."""
        ...


class Lockstep:
    """The texts that are open, in one order on all ranks, and the passes on their caches."""

    def __init__(self, group: Group):
        self.group = group
        self.texts: list[OpenText] = []

    def add(self, text: OpenText) -> None:
        """Let passes on the text's caches be announced from now on; on all ranks."""
        self.texts.append(text)

    def close(self, text: OpenText) -> None:
        """Forget a text, and end it on this rank; on all ranks."""
        self.texts.remove(text)
        for other in self.texts:
            other.forget(text)
        text.close()
        give_back()

    # -- rank 0 ------------------------------------------------------------------------------------

    def __call__(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Make passes of one model as one, on all its ranks.

        Each is on another text's cache. Returns the logits (rows, V) of each.
        """
        places = [self._place(asked.cache) for asked in passes]
        text, level = places[0]
        if self.group.size > 1 and self.texts[text].levels[level].announced:
            headers, tokens = list[int](), list[int]()
            for asked, place in zip(passes, places, strict=True):
                headers += [*place, asked.cache.length, asked.rows, len(asked.tokens)]
                tokens += asked.tokens.tolist()
            self._announce([len(passes), *headers, *tokens])
        return self._make(passes, places)

    def announce_another(self) -> None:
        """Tell ranks that are in the middle of other texts that one more is opened."""
        if self.texts:
            self._announce([_OPEN])

    def announce_nothing(self) -> None:
        """Tell the other ranks, which wait for a pass of a text, to go on waiting."""
        self._announce([_IDLE])

    def announce_extension(
        self, text: OpenText, tokens: Sequence[int], kept: int, rooms: Sequence[int]
    ) -> None:
        """Tell the other ranks that a text is read on; `text.extend` is to follow, with the same.

        It is `tokens` now, of which the first `kept` are what it was.
        """
        lengths = [level.cache.length for level in text.levels if level.announced]
        self._announce([_EXTEND, self.texts.index(text)])
        self.group.broadcast(_Extension(list(tokens), kept, list(rooms), lengths))

    def announce_end(self, text: OpenText) -> None:
        """Tell the other ranks that a text is over."""
        self._announce([_CLOSE, self.texts.index(text)])

    # -- the other ranks ---------------------------------------------------------------------------

    def follow(self) -> OpenText | None:
        """Make every pass that rank 0 announces, until a text is over or another is opened.

        Returns the text that is over, or None.
        """
        while True:
            count, *numbers = self.group.broadcast_numbers([], self._size())
            if count == _IDLE:
                continue
            if count == _OPEN:
                return None
            if count == _CLOSE:
                return self.texts[numbers[0]]
            if count == _EXTEND:
                self._extend(self.texts[numbers[0]])
            else:
                self._follow(count, numbers)

    def _extend(self, text: OpenText) -> None:
        nothing: _Extension | None = None
        extension = self.group.broadcast(nothing)
        assert extension is not None
        for level, length in zip(text.levels, extension.lengths, strict=False):
            level.cache.settle(length)
        # raised on rank 0 too, which tells
        with suppress(TierForceError):
            text.extend(extension.tokens, extension.kept, extension.rooms)

    def _follow(self, count: int, numbers: list[int]) -> None:
        passes, places = list[Pass](), list[tuple[int, int]]()
        at = count * _HEADER
        for first in range(0, at, _HEADER):
            text, index, length, rows, tokens = numbers[first : first + _HEADER]
            level = self.texts[text].levels[index]
            level.cache.settle(length)
            read = on_device(numbers[at : at + tokens], self.group.device)
            passes.append(Pass(level.model, level.cache, read, rows))
            places.append((text, index))
            at += tokens
        self._make(passes, places)

    # -- all ranks ---------------------------------------------------------------------------------

    def _make(self, passes: Sequence[Pass], places: Sequence[tuple[int, int]]) -> list[Tensor]:
        text, _ = places[0]
        return self.texts[text].make(passes)

    def _place(self, cache: Cache) -> tuple[int, int]:
        """Return which text a cache is of, and of which level."""
        for index, text in enumerate(self.texts):
            for at, level in enumerate(text.levels):
                if level.cache is cache:
                    return index, at
        raise ValueError("a pass on a cache of no text that is open")

    def _announce(self, numbers: list[int]) -> None:
        size = self._size()
        self.group.broadcast_numbers(numbers + [0] * (size - len(numbers)), size)

    def _size(self) -> int:
        """Return the numbers of a message, with room for a pass of all texts."""
        return 1 + sum(_HEADER + text.max_tokens for text in self.texts)
