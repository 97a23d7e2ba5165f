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
from offload.memory.host import trim_heap
from parallel.execution.batched_forward import ForwardRequest
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup, ints_to_device_async

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
    model: Transformer
    cache: Cache
    is_sharded: bool = True  # all ranks make its passes together


@dataclass(frozen=True)
class _Extension:
    """What rank 0 tells the others of a text that is read on."""

    tokens: list[int]  # all of the text
    cached: int  # of which so many may stay in the caches
    max_new_tokens: list[
        int
    ]  # new tokens for which there are to be larger ones, the first that fit
    lengths: list[int]  # of the announced levels' caches


class OpenSequence(Protocol):
    """A text whose caches are there."""

    levels: list[Level]  # those that are announced come first, in one order on all ranks
    max_tokens: int  # of its longest pass

    def run_forward(self, passes: Sequence[ForwardRequest]) -> list[Tensor]:
        """Make passes of one model as one: the first is on one of its caches.

        Others are on those of texts that share it. Returns the logits of each.
        """
        ...

    def evict_shared_graphs(self, other: OpenSequence) -> None:
        """Let go of what passes that it shared with another text left here."""
        ...

    def extend(self, tokens: Sequence[int], kept: int, rooms: Sequence[int]) -> Tensor:
        """Read the text on, or another one with the same beginning; return the logits (1, V).

        Where there are to be larger caches, raises InsufficientMemoryError on all ranks.
        """
        ...

    def close(self) -> None:
        """Let go of what the text holds on this rank."""
        ...


class TensorParallelExecutor:
    """The texts that are open, in one order on all ranks, and the passes on their caches."""

    def __init__(self, group: TensorParallelGroup):
        self.group = group
        self.sequences: list[OpenSequence] = []

    def add(self, text: OpenSequence) -> None:
        """Let passes on the text's caches be announced from now on; on all ranks."""
        self.sequences.append(text)

    def close(self, text: OpenSequence) -> None:
        """Forget a text, and end it on this rank; on all ranks."""
        self.sequences.remove(text)
        for other in self.sequences:
            other.evict_shared_graphs(text)
        text.close()
        trim_heap()

    # -- rank 0 ------------------------------------------------------------------------------------

    def __call__(self, passes: Sequence[ForwardRequest]) -> list[Tensor]:
        """Make passes of one model as one, on all its ranks.

        Each is on another text's cache. Returns the logits (rows, V) of each.
        """
        places = [self._locate(asked.cache) for asked in passes]
        text, level = places[0]
        if self.group.size > 1 and self.sequences[text].levels[level].is_sharded:
            headers, tokens = list[int](), list[int]()
            for asked, place in zip(passes, places, strict=True):
                headers += [*place, asked.cache.length, asked.rows, len(asked.tokens)]
                tokens += asked.tokens.tolist()
            self._broadcast([len(passes), *headers, *tokens])
        return self._run_forward(passes, places)

    def broadcast_open(self) -> None:
        """Tell ranks that are in the middle of other texts that one more is opened."""
        if self.sequences:
            self._broadcast([_OPEN])

    def broadcast_idle(self) -> None:
        """Tell the other ranks, which wait for a pass of a text, to go on waiting."""
        self._broadcast([_IDLE])

    def broadcast_extend(
        self, text: OpenSequence, tokens: Sequence[int], kept: int, rooms: Sequence[int]
    ) -> None:
        """Tell the other ranks that a text is read on; `text.extend` is to follow, with the same.

        It is `tokens` now, of which the first `kept` are what it was.
        """
        lengths = [level.cache.length for level in text.levels if level.is_sharded]
        self._broadcast([_EXTEND, self.sequences.index(text)])
        self.group.broadcast(_Extension(list(tokens), kept, list(rooms), lengths))

    def broadcast_close(self, text: OpenSequence) -> None:
        """Tell the other ranks that a text is over."""
        self._broadcast([_CLOSE, self.sequences.index(text)])

    # -- the other ranks ---------------------------------------------------------------------------

    def worker_loop(self) -> OpenSequence | None:
        """Make every pass that rank 0 announces, until a text is over or another is opened.

        Returns the text that is over, or None.
        """
        while True:
            count, *numbers = self.group.broadcast_ints([], self._size())
            if count == _IDLE:
                continue
            if count == _OPEN:
                return None
            if count == _CLOSE:
                return self.sequences[numbers[0]]
            if count == _EXTEND:
                self._extend(self.sequences[numbers[0]])
            else:
                self._run_broadcast_forward(count, numbers)

    def _extend(self, text: OpenSequence) -> None:
        nothing: _Extension | None = None
        extension = self.group.broadcast(nothing)
        assert extension is not None
        for level, length in zip(text.levels, extension.lengths, strict=False):
            level.cache.set_length(length)
        # raised on rank 0 too, which tells
        with suppress(TierForceError):
            text.extend(extension.tokens, extension.cached, extension.max_new_tokens)

    def _run_broadcast_forward(self, count: int, numbers: list[int]) -> None:
        passes, places = list[ForwardRequest](), list[tuple[int, int]]()
        at = count * _HEADER
        for first in range(0, at, _HEADER):
            text, index, length, rows, tokens = numbers[first : first + _HEADER]
            level = self.sequences[text].levels[index]
            level.cache.set_length(length)
            read = ints_to_device_async(numbers[at : at + tokens], self.group.device)
            passes.append(ForwardRequest(level.model, level.cache, read, rows))
            places.append((text, index))
            at += tokens
        self._run_forward(passes, places)

    # -- all ranks ---------------------------------------------------------------------------------

    def _run_forward(
        self, passes: Sequence[ForwardRequest], places: Sequence[tuple[int, int]]
    ) -> list[Tensor]:
        text, _ = places[0]
        return self.sequences[text].run_forward(passes)

    def _locate(self, cache: Cache) -> tuple[int, int]:
        """Return which text a cache is of, and of which level."""
        for index, text in enumerate(self.sequences):
            for at, level in enumerate(text.levels):
                if level.cache is cache:
                    return index, at
        raise ValueError("a pass on a cache of no text that is open")

    def _broadcast(self, numbers: list[int]) -> None:
        size = self._size()
        self.group.broadcast_ints(numbers + [0] * (size - len(numbers)), size)

    def _size(self) -> int:
        """Return the numbers of a message, with room for a pass of all texts."""
        return 1 + sum(_HEADER + text.max_tokens for text in self.sequences)
