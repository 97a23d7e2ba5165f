"""Host memory for the KV of sequences whose caches other requests need; on rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from decoding.engine.cached_sequence import CachedSequence, HeldSequence
from decoding.engine.session_manager import SequenceManager
from decoding.prefix_cache.store import MIN_TOKENS, is_worth_saving
from decoding.speculation.sequence import common_prefix
from offload.errors import InsufficientMemoryError
from offload.memory.host import host_available


@dataclass
class SwapOut:
    """A sequence that is being swapped out, and the concurrency of the request that needs it."""

    sequence: CachedSequence
    swapped: HeldSequence
    concurrency: int
    is_continued: bool  # whether the request is its next turn, which needs larger caches

    @property
    def is_large(self) -> bool:
        """Return whether the sequence ran alone, and leaves other requests no memory."""
        return self.sequence.caches.plan.concurrency < self.concurrency


class SwapSpace:
    """Sequences in host memory alone, of which those used longest ago make room for others.

    Those that are planned later may use the memory: `SequenceManager.open` then closes the oldest.
    What has outgrown its caches stays until its next turn is prefilled, whatever the limit.
    """

    def __init__(self, sessions: SequenceManager):
        self.sessions = sessions
        # bytes on this rank; None: half of the host memory that is free
        self.limit: int | None = 0
        self._held: list[HeldSequence] = []  # least recently used first

    def held(self) -> list[HeldSequence]:
        """Return what is swapped out, or is being swapped out, least recently used first."""
        swapped = self.sessions.memory.swapped
        self._held = [each for each in self._held if each.caches in swapped]
        return self._held

    def is_worth(
        self,
        sequence: CachedSequence,
        others: Iterable[HeldSequence],
        source: HeldSequence | None,
    ) -> bool:
        """Return whether a sequence has enough tokens that no other has, and fits the memory.

        That is with `source`, which is needed next.
        """
        tokens = sequence.caches.target.length
        if tokens < MIN_TOKENS or sequence.caches.runtime.settings.deterministic:
            return False
        kept = _kv_bytes(source) if source is not None and source in self._held else 0
        if _kv_bytes(sequence) + kept > self._size():
            return False
        common = [_common(each, sequence) for each in others if each is not sequence]
        return is_worth_saving(tokens, max(common, default=0))

    def begin(
        self,
        sequence: CachedSequence,
        concurrency: int,
        source: HeldSequence | None = None,
        cached: int = 0,
    ) -> SwapOut:
        """Begin to swap out a sequence; `step` goes on with it.

        Args:
            sequence: one that no request uses.
            concurrency: that of the request that needs the room.
            source: what the request copies its beginning from, which is not closed for it.
            cached: the tokens that the request begins with, if it continues the sequence; others
                are not copied.
        """
        self._trim(_kv_bytes(sequence), source)
        tokens = sequence.tokens[: cached or sequence.caches.target.length]
        swapped = HeldSequence(self.sessions.swap_out(sequence.caches, cached), tokens, len(tokens))
        self._held.append(swapped)
        return SwapOut(sequence, swapped, concurrency, cached > 0)

    def step(self, swap: SwapOut, whole_layer: bool) -> bool:
        """Run the next step; after the last one close the caches, and return True."""
        try:
            if self.sessions.executor.prefill(swap.swapped.caches, whole_layer) is None:
                return False
            swap.swapped.missing = 0
        except InsufficientMemoryError:  # another process has taken the memory: the KV is lost
            self._close(swap.swapped)
        self.sessions.close(swap.sequence.caches)
        return True

    def cancel(self, swap: SwapOut) -> None:
        """Stop swapping out a sequence, which keeps its caches."""
        self._close(swap.swapped)

    def touch(self, sequence: HeldSequence) -> None:
        """Mark what is swapped out as used."""
        if sequence in self._held:
            self._held.remove(sequence)
            self._held.append(sequence)

    def drop_prefixes(self, sequence: CachedSequence) -> None:
        """Close what a sequence in caches has nearly all of, and what exceeds the limit."""
        for each in [each for each in self.held() if not each.missing]:
            if not is_worth_saving(len(each.tokens), _common(each, sequence)):
                self._close(each)
        self._trim(0)

    def close(self) -> None:
        """Close all."""
        with ExitStack() as closing:  # closes all of them, even if one raises
            for each in self.held():
                closing.callback(self.sessions.close, each.caches)
            self._held = []

    def _trim(self, nbytes: int, source: HeldSequence | None = None) -> None:
        """Close sequences, all but `source`, until there is room for so many bytes."""
        for each in [each for each in self.held() if not each.missing and each is not source]:
            if sum(map(_kv_bytes, self._held)) + nbytes > self._size():
                self._close(each)

    def _size(self) -> int:
        """Return the bytes that may be swapped out on this rank."""
        if self.limit == 0:
            return 0
        free = host_available() // self.sessions.group.size + self.sessions.memory.swapped_bytes
        return free // 2 if self.limit is None else min(self.limit, free)

    def _close(self, swapped: HeldSequence) -> None:
        self._held.remove(swapped)
        self.sessions.close(swapped.caches)


def _common(held: HeldSequence, sequence: CachedSequence) -> int:
    """Return the length of a sequence's prefix that another one holds, too."""
    if held.caches.rope_key != sequence.caches.rope_key:
        return 0
    return held.copyable(common_prefix(held.tokens, sequence.tokens))


def _kv_bytes(sequence: HeldSequence) -> int:
    """Return the bytes of a sequence's KV on this rank."""
    target = sequence.caches.target
    return target.layout.stored_bytes(target.length)
