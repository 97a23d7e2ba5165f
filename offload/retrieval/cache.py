"""The middle level's cache: what matters of the target's KV, on the device.

The paper selects chunks once, behind the prompt (TriForce, arXiv 2404.11912, section 4.1). But a
verification brings all keys to the device anyway: here the selection follows the text
(docs/algorithm.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.attention.head_major import attend_by_heads, put, span
from offload.cache.static_shape import SlotCache
from offload.layout import KVLayout
from offload.retrieval.selection import ObservedRows, SelectionPolicy
from offload.retrieval.shape import OBSERVED_KEYS, RetrievalShape
from offload.retrieval.store import make_store
from offload.rotary import Rotary


class RetrievalCache(SlotCache):
    """A follower of a TieredCache, with slots for tokens of its own in each layer.

    They hold selected tokens, then the window and whatever is drafted: a pass attends to one
    segment. Keys are rotated at their absolute positions. A `RetrievalStore` keeps all of it.
    """

    _state: ClassVar[tuple[str, ...]] = (
        "length",
        "selections",
        "policy",
        "_base",
        "_selected",
        "_selected_at",
    )

    def __init__(
        self,
        layout: KVLayout,
        shape: RetrievalShape,
        policy: SelectionPolicy,
        rotary: Rotary,
        device: torch.device,
        min_interval: int = 1,
        layers: Sequence[int] | None = None,
    ):
        """Allocate the buffers.

        Args:
            layout: the target's, on this rank.
            shape: how the budget is spent.
            policy: which chunks are selected, and whether anew when the target verifies.
            rotary: the target's tables.
            device: where the cache lives.
            min_interval: tokens that one selection serves at least; 1 for a selection at every
                verification.
            layers: of the target, those that have a buffer; all by default.
        """
        super().__init__(layout)
        if layers is None:
            layers = range(layout.layers)
        # where each layer's buffer is
        self._index = {layer: index for index, layer in enumerate(layers)}
        self.shape = shape
        self.policy = policy
        self.rotary = rotary
        self.min_interval = min_interval
        self.slots = shape.slots
        self.selections = 0
        self._base = 0  # position of the window's first token, which was the boundary
        self._selected = 0  # slots in front of the window
        self._selected_at: int | None = None  # tokens of text at the last selection
        self._selecting = False  # whether the target's pass under way is one that selects
        self._store = make_store(replace(layout, layers=len(layers)), shape, device)
        self.first_own = self._store.first_own

    @property
    def device_bytes(self) -> int:
        return self._store.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        k = self.rotary(k, start, layer)
        q = self.rotary(q, start, layer)
        self._put(layer, slice(None), k, v, start)
        first = self.first_seen()
        end = self._slot(start) + len(q)
        store = self._store
        self.traffic.attended += store.bytes_of(first, end)
        seen = store.parts(self._index[layer], first, end)
        return attend_by_heads(q, k.shape[1], seen, _causal)

    def place(self, start: int) -> tuple[int, int]:
        return self._slot(start), start

    def buffers(self, layer: int) -> tuple[Tensor, None]:
        return self._store.own(self._index[layer]), None

    def first_seen(self) -> int:
        first, _ = self._store.slots_of(self._selected)
        return first

    def bytes_of(self, first: int, end: int) -> int:
        return len(self._index) * self._store.bytes_of(first, end)

    def parts(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        return self._store.parts(self._index[layer], 0, self.slots)

    def snapshot(self) -> dict[str, Any]:
        state = super().snapshot()
        state["store"] = [tensor.clone() for tensor in self._store.tensors]
        return state

    @torch.inference_mode()
    def restore(self, snapshot: dict[str, Any]) -> None:
        rest = dict(snapshot)
        kept = rest.pop("store")
        for tensor, before in zip(self._store.tensors, kept, strict=True):
            tensor.copy_(before)
        super().restore(rest)

    def crop(self, length: int) -> None:
        self._refuse_inside_selection(length)
        super().crop(length)

    # -- following the target ----------------------------------------------------------------------

    def follow(self, boundary: int, length: int, end: int) -> None:
        # when decoding, the pass's first token was pending: it stands already
        text = length + (end > length)
        self._selecting = self._is_due(text)
        if not self._selecting:
            return
        self._base = boundary
        self._selected_at = text
        self._selected = self.shape.selected(boundary, end - boundary)
        self.selections += 1

    def observe(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        if layer not in self._index:
            return
        heads = slice(head, head + prefix.shape[1])
        if not self._selecting:
            # the target's own KV takes the place of what this level computed from a partial context
            count = recent.shape[2]
            first_own = count - len(q)
            own = span(recent, first_own, count)
            start = prefix.shape[2] + first_own
            self._place_window(layer, heads, own, start)
            return
        self._place_window(layer, heads, recent, self._base)
        count = prefix.shape[1]
        group = q.shape[1] // count  # query heads per KV head
        tokens = max(1, prefix.shape[2])
        step = max(1, OBSERVED_KEYS // tokens)  # KV heads
        for first in range(0, count, step):
            last = first + step
            rows = q[:, first * group : last * group]
            part = prefix[:, first:last]
            keys = recent[0, first:last]
            self._select(layer, head + first, rows, part, keys)

    def _place_window(self, layer: int, heads: slice, new: Tensor, start: int) -> None:
        """Write the tokens from `start` on, new (2, h, T, D), where they are in the window."""
        k = new[0].transpose(0, 1)
        v = new[1].transpose(0, 1)
        self._put(layer, heads, k, v, start)

    def _put(self, layer: int, heads: slice, k: Tensor, v: Tensor, start: int) -> None:
        """Write k and v (T, h, D) of these heads where the window has the tokens from `start` on.

        Raises ValueError where they do not fit.
        """
        kv, _ = self.buffers(layer)
        at = self._slot(start) - self.first_own
        put(kv[:, heads], k, v, at)

    def advanced(self, length: int) -> None:
        if length == 0:
            self._begin()
        self._refuse_inside_selection(length)
        self.length = length

    def _begin(self) -> None:
        """Hold nothing, and select with the next pass."""
        self.policy = type(self.policy)()
        self._base = self._selected = self.selections = 0
        self._selected_at = None

    def _is_due(self, text: int) -> bool:
        """Return whether a pass selects, with so many tokens of text."""
        if self._selected_at is None:
            return True
        if not self.policy.traits.reselects:
            return False
        return text - self._selected_at >= self.min_interval

    def _select(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        """Fill the slots in front of the window.

        q (T, h * G, D), prefix (2, h, N, D), recent keys (h, M, D).
        """
        chunk = self.shape.chunk
        heads, tokens = prefix.shape[1:3]
        if self._selected == tokens:
            every = torch.arange(tokens // chunk, device=prefix.device)
            chunks = every.expand(heads, -1)
        else:
            rows = ObservedRows(q, prefix[0], recent, self.policy.traits.rows)
            count = self._selected // chunk
            chunks = self.policy.select(rows, layer, head, chunk, count)
        index = self._index[layer]
        self._store.select(index, head, prefix, chunks)

    def _refuse_inside_selection(self, length: int) -> None:
        if length < self._base:
            raise ValueError(
                f"cannot crop to {length} tokens: the selection covers the first {self._base}"
            )

    def _slot(self, position: int) -> int:
        """Return where the token at this position is, or goes, in the window."""
        if position < self._base:
            raise ValueError(f"the selection covers the first {self._base}, with {position}")
        _, window = self._store.slots_of(self._selected)
        return window + position - self._base


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, _ = partial_attention(q, k, v, causal=True)
    return out
