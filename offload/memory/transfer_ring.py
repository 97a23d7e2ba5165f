"""The transfer ring: chunks of host memory are prefetched into a few device slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from offload.memory.link import Link, copies_by_head


class TransferRing:
    """A few device slots through which the chunks of a forward are streamed, in order.

    A chunk is (parts, heads, tokens, D): keys and values of a few heads in the host store, or
    their high bytes or low bits. The slots take turns: each is refilled as soon as its chunk has
    been read. If the link does not copy, there are no slots, and chunks are returned themselves.
    Between forwards the slots' memory can be borrowed (`borrow`).
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
        self._slots = list(self._memory[:slots_numel].view(count, slot_numel))
        self._waiting: deque[Tensor] = deque()  # chunks whose copy has not begun
        # slot, chunk in it, and ticket of the copy
        self._filled: deque[tuple[Tensor, Tensor, Any]] = deque()
        self._held: Tensor | None = None  # slot of the chunk that the caller is reading

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def borrow(self, shape: Sequence[int]) -> Tensor:
        """Return the ring's memory in this shape, for use until the next `start`."""
        self.link.drain()  # a cancelled forward may still be filling the slots
        return self._memory[: prod(shape)].view(*shape)

    def start(self, chunks: Sequence[Tensor]) -> None:
        """Begin a forward and fill the slots.

        An unfinished forward is abandoned: its copies complete first, since links keep order.
        """
        self._waiting = deque(chunks)
        self._held = None
        self._filled.clear()
        for slot in self._slots:
            self._fill(slot)

    def next_chunk(self) -> Tensor:
        """Return the next chunk, on the device. Raises IndexError after the last.

        It is valid until the next call, which refills its slot.
        """
        if not self.link.copies:
            return self._waiting.popleft()
        if self._held is not None:
            # the caller has issued its reads, and copies are ordered after compute
            self._fill(self._held)
        self._held, chunk, ticket = self._filled.popleft()
        self.link.wait(ticket)
        return chunk

    def _fill(self, slot: Tensor) -> None:
        if not self._waiting:
            return
        source = self._waiting.popleft()
        numel = source.nbytes // slot.itemsize
        with torch.inference_mode(False):  # links write to it outside of inference mode
            chunk = slot[:numel].view(source.dtype).view(source.shape)
        ticket = self.link.copy(copies_by_head(chunk, source))
        self._filled.append((slot, chunk, ticket))
