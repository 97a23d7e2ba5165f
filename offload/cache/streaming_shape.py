"""The spec of the draft's cache: it counts its bytes, and the cache allocates by it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from offload.layout import KVLayout


@dataclass(frozen=True)
class StreamingCacheSpec:
    """How many tokens of a sequence the draft's cache keeps, and in which role."""

    sinks: int  # first tokens, always kept
    window: int  # minimum number of recent tokens
    slack: int  # slots filled before the window slides, and query tokens of the largest forward
    rewind: int = 64  # most tokens of a draft that may be taken back
    hidden: int = 0  # size of the hidden states that are kept beside the KV; 0: none are

    def __post_init__(self) -> None:
        if min(self.window, self.slack) < 1 or self.sinks < 0:
            raise ValueError(
                "window and slack must be at least 1, and sinks at least 0, found "
                f"{self.window}, {self.slack} and {self.sinks}"
            )

    @property
    def slots(self) -> int:
        return self.sinks + self.window + self.slack

    def layer_shapes(self, layout: KVLayout) -> list[tuple[int, ...]]:
        """Return the shape of the buffer (3, Hkv, slots + 1, D) of each layer with attention.

        It has keys, rotated by slot, values, and keys before rotation.
        """
        slots = self.slots + 1  # one for padding: `StaticCache`
        layers = map(layout.of, layout.attention_layers)
        return [(3, each.heads, slots, each.head_dim) for each in layers]

    def device_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory of the cache."""
        itemsize, states = layout.dtype.itemsize, 0
        if self.hidden:
            states = (self.slots + self.rewind + 1) * self.hidden * itemsize
        if layout.recurrent is not None:
            states += layout.recurrent.rewindable_bytes(self.slack, self.rewind, itemsize)
        return sum(map(prod, self.layer_shapes(layout))) * itemsize + states
