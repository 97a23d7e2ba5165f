"""The on-device part of the target's KV, as a cache to draft from; nothing is copied."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offload.attention.folding import Partial
from offload.cache.base import Cache
from offload.cache.target_forward import TargetForward
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.split_selection import SplitSelection
from offload.tiered.cache import TieredCache
from offload.tiered.split import SplitLayer


class OnDeviceCache(Cache):
    """The part of the target's cache that is on the device.

    Resident layers are exact. Split layers have their high bytes, low bits of selected keys, and
    their tail in 16 bits. For the others a retrieval cache attends. Drafted tokens are written to
    where the target's own forward overwrites them.
    """

    def __init__(
        self,
        target: TieredCache,
        retrieval: RetrievalCache | None,
        selection: SplitSelection | None = None,
    ):
        """Observe `target`, as the other arguments do.

        Args:
            target: the cache.
            retrieval: holds at least the layers that are not on the device.
            selection: holds selected keys of split layers.
        """
        super().__init__(target.layout)
        self.target = target
        self.retrieval, self.selection = retrieval, selection
        self._target_forward = TargetForward(len(target.layout.attention_layers))
        target.observers.append(self)

    @property
    def device_bytes(self) -> int:
        # KV is the target's and the retrieval cache's
        selected = 0 if self.selection is None else self.selection.device_bytes
        return selected + (0 if self.recurrent is None else self.recurrent.nbytes)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        target = self.target
        layer_kv = target.layers[layer]
        if not layer_kv.is_on_device:
            assert self.retrieval is not None
            return self.retrieval.attend(layer, q, k, v, start)
        q, k = target.rotary.queries_and_keys(q, k, start, layer)
        # the KV that a forward of the target has written there is exact, and stays
        exact = self._target_forward.exact(layer, start)
        layer_kv.append(k[exact:], v[exact:], start + exact, target.boundary)
        end, boundary = start + len(q), target.boundary
        if isinstance(layer_kv, SplitLayer) and self.selection is not None:
            selected = self.selection.selected_keys(layer)
            return layer_kv.attend_on_device(q, end, boundary, self.traffic, selected)
        return layer_kv.attend_on_device(q, end, boundary, self.traffic)

    def snapshot(self) -> dict[str, Any]:
        state = super().snapshot()
        if self.retrieval is not None:
            state["retrieval"] = self.retrieval.snapshot()
        if self.selection is not None:
            state["selection"] = self.selection.snapshot()
        return state

    def restore(self, snapshot: dict[str, Any]) -> None:
        state = dict(snapshot)
        if self.retrieval is not None:
            self.retrieval.restore(state.pop("retrieval"))
        if self.selection is not None:
            self.selection.restore(state.pop("selection"))
        super().restore(state)

    def crop(self, length: int) -> None:
        if length < self.target.boundary:
            raise ValueError(
                f"cannot crop to {length} tokens: the first {self.target.boundary} are before the "
                "offload boundary"
            )
        super().crop(length)

    # -- observing the target ----------------------------------------------------------------------

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        self._target_forward.begin(end)

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        self._target_forward.complete_layer(layer)  # this level attends to the target's own KV

    def on_advance(self, length: int) -> None:
        self.follow(length, self._target_forward.end)
