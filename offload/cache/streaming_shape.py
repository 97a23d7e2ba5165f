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
    rewind: int = 64  # tokens by which recurrent states can go back

    def __post_init__(self) -> None:
        if min(self.sinks, self.window, self.slack) < 1:
            raise ValueError(
                "sinks, window and slack must be at least 1, found "
                f"{self.sinks}, {self.window} and {self.slack}"
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
        if layout.recurrent is not None:
            states = layout.recurrent.rewindable_bytes(self.slack, self.rewind, itemsize)
        return sum(map(prod, self.layer_shapes(layout))) * itemsize + states
