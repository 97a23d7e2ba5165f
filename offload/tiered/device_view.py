"""What the device holds of the target's KV, as a cache to draft from; nothing of it is copied."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offload.cache.base import Cache
from offload.retrieval.cache import RetrievalCache
from offload.tiered.cache import TieredCache


class OnDeviceCache(Cache):
    """The target's cache as far as the device has it.

    Resident layers are exact. Of split ones there are the codes, and recent tokens in 16 bits. In
    the others a retrieval cache attends. What is drafted is written where the target's own pass
    will write it again.
    """

    def __init__(self, target: TieredCache, retrieval: RetrievalCache | None):
        """Follow `target`; `retrieval` has the layers that are not near, at least."""
        super().__init__(target.layout)
        self.target = target
        self.retrieval = retrieval
        target.observers.append(self)

    @property
    def device_bytes(self) -> int:
        return 0  # all of it is others'

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        target = self.target
        place = target.layers[layer]
        if not place.is_on_device:
            assert self.retrieval is not None
            return self.retrieval.attend(layer, q, k, v, start)
        q = target.rotary(q, start, layer)
        k = target.rotary(k, start, layer)
        place.append(k, v, start, target.boundary)
        end = start + len(q)
        return place.attend_on_device(q, end, target.boundary, self.traffic)

    def snapshot(self) -> dict[str, Any]:
        state = super().snapshot()
        if self.retrieval is not None:
            state["retrieval"] = self.retrieval.snapshot()
        return state

    def restore(self, snapshot: dict[str, Any]) -> None:
        rest = dict(snapshot)
        if self.retrieval is not None:
            self.retrieval.restore(rest.pop("retrieval"))
        super().restore(rest)

    def crop(self, length: int) -> None:
        if length < self.target.boundary:
            raise ValueError(
                f"cannot crop to {length} tokens: the first {self.target.boundary} have codes"
            )
        super().crop(length)

    # -- following the target ----------------------------------------------------------------------

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        pass

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        pass  # what the target keeps is what this level attends to

    def on_advance(self, length: int) -> None:
        self.length = length
