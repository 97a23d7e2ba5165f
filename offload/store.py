"""The host store: the KV of the layers that do not fit on the device, head-major in one arena."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.link import Link


class HostArena:
    """One flat host buffer, allocated (and pinned) at the largest size asked for and reused from
    document to document.
    """

    def __init__(self, link: Link, dtype: torch.dtype):
        self.link, self.dtype = link, dtype
        self._buffer = torch.empty(0, dtype=dtype)

    def reserve(self, numel: int) -> None:
        """Make room for `numel` elements. Raises FitError when the host cannot give them; the old
        contents are lost.
        """
        if numel > self._buffer.numel():
            self.link.release(self._buffer)
            # the old arena goes before the new one comes
            self._buffer = torch.empty(0, dtype=self.dtype)
            self._buffer = self.link.host_empty(numel, self.dtype)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A view of this shape at the start of the arena; whoever took one before has lost it, and
        its copies are over.
        """
        # those of a pass given up would reach device memory that is someone else's by now
        self.link.drain()
        numel = torch.Size(shape).numel()
        self.reserve(numel)
        return self._buffer[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes


class HostStore:
    """(layers, 2, Hkv, capacity, D) in host memory. A head's prefix is one contiguous copy."""

    def __init__(self, layout: KVLayout, layers: int, capacity: int, arena: HostArena):
        self.kv = arena.take(layout.shape(layers, capacity))

    def chunks(self, layers: int, tokens: int, heads: int) -> list[Tensor]:
        """What one pass streams: per layer and group of `heads` heads, a (2, heads, tokens, D) view
        of the first tokens.
        """
        return [
            group
            for layer in self.kv[:layers]
            for group in layer[:, :, :tokens].split(heads, dim=1)
        ]

    def write(self, link: Link, layer: int, kv: Tensor, at: int) -> object:
        """Start writing kv (2, Hkv, T, D), contiguous per head, behind slot `at`; returns the
        link's ticket.
        """
        target = self.kv[layer, :, :, at : at + kv.shape[2]]
        heads = kv.shape[1]
        return link.copy(
            [(target[part, head], kv[part, head]) for part in range(2) for head in range(heads)]
        )
