"""The transfer ring: chunks of host memory pass through a few device slots, ahead of the compute
that reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offload.link import Link


class TransferRing:
    """Streams a pass's chunks in order. A chunk is (2, heads, tokens, D): keys and values of a few
    heads in the host store.

    `slots` device buffers of `slot_shape` = (2, heads, capacity, D) take turns; a slot is refilled
    as soon as its chunk has been read. Where the link copies nothing there are no slots, and the
    chunks themselves are handed out.

    The slots lie in one flat buffer, `memory`, of `room` elements at least: between passes it may
    serve for something else.
    """

    def __init__(
        self, link: Link, slots: int, slot_shape: Sequence[int], dtype: torch.dtype, room: int = 0
    ):
        if link.copies and slots < 2:
            raise ValueError(
                f"a ring needs at least 2 slots to overlap copies with compute, found {slots}"
            )
        self.link = link
        count, size = slots if link.copies else 0, torch.Size(slot_shape).numel()
        self.memory = torch.empty(
            max(count * size, room) if link.copies else 0, dtype=dtype, device=link.device
        )
        self._slots = list(self.memory[: count * size].view(count, *slot_shape))
        self._waiting: deque[Tensor] = deque()  # chunks of the pass that no copy has begun for
        # slot, chunk in it, and the copy's ticket
        self._filled: deque[tuple[Tensor, Tensor, Any]] = deque()
        self._held: Tensor | None = None  # the slot whose chunk the caller has

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def start(self, chunks: Sequence[Tensor]) -> None:
        """Begin a pass and fill the slots. A pass left unfinished is abandoned: its copies come
        first, for the link keeps order.
        """
        self._waiting, self._held = deque(chunks), None
        self._filled.clear()
        for slot in self._slots:
            self._fill(slot)

    def next(self) -> Tensor:
        """The next chunk, on the device, good until the next call: its slot is then refilled.
        IndexError behind the last.
        """
        if not self.link.copies:
            return self._waiting.popleft()
        if self._held is not None:
            # the caller is back: it has issued its reads, and copies follow compute
            self._fill(self._held)
        self._held = None
        self._held, chunk, ticket = self._filled.popleft()
        self.link.wait(ticket)
        return chunk

    def _fill(self, slot: Tensor) -> None:
        if not self._waiting:
            return
        source = self._waiting.popleft()
        _, heads, tokens, _ = source.shape
        chunk = slot[:, :heads, :tokens]
        ticket = self.link.copy(
            [(chunk[part, head], source[part, head]) for part in range(2) for head in range(heads)]
        )
        self._filled.append((slot, chunk, ticket))
