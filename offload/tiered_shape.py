"""The shape of the target's cache: it counts each tier's bytes, and the cache allocates from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from offload.layout import KVLayout, ceil_div

_MIN_COPY_BYTES = 2 << 20  # a copy at least this big runs at line rate
_MAX_RING_BYTES = 1 << 30


@dataclass(frozen=True)
class TieredShape:
    """The layers of a cache, and how many tokens each tier of one rank holds.

    Resident layers have one buffer on the device. All other layers are streamed: their prefix is in
    host memory, their recent tokens are in a tail on the device. Late layers are resident ones that
    prefill writes to the host, and that come to the device behind it.
    """

    layout: KVLayout
    capacity: int  # tokens of the whole text
    resident_layers: int = 0
    late_layers: int = 0  # of the resident ones
    recent: int = 0  # tokens that stay behind the boundary, at least
    block: int = 256  # tokens by which the boundary moves
    rows: int = 256  # tokens of the largest pass when decoding
    slot_heads: int = 1  # KV heads in one slot of the transfer ring
    slots: int = 3
    copies: bool = True  # whether the link copies; if not, ring and prefill stage take nothing

    def __post_init__(self) -> None:
        if self.late_layers and not (self.streams and self.late_layers <= self.resident_layers):
            raise ValueError(
                f"{self.late_layers} of {self.resident_layers} layers come late: that takes far "
                "layers, and a link"
            )

    @classmethod
    def with_ring(
        cls, layout: KVLayout, capacity: int, recent: int, block: int, rows: int, copies: bool
    ) -> TieredShape:
        """Return the shape with no resident layer, and a ring that suits the text.

        A slot takes as many heads as make a copy of keys or values 2 MB or more. There are three
        slots, or two where three would take over 1 GB.
        """
        head = layout.bytes(capacity, 1) // layout.heads
        heads = min(layout.heads, max(1, ceil_div(2 * _MIN_COPY_BYTES, head)))
        slots = 3 if 3 * heads * head <= _MAX_RING_BYTES else 2
        return cls(
            layout,
            capacity,
            recent=recent,
            block=block,
            rows=rows,
            slot_heads=heads,
            slots=slots,
            copies=copies,
        )

    def placed(self, resident_layers: int, late_layers: int = 0) -> TieredShape:
        """Return the shape with other layers on the device."""
        return replace(self, resident_layers=resident_layers, late_layers=late_layers)

    # -- layers and tokens -------------------------------------------------------------------------

    @property
    def streamed_layers(self) -> int:
        return self.layout.layers - self.resident_layers

    @property
    def streams(self) -> bool:
        """Whether anything is copied over the link to decode."""
        return self.copies and self.streamed_layers > 0

    @property
    def tail(self) -> int:
        """Tokens in the tail: the recent ones, a block that is filling, and the rows of a pass."""
        return self.recent + self.block + self.rows

    def residency(self) -> list[bool]:
        """Return for each layer whether it is resident.

        Resident layers are spread evenly: the link is busy while they compute. The first layer is
        one of them: the first copy hides behind it.
        """
        layers, resident = self.layout.layers, self.resident_layers
        return [layer * resident % layers < resident for layer in range(layers)]

    def boundary(self, length: int) -> int:
        """Return how many tokens of a text are its prefix: whole blocks, before the recent ones."""
        return max(0, length - self.recent) // self.block * self.block

    # -- what is allocated: a shape for each buffer ------------------------------------------------

    @property
    def layer_buffer(self) -> tuple[int, ...]:
        """Shape of one whole layer (2, Hkv, capacity, D)."""
        return self.layout.shape(1, self.capacity)[1:]

    @property
    def tails_buffer(self) -> tuple[int, ...]:
        """Shape of all tails (streamed layers, 2, Hkv, tail, D)."""
        return self.layout.shape(self.streamed_layers, self.tail)

    @property
    def slot_buffer(self) -> tuple[int, ...]:
        """Shape of one slot of the ring (2, slot_heads, capacity, D)."""
        return 2, self.slot_heads, self.capacity, self.layout.head_dim

    @property
    def host_buffer(self) -> tuple[int, ...]:
        """Shape of the host store (streamed and late layers, 2, Hkv, capacity, D)."""
        return self.layout.shape(self.streamed_layers + self.late_layers, self.capacity)

    @property
    def ring_numel(self) -> int:
        """Elements of the ring: prefill builds one whole layer in its memory."""
        if not self.streams:
            return 0
        return max(self.slots * prod(self.slot_buffer), prod(self.layer_buffer))

    # -- bytes -------------------------------------------------------------------------------------

    def device_tiers(self, prefill: bool) -> dict[str, int]:
        """Return the device bytes by what they are for, in prefill or when decoding."""
        layers = self.resident_layers - (self.late_layers if prefill else 0)
        return {
            "resident layers": layers * self._bytes(self.layer_buffer),
            "ring, in prefill one layer": self.ring_numel * self.layout.dtype.itemsize,
            "recent tokens": self._bytes(self.tails_buffer),
        }

    def device_bytes(self, prefill: bool = False) -> int:
        """Return the device bytes, in prefill or when decoding."""
        return sum(self.device_tiers(prefill).values())

    @property
    def host_bytes(self) -> int:
        return self._bytes(self.host_buffer)

    def _bytes(self, buffer: tuple[int, ...]) -> int:
        return prod(buffer) * self.layout.dtype.itemsize
