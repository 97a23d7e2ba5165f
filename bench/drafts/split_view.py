"""An emulation in 32 bits of drafting from split layers, so that only the bits of KV differ.

In bfloat16, rounding alone rejects about a hundredth of all draft tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.head_major import token_slice
from offload.codec.format import PLAIN_SPLIT_TOKENS
from offload.kernels.group_attention import FAST
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import SplitSelectionSpec
from offload.retrieval.split_selection import SplitSelection
from offload.tiered.cache import TieredCache
from offload.tiered.device_view import OnDeviceCache
from offload.tiered.layer import KVGroup, attend_groups
from offload.tiered.shape import SPLIT, LayerSpec
from offload.tiered.split import SplitKV

SPLIT_DTYPE = torch.bfloat16


class EmulatedSplitView(OnDeviceCache):
    """What an on-device cache would attend to if the target's layers were split, in float32.

    Tokens before the target's boundary are rounded to bfloat16 and split by the engine's `SplitKV`;
    each forward decodes their high bytes, and completes the selected keys. Later tokens are the
    target's own. The selection sees the target's queries and KV in bfloat16, too.
    """

    _state: ClassVar[tuple[str, ...]] = ("length", "_tokens")

    def __init__(self, target: TieredCache, spec: SplitSelectionSpec | None):
        """Observe `target`, whose layers with full attention are resident.

        `spec`: of the selected keys; None: high bytes are all.
        """
        layout = replace(target.layout, dtype=SPLIT_DTYPE)
        full = [each for each in layout.attention_layers if layout.window_of(each) is None]
        selection = None
        if spec is not None:
            selection = SplitSelection(
                layout, spec, POLICIES["attention"](), full, target.link.device
            )
        super().__init__(target, None, selection)
        layer = LayerSpec(layout, target.shape.capacity, SPLIT)
        self._split = {index: SplitKV.allocate(layer, target.link) for index in full}
        self._tokens = 0  # split tokens
        self._first = 0  # the first of them that the target's current forward has split

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        if layer not in self._split:
            return super().attend(layer, q, k, v, start)
        target = self.target
        q, k = target.rotary.queries_and_keys(q, k, start, layer)
        layer_kv = target.layers[layer]
        layer_kv.append(k, v, start, target.boundary)
        (exact,) = layer_kv.groups(start + len(q), target.boundary)  # the layer is resident
        _, recent = exact.split_at(target.boundary)
        segments = (self.prefix(layer).to(recent.dtype), recent)
        group = KVGroup(0, exact.heads, segments, recent)
        return attend_groups(q, [group], FAST, self.traffic)

    def prefix(self, layer: int) -> Tensor:
        """Return the values (2, Hkv, N, D) of a split layer's tokens before the boundary."""
        layout = self.layout
        shape = 2, layout.heads, self.target.boundary, layout.head_dim
        values = torch.empty(shape, dtype=SPLIT_DTYPE, device=self.target.link.device)
        self._split[layer].decode_high(0, values)
        if self.selection is not None:
            selected = self.selection.selected_keys(layer)
            if selected is not None:
                selected.complete(values[0], 0)
        return values

    # -- observing the target ----------------------------------------------------------------------

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        self._first, self._tokens = self._tokens, boundary
        if self.selection is not None:
            self.selection.on_forward(boundary, length, end)

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        if (split_kv := self._split.get(layer)) is None:
            return
        for at in range(self._first, self._tokens, PLAIN_SPLIT_TOKENS):
            block = token_slice(prefix, at, min(at + PLAIN_SPLIT_TOKENS, self._tokens))
            split_kv.split(block.to(SPLIT_DTYPE), at)
        if self.selection is not None:
            rounded = (x.to(SPLIT_DTYPE) for x in (q, prefix, recent))
            self.selection.on_attention(layer, head, *rounded)

    def on_advance(self, length: int) -> None:
        super().on_advance(length)
        if self.selection is not None:
            self.selection.on_advance(length)
