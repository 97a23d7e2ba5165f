"""Forwards on all ranks: rank 0 decides and broadcasts, the other ranks follow.

Everything that depends on randomness, drafts included, happens on rank 0 alone. Before each forward
it sends one small message: the models and caches, each cache's length (the outcome of the previous
round), and the forward's tokens. So ranks cannot drift apart, and rank 0 may abort a sequence
between any two forwards.
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

# Commands, in place of the number of sequences in a forward.
_OPEN = 0  # another sequence is opened
_CLOSE = -1  # a sequence is closed; followed by its index
_EXTEND = -2  # a sequence is extended; followed by its index, then by an `_Extension`
_IDLE = -3  # nothing to do yet
_HEADER = 5  # numbers per sequence in a forward: sequence, level, cache length, rows, tokens


@dataclass(frozen=True)
class Level:
    """One level of a sequence's hierarchy on this rank: a model, and the cache it runs on."""

    name: str
    model: Transformer
    cache: Cache
    is_sharded: bool = True  # all ranks run its forwards together


@dataclass(frozen=True)
class _Extension:
    """Rank 0's message to the others about a sequence to extend."""

    tokens: list[int]  # the whole sequence
    cached: int  # number of leading tokens that stay in the caches
    reserve: list[int]  # numbers of new tokens to reallocate for, the first that fits; or empty
    lengths: list[int]  # lengths of the broadcast levels' caches


class OpenSequence(Protocol):
    """A sequence whose caches are allocated."""

    levels: list[Level]  # broadcast levels come first, in the same order on all ranks
    max_tokens: int  # query tokens of its longest forward

    def run_forward(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Run requests of one model as one forward, and return the logits of each.

        The first request is on one of this sequence's caches, the others on those of other ones.
        """
        ...

    def evict_shared_graphs(self, other: OpenSequence) -> None:
        """Free the graphs captured here of forwards shared with another sequence."""
        ...

    def extend(self, tokens: Sequence[int], cached: int, reserve: Sequence[int]) -> Tensor:
        """Extend the sequence, or replace it by one with the same beginning; return logits (1, V).

        If larger caches are requested, raises InsufficientMemoryError on all ranks.
        """
        ...

    def close(self) -> None:
        """Free everything that the sequence holds on this rank."""
        ...


class TensorParallelExecutor:
    """The open sequences, in the same order on all ranks, and the forwards on their caches."""

    def __init__(self, group: TensorParallelGroup):
        self.group = group
        self.sequences: list[OpenSequence] = []

    def add(self, sequence: OpenSequence) -> None:
        """Register a sequence, whose forwards may be broadcast from now on; on all ranks."""
        self.sequences.append(sequence)

    def close(self, sequence: OpenSequence) -> None:
        """Remove a sequence and close it on this rank; called on all ranks."""
        self.sequences.remove(sequence)
        for other in self.sequences:
            other.evict_shared_graphs(sequence)
        sequence.close()
        trim_heap()

    # -- rank 0 ------------------------------------------------------------------------------------

    def __call__(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Run requests of one model, each on another sequence's cache, on all its ranks.

        They run as one forward. Returns the logits (rows, V) of each.
        """
        locations = [self._locate(request.cache) for request in requests]
        index, level = locations[0]
        if self.group.size > 1 and self.sequences[index].levels[level].is_sharded:
            headers = list[int]()
            tokens = list[int]()
            for request, location in zip(requests, locations, strict=True):
                headers += [*location, request.cache.length, request.rows, len(request.tokens)]
                tokens += request.tokens.tolist()
            self._broadcast([len(requests), *headers, *tokens])
        return self._run_forward(requests, locations)

    def broadcast_open(self) -> None:
        """Notify ranks that serve other sequences that one more is opened."""
        if self.sequences:
            self._broadcast([_OPEN])

    def broadcast_idle(self) -> None:
        """Notify the other ranks, which wait for a forward, to keep waiting."""
        self._broadcast([_IDLE])

    def broadcast_extend(
        self,
        sequence: OpenSequence,
        tokens: Sequence[int],
        cached: int,
        reserve: Sequence[int],
    ) -> None:
        """Notify the other ranks that a sequence is extended.

        `sequence.extend` must follow, with the same arguments. The sequence becomes `tokens`, whose
        first `cached` it already holds.
        """
        lengths = [level.cache.length for level in sequence.levels if level.is_sharded]
        self._broadcast([_EXTEND, self.sequences.index(sequence)])
        self.group.broadcast(_Extension(list(tokens), cached, list(reserve), lengths))

    def broadcast_close(self, sequence: OpenSequence) -> None:
        """Notify the other ranks that a sequence is closed."""
        self._broadcast([_CLOSE, self.sequences.index(sequence)])

    # -- the other ranks ---------------------------------------------------------------------------

    def worker_loop(self) -> OpenSequence | None:
        """Run every forward that rank 0 broadcasts, until a sequence is closed or opened.

        Returns the sequence to close, or None if another one is opened.
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

    def _extend(self, sequence: OpenSequence) -> None:
        placeholder: _Extension | None = None
        extension = self.group.broadcast(placeholder)
        assert extension is not None
        for level, length in zip(sequence.levels, extension.lengths, strict=False):
            level.cache.set_length(length)
        # Rank 0 raises the same error, and reports it.
        with suppress(TierForceError):
            sequence.extend(extension.tokens, extension.cached, extension.reserve)

    def _run_broadcast_forward(self, count: int, numbers: list[int]) -> None:
        requests = list[ForwardRequest]()
        locations = list[tuple[int, int]]()
        start = count * _HEADER
        for header in range(0, start, _HEADER):
            index, level_index, length, rows, size = numbers[header : header + _HEADER]
            level = self.sequences[index].levels[level_index]
            level.cache.set_length(length)
            tokens = ints_to_device_async(numbers[start : start + size], self.group.device)
            requests.append(ForwardRequest(level.model, level.cache, tokens, rows))
            locations.append((index, level_index))
            start += size
        self._run_forward(requests, locations)

    # -- all ranks ---------------------------------------------------------------------------------

    def _run_forward(
        self, requests: Sequence[ForwardRequest], locations: Sequence[tuple[int, int]]
    ) -> list[Tensor]:
        index, _ = locations[0]
        return self.sequences[index].run_forward(requests)

    def _locate(self, cache: Cache) -> tuple[int, int]:
        """Return the indices of a cache's sequence, and of its level there."""
        for index, sequence in enumerate(self.sequences):
            for level_index, level in enumerate(sequence.levels):
                if level.cache is cache:
                    return index, level_index
        raise ValueError("forward on a cache that no open sequence owns")

    def _broadcast(self, numbers: list[int]) -> None:
        size = self._size()
        self.group.broadcast_ints(numbers + [0] * (size - len(numbers)), size)

    def _size(self) -> int:
        """Return the numbers in a message: room for a forward of all sequences."""
        return 1 + sum(_HEADER + sequence.max_tokens for sequence in self.sequences)
