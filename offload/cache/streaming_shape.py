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
    slack: int  # slots filled before the window slides

    def __post_init__(self) -> None:
        if min(self.sinks, self.window, self.slack) < 1:
            raise ValueError(
                "sinks, window and slack must be at least 1, found "
                f"{self.sinks}, {self.window} and {self.slack}"
            )

    @property
    def slots(self) -> int:
        return self.sinks + self.window + self.slack

    def kv_buffer(self, layout: KVLayout) -> tuple[int, ...]:
        """Return the shape of keys, rotated by slot, and values (layers, 2, Hkv, slots + 1, D)."""
        return layout.shape(layout.layers, self.slots + 1)  # one for padding: `StaticCache`

    def raw_buffer(self, layout: KVLayout) -> tuple[int, ...]:
        """Return the shape of keys before rotation (layers, Hkv, slots + 1, D)."""
        return layout.layers, layout.heads, self.slots + 1, layout.head_dim

    def device_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory of the cache."""
        numel = prod(self.kv_buffer(layout)) + prod(self.raw_buffer(layout))
        return numel * layout.dtype.itemsize
