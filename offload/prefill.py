"""Layer-major prefill of the target's cache: all of a prompt in one layer before the next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload.buffers import attend_to, put, span
from offload.errors import FitError
from offload.layers import TieredLayer
from offload.link import Link

if TYPE_CHECKING:
    from offload.tiered import TieredCache

LAST_ROWS = 32  # rows of the prompt that followers see: a prefill attends with these in every layer


class Prefill:
    """A prompt that is being read into an empty cache.

    `attend` or `keep` is called for all chunks of a layer before any of the next layer, in order;
    `attend` for the last one. The KV of a layer that is not on the device is built in the stage, a
    buffer that all such layers share, and leaves for the host block by block as it is computed.
    Nothing is read back.
    """

    def __init__(self, cache: TieredCache, tokens: int, stage: Tensor | None):
        """`stage` (2, Hkv, tokens, D); None where every layer has a buffer of its own."""
        self.tokens = tokens
        self._cache = cache
        self._stage = stage
        # the stage's blocks on their way to the host, of this layer and of the one before: the
        # first token of each, and its ticket
        self._leaving: deque[tuple[int, Any]] = deque()
        self._left: deque[tuple[int, Any]] = deque()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Keep the KV of the tokens at `start` and return their attention output.

        q (T, Hq, D), k and v (T, Hkv, D), none of them rotated; out (T, Hq, D).
        """
        cache = self._cache
        end = start + len(q)
        q = cache.rotary(q, start, layer)
        k = cache.rotary(k, start, layer)
        kv = self._build(layer, k, v, start)
        out, _ = attend_to(kv, q, end, cache.traffic)
        if end == self.tokens:
            prefix = span(kv, 0, cache.boundary)
            recent = span(kv, cache.boundary, end)
            cache.show(layer, 0, q[-LAST_ROWS:], prefix, recent)
        return out

    def keep(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Keep the KV of tokens whose own attention nobody asks for."""
        self._build(layer, self._cache.rotary(k, start, layer), v, start)

    def _build(self, layer: int, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Add rotated k and v to this layer's KV (2, Hkv, N, D), and return all of it."""
        place = self._cache.layers[layer]
        kv = place.buffer
        staged = kv is None
        if kv is None:
            assert self._stage is not None
            kv = self._stage
            self._make_room(start, start + len(k))
        put(kv, k, v, start)
        new = span(kv, start, start + len(k))
        ticket = place.keep(new, start, self._cache.boundary)
        if staged and ticket is not None:
            self._leaving.append((start, ticket))
        return kv

    def _make_room(self, start: int, end: int) -> None:
        """Wait until what the layer before has in this part of the stage has left."""
        if start == 0:
            self._left.extend(self._leaving)
            self._leaving.clear()
        while self._left and self._left[0][0] < end:
            _, ticket = self._left.popleft()
            self._cache.link.wait(ticket)


def bring_in_late(layers: list[TieredLayer], length: int, link: Link) -> None:
    """Bring `length` tokens of the late layers to the device, into memory that prefill has left.

    Raises FitError where others have taken it meanwhile.
    """
    late = [layer for layer in layers if layer.is_late]
    for layer in late:
        try:
            layer.bring_in(length)
        except torch.OutOfMemoryError as error:
            raise FitError(
                f"others took device memory meant for {len(late)} layers: use fewer "
                "`resident_layers`."
            ) from error
    if late:
        link.drain()
