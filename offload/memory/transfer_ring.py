"""The transfer ring: chunks of host memory pass through a few device slots, ahead of compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from offload.memory.link import Link, copies_by_head


class TransferRing:
    """A few device slots through which the chunks of a pass are streamed, in order.

    A chunk is (parts, heads, tokens, D): keys and values of a few heads in the host store, or
    slices of them. The slots take turns: each is refilled as soon as its chunk has been read. Where
    the link copies nothing there are no slots, and the chunks themselves are handed out. Between
    passes the slots' memory may serve for something else (`lend`).
    """

    def __init__(self, link: Link, slots: int, slot_numel: int, dtype: torch.dtype, numel: int = 0):
        """Allocate `slots` slots of `slot_numel` elements, and `numel` elements in all at least."""
        if link.copies and slots < 2:
            raise ValueError(
                f"a ring needs at least 2 slots to overlap copies with compute, found {slots}"
            )
        self.link = link
        count = slots if link.copies else 0
        filled = count * slot_numel
        self._memory = torch.empty(max(filled, numel), dtype=dtype, device=link.device)
        self._slots = list(self._memory[:filled].view(count, slot_numel))
        self._waiting: deque[Tensor] = deque()  # chunks of the pass that no copy has begun for
        # slot, chunk in it, and the copy's ticket
        self._filled: deque[tuple[Tensor, Tensor, Any]] = deque()
        self._held: Tensor | None = None  # the slot whose chunk the caller has

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def borrow(self, shape: Sequence[int]) -> Tensor:
        """Return the ring's memory in this shape, for use until the next `start`."""
        self.link.drain()  # a pass given up may still fill the slots
        return self._memory[: prod(shape)].view(*shape)

    def start(self, chunks: Sequence[Tensor]) -> None:
        """Begin a pass and fill the slots.

        A pass left unfinished is abandoned: its copies come first, for the link keeps order.
        """
        self._waiting = deque(chunks)
        self._held = None
        self._filled.clear()
        for slot in self._slots:
            self._fill(slot)

    def next_chunk(self) -> Tensor:
        """Return the next chunk, on the device. Raises IndexError behind the last.

        It is good until the next call, which refills its slot.
        """
        if not self.link.copies:
            return self._waiting.popleft()
        if self._held is not None:
            # the caller is back: it has issued its reads, and copies follow compute
            self._fill(self._held)
        self._held, chunk, ticket = self._filled.popleft()
        self.link.wait(ticket)
        return chunk

    def _fill(self, slot: Tensor) -> None:
        if not self._waiting:
            return
        source = self._waiting.popleft()
        numel = source.nbytes // slot.itemsize
        with torch.inference_mode(False):  # a link writes to it from outside
            chunk = slot[:numel].view(source.dtype).view(source.shape)
        ticket = self.link.copy(copies_by_head(chunk, source))
        self._filled.append((slot, chunk, ticket))
