"""The transfer ring: chunks of host memory are prefetched into a few device slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.memory.link import Link, copies_by_head


class _Filled(NamedTuple):
    """A slot, and the chunk whose copy to it has begun."""

    slot: int
    source: Tensor  # on the host
    chunk: Tensor  # on the device
    ticket: Any  # the link's
    is_ahead: bool  # whether the chunk is one of the next forward's


class TransferRing:
    """A few device slots through which the chunks of a forward are streamed, in order.

    A chunk is (parts, heads, tokens, D): keys and values of a few heads in the host store, or
    their high bytes or low bits. The slots take turns: each is refilled as soon as its chunk has
    been read. A forward's last chunks are followed by the first ones, for the next forward: the
    link would be idle while that is drafted. Tokens added to them by then are copied when it
    begins.

    If the link does not copy, there are no slots, and chunks are returned themselves. Between
    forwards the slots' memory can be borrowed (`borrow`).
    """

    def __init__(self, link: Link, slots: int, slot_numel: int, dtype: torch.dtype, numel: int = 0):
        """Allocate `slots` slots of `slot_numel` elements, in total at least `numel` elements."""
        if link.copies and slots < 2:
            raise ValueError(
                f"a ring needs at least 2 slots to overlap copies with compute, found {slots}"
            )
        self.link = link
        count = slots if link.copies else 0
        slots_numel = count * slot_numel
        self._memory = torch.empty(max(slots_numel, numel), dtype=dtype, device=link.device)
        self._slots = self._memory[:slots_numel].view(count, slot_numel)
        self._waiting: deque[Tensor] = deque()  # chunks whose copy has not begun
        self._ahead: deque[Tensor] = deque()  # the next forward's first ones, as they are now
        self._filled: deque[_Filled] = deque()
        self._held: int | None = None  # slot of the chunk that the caller is reading

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def borrow(self, shape: Sequence[int]) -> Tensor:
        """Return the ring's memory in this shape, for use until the next `start`."""
        self.link.drain()  # copies for a cancelled forward, or the next one
        self._clear()
        return self._memory[: prod(shape)].view(*shape)

    def start(self, chunks: Sequence[Tensor], unchanged: int = 0) -> None:
        """Begin a forward and fill the slots.

        An unfinished forward is abandoned: its copies complete first, since links keep order.

        Args:
            chunks: on the host, in the order of use.
            unchanged: first tokens of each that have not changed since the last `start`.
        """
        is_finished = self._held is None and all(each.is_ahead for each in self._filled)
        arrived = list(self._filled) if is_finished else []
        self._clear()
        self._waiting.extend(chunks)
        self._ahead.extend(chunks[: len(self._slots)])
        free = list(range(len(self._slots)))
        for each, chunk in zip(arrived, chunks, strict=False):
            if not _is_beginning(each.source, chunk):
                break
            free.remove(each.slot)
            self._fill(each.slot, each, unchanged)
        for slot in free:
            self._fill(slot)

    def next_chunk(self) -> Tensor:
        """Return the next chunk, on the device. Raises IndexError after the last.

        It is valid until `release`, or the next call.
        """
        if not self.link.copies:
            return self._waiting.popleft()
        self.release()
        if not self._filled or self._filled[0].is_ahead:
            raise IndexError("the forward has no more chunks")
        filled = self._filled.popleft()
        self._held = filled.slot
        self.link.wait(filled.ticket)
        return filled.chunk

    def has_arrived(self, count: int) -> bool:
        """Return whether the next `count` chunks can be read without waiting.

        If there are fewer slots: as many as these hold.
        """
        filled = islice(self._filled, min(count, len(self._slots)))
        return all(self.link.is_complete(each.ticket) for each in filled)

    def release(self) -> None:
        """Refill the slot of the last chunk, if all reads of it have been issued.

        Copies are ordered after compute, so the sooner they are issued, the less they wait for.
        """
        if self._held is not None:
            slot, self._held = self._held, None
            self._fill(slot)

    def _clear(self) -> None:
        self._held = None
        for chunks in (self._waiting, self._ahead, self._filled):
            chunks.clear()

    def _fill(self, slot: int, arrived: _Filled | None = None, unchanged: int = 0) -> None:
        """Copy the next chunk to a slot, but for those tokens that have `arrived` there."""
        is_ahead = not self._waiting
        queue = self._ahead if is_ahead else self._waiting
        if not queue:
            return
        source = queue.popleft()
        parts, heads, tokens, dim = source.shape
        with torch.inference_mode(False):  # links write to it outside of inference mode
            memory = self._slots[slot].view(source.dtype)
            # a head's tokens start where they do in longer chunks
            capacity = len(memory) // (parts * heads * dim)
            rows = memory[: parts * heads * capacity * dim].view(parts, heads, capacity, dim)
        done, ticket = 0, None
        if arrived is not None:
            done, ticket = min(arrived.source.shape[2], unchanged), arrived.ticket
        chunk = rows[:, :, :tokens]
        if done < tokens:
            ticket = self.link.copy(copies_by_head(chunk[:, :, done:], source[:, :, done:]))
        self._filled.append(_Filled(slot, source, chunk, ticket, is_ahead))


def _is_beginning(source: Tensor, chunk: Tensor) -> bool:
    """Return whether two chunks have the same memory and heads, with however many tokens."""
    memory = source.data_ptr(), source.dtype, source.shape[:2], source.stride()
    return memory == (chunk.data_ptr(), chunk.dtype, chunk.shape[:2], chunk.stride())
