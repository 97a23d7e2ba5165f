"""The spec of the target's cache: it counts each tier's bytes, and the cache allocates by it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from offload.codec.format import (
    OUTLIER_BYTES,
    OUTLIER_SHARE,
    PLAIN_SPLIT_TOKENS,
    SPLIT_BYTES,
    SPLIT_TOKENS,
    SplitFormat,
    split_format,
)
from offload.layout import KVLayout, ceil_div

_MIN_COPY_BYTES = 2 << 20  # copies of this size or more run at line rate
_MAX_RING_BYTES = 1 << 30
RESIDENT, SPLIT, OFFLOADED = "resident", "split", "streamed"  # kinds of layers


@dataclass(frozen=True)
class TieredCacheSpec:
    """The placement of a cache's layers, and how many tokens each tier of one rank holds.

    Resident layers have one buffer on the device. All others are offloaded: the tokens after the
    boundary are in a device tail, the prefix is in host memory, except for the high bytes of split
    layers, which are on the device. For deferred layers, prefill first writes to the host what
    belongs on the device (all KV of a resident layer, the high bytes of a split layer); it is
    copied to the device after prefill.
    """

    layout: KVLayout
    capacity: int  # tokens of the whole sequence
    resident_layers: int = 0
    deferred_layers: int = 0  # resident layers first, then split ones
    split_layers: int = 0  # offloaded layers with high bytes on the device
    compressed: bool = False  # whether the other offloaded layers are split floats on the host
    recent: int = 0  # minimum number of tokens after the boundary
    block: int = 256  # the boundary moves by this many tokens
    rows: int = 256  # query tokens of the largest forward when decoding
    slot_heads: int = 1  # KV heads in one slot of the transfer ring
    slots: int = 3
    copies: bool = True  # whether the link copies; if not, ring and staging need no memory
    batch_invariant: bool = False  # attention in blocks at fixed positions (`offload.kernels`)

    def __post_init__(self) -> None:
        if self.deferred_layers and not (
            self.streams and self.deferred_layers <= self.on_device_layers
        ):
            raise ValueError(
                f"{self.deferred_layers} of {self.on_device_layers} on-device layers are deferred: "
                "that needs offloaded layers and a host link"
            )
        if (self.split_layers or self.compressed) and self.format is None:
            raise ValueError(f"elements of {self.layout.dtype} cannot be split")
        if not 0 <= self.split_layers <= self.offloaded_layers:
            raise ValueError(
                f"{self.split_layers} split layers, but only {self.offloaded_layers} offloaded ones"
            )

    @classmethod
    def with_ring(
        cls, layout: KVLayout, capacity: int, recent: int, block: int, rows: int, copies: bool
    ) -> TieredCacheSpec:
        """Return the spec without resident layers, with a transfer ring that suits the sequence.

        A slot has enough heads for a copy of all their keys or values to be 2 MB or more. There are
        three slots, or two if three would exceed 1 GB, and as many more as fit in the memory of one
        layer, which prefill needs anyway.
        """
        head = layout.bytes(capacity, 1) // layout.heads
        heads = min(layout.heads, max(1, ceil_div(2 * _MIN_COPY_BYTES, head)))
        slots = 3 if 3 * heads * head <= _MAX_RING_BYTES else 2
        slots = max(slots, layout.heads // heads)
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

    def with_placement(
        self, resident_layers: int, deferred_layers: int = 0, split_layers: int = 0
    ) -> TieredCacheSpec:
        """Return the spec with another number of resident, deferred and split layers."""
        return replace(
            self,
            resident_layers=resident_layers,
            deferred_layers=deferred_layers,
            split_layers=split_layers,
        )

    # -- layers and tokens -------------------------------------------------------------------------

    @property
    def offloaded_layers(self) -> int:
        return self.layout.layers - self.resident_layers

    @property
    def on_device_layers(self) -> int:
        """Layers with KV of every token on the device when decoding: resident and split."""
        return self.resident_layers + self.split_layers

    @property
    def deferred_resident_layers(self) -> int:
        return min(self.deferred_layers, self.resident_layers)

    @property
    def deferred_split_layers(self) -> int:
        """Split layers whose high bytes are on the host until prefill is over."""
        return self.deferred_layers - self.deferred_resident_layers

    @property
    def streamed_layers(self) -> int:
        """Offloaded layers with nothing of the prefix on the device."""
        return self.offloaded_layers - self.split_layers

    @property
    def split_or_compressed_layers(self) -> int:
        """Layers stored as split floats, on the device or on the host."""
        return self.offloaded_layers if self.compressed else self.split_layers

    @property
    def format(self) -> SplitFormat | None:
        """The format of split elements; None if the dtype cannot be split."""
        return split_format(self.layout.dtype)

    @property
    def compression_saves(self) -> bool:
        """Return whether split floats take less host memory than the elements themselves."""
        if self.format is None:
            return False
        return self.format.planes < 2 * self.layout.dtype.itemsize

    @property
    def may_be_compressed(self) -> bool:
        """Return whether `compress_offload` would make the layers on the host smaller."""
        if self.compressed or not self.copies or not self.compression_saves:
            return False
        return self.streamed_layers > 0

    @property
    def streams(self) -> bool:
        """Return whether decoding copies anything over the host link."""
        return self.copies and self.offloaded_layers > 0

    @property
    def tail(self) -> int:
        """Tokens of the tail: the recent ones, a block being filled, and those of a forward."""
        return self.recent + self.block + self.rows

    def placement(self) -> list[str]:
        """Return the kind of each layer: resident, split or streamed.

        Resident layers are spread evenly, so that the link is busy while they compute. The first
        layer is one of them, to overlap with the first copy. Split layers are spread evenly over
        the rest.
        """
        offloaded = iter(_spread(self.offloaded_layers, self.split_layers))
        kinds = []
        for is_resident in _spread(self.layout.layers, self.resident_layers):
            if is_resident:
                kinds.append(RESIDENT)
            else:
                kinds.append(SPLIT if next(offloaded) else OFFLOADED)
        return kinds

    def boundary(self, length: int) -> int:
        """Return the number of prefix tokens: whole blocks, with at least `recent` tokens after."""
        return max(0, length - self.recent) // self.block * self.block

    # -- the shapes of the allocated buffers -------------------------------------------------------

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one whole layer (2, Hkv, capacity, D)."""
        return self.layout.shape(1, self.capacity)[1:]

    @property
    def tails_shape(self) -> tuple[int, ...]:
        """Shape of all tails (offloaded layers, 2, Hkv, tail, D)."""
        return self.layout.shape(self.offloaded_layers, self.tail)

    @property
    def reconstruct_shape(self) -> tuple[int, ...]:
        """Shape of the reconstruction buffer of split layers (2, slot_heads, capacity, D)."""
        heads = self.slot_heads if self.split_or_compressed_layers else 0
        return 2, heads, self.capacity, self.layout.head_dim

    @property
    def writeback_shape(self) -> tuple[int, ...]:
        """Shape of the buffers from which split layers are written to the host (2, bytes)."""
        if not self.split_or_compressed_layers:
            return 2, 0
        assert self.format is not None
        all_planes = self.compressed or self.deferred_split_layers
        planes = self.format.planes if all_planes else self.format.low_planes
        tokens = min(SPLIT_TOKENS, self.capacity)
        return 2, planes * self.layout.heads * tokens * self.layout.head_dim

    def planes_shape(self, planes: int) -> tuple[int, ...]:
        """Shape of a split layer's byte planes (planes, Hkv, capacity, D)."""
        return planes, self.layout.heads, self.capacity, self.layout.head_dim

    def host_planes(self, kind: str, deferred: bool = False) -> int:
        """Return how many byte planes an offloaded layer has on the host; 0 if it is not split.

        A layer that is not split has its elements there; a deferred one its high bytes, too.
        """
        if kind == SPLIT and not deferred:
            assert self.format is not None
            return self.format.low_planes
        if self.compressed or deferred:
            assert self.format is not None
            return self.format.planes
        return 0

    def host_layer_bytes(self, kind: str, deferred: bool = False) -> int:
        """Return the bytes of host memory for the prefix of one offloaded layer."""
        if planes := self.host_planes(kind, deferred):
            return prod(self.planes_shape(planes))
        return self._bytes(self.layer_shape)

    def offloaded_placement(self) -> list[tuple[str, bool]]:
        """Return for each offloaded layer its kind, and whether its high bytes are deferred.

        The last split layers are the deferred ones.
        """
        not_deferred = self.split_layers - self.deferred_split_layers
        placement = []
        for kind in self.placement():
            if kind == RESIDENT:
                continue
            deferred = False
            if kind == SPLIT:
                deferred = not_deferred <= 0
                not_deferred -= 1
            placement.append((kind, deferred))
        return placement

    def deferred_bytes(self, tokens: int) -> int:
        """Return the bytes of this many tokens that are copied to the device after prefill."""
        resident = self.deferred_resident_layers * self._bytes(self.layer_shape)
        high_bytes = self.deferred_split_layers * self._layer_high_bytes()
        return (resident + high_bytes) * tokens // self.capacity

    def streamed_bytes(self, tokens: int) -> int:
        """Return the bytes of this many tokens that a forward streams, if the link copies."""
        if not self.streams:
            return 0
        kinds = self._offloaded_counts().items()
        offloaded = sum(count * self.host_layer_bytes(kind) for kind, count in kinds)
        return offloaded * tokens // self.capacity

    def host_sizes(self) -> list[int]:
        """Return the elements of each host part: offloaded layers, then deferred resident ones."""
        sizes = [
            self.host_layer_bytes(kind, deferred) for kind, deferred in self.offloaded_placement()
        ]
        sizes += self.deferred_resident_layers * [self._bytes(self.layer_shape)]
        return [nbytes // self.layout.dtype.itemsize for nbytes in sizes]

    @property
    def slot_numel(self) -> int:
        """Elements of one ring slot: `slot_heads` heads of the largest layer on the host."""
        largest = max((self.host_layer_bytes(kind) for kind in self._offloaded_counts()), default=0)
        head = largest // self.layout.heads
        return self.slot_heads * head // self.layout.dtype.itemsize

    @property
    def ring_numel(self) -> int:
        """Elements of the ring, at least one whole layer: prefill builds it in this memory."""
        slots = self.slots * self.slot_numel if self.streams else 0
        staged = self.streams or self.split_or_compressed_layers > 0
        return max(slots, prod(self.layer_shape) if staged else 0)

    @property
    def outliers(self) -> int:
        """Planned number of outliers among the elements of one split layer."""
        return ceil(OUTLIER_SHARE * prod(self.layer_shape))

    # -- bytes -------------------------------------------------------------------------------------

    def device_breakdown(self, prefill: bool) -> dict[str, int]:
        """Return the device bytes by purpose, in prefill or when decoding."""
        layers, split = self.resident_layers, self.split_layers
        if prefill:
            layers -= self.deferred_resident_layers
            split -= self.deferred_split_layers
        return {
            "resident layers": layers * self._bytes(self.layer_shape),
            "ring, in prefill one layer": self.ring_numel * self.layout.dtype.itemsize,
            "device tail": self._bytes(self.tails_shape),
            "high_bytes": split * self._layer_high_bytes() + self._outliers_bytes(),
            "reconstruction buffers": self._bytes(self.reconstruct_shape)
            + prod(self.writeback_shape),
        }

    def device_bytes(self, prefill: bool = False) -> int:
        """Return the device bytes, in prefill or when decoding."""
        return sum(self.device_breakdown(prefill).values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host_sizes()) * self.layout.dtype.itemsize

    def _offloaded_counts(self) -> dict[str, int]:
        """Return the number of offloaded layers of each kind that occurs."""
        counts = {SPLIT: self.split_layers, OFFLOADED: self.streamed_layers}
        return {kind: count for kind, count in counts.items() if count}

    def _layer_high_bytes(self) -> int:
        """Return the size of a layer's high bytes on the device."""
        if self.format is None:
            return 0
        return prod(self.planes_shape(self.format.high_planes))

    def _outliers_bytes(self) -> int:
        return self.split_or_compressed_layers * self.outliers * OUTLIER_BYTES

    @property
    def splitting_bytes(self) -> int:
        """Return the bytes of scratch memory for splitting elements."""
        if not self.split_or_compressed_layers:
            return 0
        tokens = min(PLAIN_SPLIT_TOKENS, self.capacity)
        return SPLIT_BYTES * 2 * self.layout.heads * tokens * self.layout.head_dim

    def _bytes(self, buffer: tuple[int, ...]) -> int:
        return prod(buffer) * self.layout.dtype.itemsize


def _spread(count: int, selected: int) -> list[bool]:
    """Return `count` booleans, the first and `selected` in all true, evenly spread."""
    return [index * selected % count < selected for index in range(count)]
