"""The middle level's cache: the chunks of the target's KV that matter, on the device (TriForce, arXiv 2404.11912, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.cache import Cache, put
from offload.layout import KVLayout
from offload.policy import SelectionPolicy
from offload.rotary import Rotary


class RetrievalCache(Cache):
    """Follows a TieredCache: `budget` tokens a head, chosen chunk by chunk, and a tail of all tokens since the selection.

    One buffer per layer, (2, Hkv, budget + tail, D): the selected tokens first, then the tail, so that a pass attends to one
    segment. Keys stay rotated at their absolute positions. Prompt tokens behind the last whole chunk belong to the tail, which
    therefore needs chunk - 1 slots more than the tokens that will be generated. A context within the budget is kept whole.
    """

    def __init__(
        self,
        layout: KVLayout,
        budget: int,
        chunk: int,
        tail: int,
        policy: SelectionPolicy,
        rotary: Rotary,
        device: torch.device,
    ):
        super().__init__(layout)
        if not 1 <= chunk <= budget:
            raise ValueError(f"a retrieval chunk must have 1 to budget = {budget} tokens, found {chunk}")
        self.chunk, self.policy, self.rotary = chunk, policy, rotary
        self._chunks = budget // chunk
        self._selected = 0  # tokens in the selected part
        self._base = 0  # position of the tail's first token
        self._kv = torch.empty(layout.shape(layout.layers, budget + tail), dtype=layout.dtype, device=device)

    @property
    def device_bytes(self) -> int:
        return self._kv.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        slot = self._slot(start)
        put(self._kv[layer], self.rotary(k, start), v, slot)
        return self._attend(self.rotary(q, start), self._kv[layer], slot + len(q))[0]

    def crop(self, length: int) -> None:
        self._refuse_inside_selection(length)
        super().crop(length)

    # -- following the target -----------------------------------------------------------------------------------------

    def prefilled(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        whole = len(k) // self.chunk
        self._base = whole * self.chunk
        count = min(whole, self._chunks)
        self._selected = count * self.chunk
        keys, values = (x[: self._base].transpose(0, 1).unflatten(1, (whole, self.chunk)) for x in (k, v))  # (Hkv, C, chunk, D)
        if count:
            index = self.policy.select(q, keys, count)  # (Hkv, count)
            heads = torch.arange(len(index), device=index.device)[:, None]
            chosen = [x[heads, index].flatten(1, 2).transpose(0, 1) for x in (keys, values)]  # (selected, Hkv, D) each
            put(self._kv[layer], chosen[0], chosen[1], 0)
        self.written(layer, k[self._base :], v[self._base :], self._base)

    def written(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """The target's own KV takes the place of what this level computed from a partial context."""
        put(self._kv[layer], k, v, self._slot(start))

    def advanced(self, length: int) -> None:
        self._refuse_inside_selection(length)
        self.length = length

    def _refuse_inside_selection(self, length: int) -> None:
        if length < self._base:
            raise ValueError(f"cannot crop to {length} tokens: the selection covers the first {self._base}")

    def _slot(self, position: int) -> int:
        return self._selected + position - self._base
