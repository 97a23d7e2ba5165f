"""The shape of the target's cache: it counts each tier's bytes, and the cache allocates from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from offload.codec.format import (
    OUTLIER_BYTES,
    OUTLIER_SHARE,
    SPLIT_BYTES,
    SPLIT_TOKENS,
    SplitFormat,
    split_format,
)
from offload.layout import KVLayout, ceil_div

_MIN_COPY_BYTES = 2 << 20  # a copy at least this big runs at line rate
_MAX_RING_BYTES = 1 << 30
RESIDENT, SPLIT, OFFLOADED = "resident", "split", "streamed"  # kinds of layers


@dataclass(frozen=True)
class TieredCacheSpec:
    """The layers of a cache, and how many tokens each tier of one rank holds.

    Resident layers have one buffer on the device. All others are far: their recent tokens are in a
    tail on the device, and their prefix is in host memory, but for split layers' codes, which are
    on the device. Of late layers prefill writes to the host what is to be on the device, all KV of
    a resident one or the codes of a split one; it comes to the device behind prefill.
    """

    layout: KVLayout
    capacity: int  # tokens of the whole text
    resident_layers: int = 0
    deferred_layers: int = 0  # of the resident ones, then of the split ones
    split_layers: int = 0  # of the far ones, those with codes on the device
    compressed: bool = False  # whether the far ones without codes are slices on the host
    recent: int = 0  # tokens that stay behind the boundary, at least
    block: int = 256  # tokens by which the boundary moves
    rows: int = 256  # tokens of the largest pass when decoding
    slot_heads: int = 1  # KV heads in one slot of the transfer ring
    slots: int = 3
    copies: bool = True  # whether the link copies; if not, ring and prefill stage take nothing
    batch_invariant: bool = False  # attend in blocks at fixed positions (`offload.kernels`)

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
        """Return the shape with no resident layer, and a ring that suits the text.

        A slot takes as many heads as make a copy of whole keys or values 2 MB or more. There are
        three slots, or two where three would take over 1 GB; and all that fit the memory of one
        layer, which prefill takes anyway.
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
        """Return the shape with other layers on the device."""
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
        """Layers of which something of every token is on the device when decoding."""
        return self.resident_layers + self.split_layers

    @property
    def deferred_resident_layers(self) -> int:
        return min(self.deferred_layers, self.resident_layers)

    @property
    def deferred_split_layers(self) -> int:
        """Split layers whose codes are on the host until prefill is over."""
        return self.deferred_layers - self.deferred_resident_layers

    @property
    def streamed_layers(self) -> int:
        """Far layers of which nothing of the prefix is on the device."""
        return self.offloaded_layers - self.split_layers

    @property
    def split_or_compressed_layers(self) -> int:
        """Layers that are kept in slices, wherever these are."""
        return self.offloaded_layers if self.compressed else self.split_layers

    @property
    def format(self) -> SplitFormat | None:
        """How elements are cut into slices; None where they are not."""
        return split_format(self.layout.dtype)

    @property
    def compression_saves(self) -> bool:
        """Whether slices take less of the host than the elements they are cut of."""
        if self.format is None:
            return False
        return self.format.planes < 2 * self.layout.dtype.itemsize

    @property
    def may_be_compressed(self) -> bool:
        """Whether `compress_offload` would make the layers on the host smaller."""
        if self.compressed or not self.copies or not self.compression_saves:
            return False
        return self.streamed_layers > 0

    @property
    def streams(self) -> bool:
        """Whether anything is copied over the link to decode."""
        return self.copies and self.offloaded_layers > 0

    @property
    def tail(self) -> int:
        """Tokens in the tail: the recent ones, a block that is filling, and the rows of a pass."""
        return self.recent + self.block + self.rows

    def placement(self) -> list[str]:
        """Return for each layer whether it is resident, split or streamed.

        Resident layers are spread evenly: the link is busy while they compute. The first layer is
        one of them: the first copy hides behind it. So are split ones over the rest.
        """
        far = iter(_spread(self.offloaded_layers, self.split_layers))
        kinds = []
        for near in _spread(self.layout.layers, self.resident_layers):
            if near:
                kinds.append(RESIDENT)
            else:
                kinds.append(SPLIT if next(far) else OFFLOADED)
        return kinds

    def boundary(self, length: int) -> int:
        """Return how many tokens of a text are its prefix: whole blocks, before the recent ones."""
        return max(0, length - self.recent) // self.block * self.block

    # -- what is allocated: a shape for each buffer ------------------------------------------------

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one whole layer (2, Hkv, capacity, D)."""
        return self.layout.shape(1, self.capacity)[1:]

    @property
    def tails_shape(self) -> tuple[int, ...]:
        """Shape of all tails (far layers, 2, Hkv, tail, D)."""
        return self.layout.shape(self.offloaded_layers, self.tail)

    @property
    def reconstruct_shape(self) -> tuple[int, ...]:
        """Shape of what slices are joined in (2, slot_heads, capacity, D)."""
        heads = self.slot_heads if self.split_or_compressed_layers else 0
        return 2, heads, self.capacity, self.layout.head_dim

    @property
    def writeback_shape(self) -> tuple[int, ...]:
        """Shape of what slices leave from (2, bytes)."""
        if not self.split_or_compressed_layers:
            return 2, 0
        assert self.format is not None
        whole = self.compressed or self.deferred_split_layers
        planes = self.format.planes if whole else self.format.low_planes
        tokens = min(SPLIT_TOKENS, self.capacity)
        return 2, planes * self.layout.heads * tokens * self.layout.head_dim

    def planes_shape(self, planes: int) -> tuple[int, ...]:
        """Shape of slices of a layer (planes, Hkv, capacity, D), of a byte each."""
        return planes, self.layout.heads, self.capacity, self.layout.head_dim

    def host_planes(self, kind: str, deferred: bool = False) -> int:
        """Return how many planes of slices a far layer of a kind has on the host; 0: it has none.

        That one has its elements there. A `late` one has its codes there, too.
        """
        if kind == SPLIT and not deferred:
            assert self.format is not None
            return self.format.low_planes
        if self.compressed or deferred:
            assert self.format is not None
            return self.format.planes
        return 0

    def host_layer_bytes(self, kind: str, deferred: bool = False) -> int:
        """Return the bytes of host memory for the prefix of one far layer."""
        if planes := self.host_planes(kind, deferred):
            return prod(self.planes_shape(planes))
        return self._bytes(self.layer_shape)

    def offloaded_placement(self) -> list[tuple[str, bool]]:
        """Return for each far layer its kind, and whether its codes come late: the last ones do."""
        early = self.split_layers - self.deferred_split_layers
        places = []
        for kind in self.placement():
            if kind == RESIDENT:
                continue
            deferred = False
            if kind == SPLIT:
                deferred = early <= 0
                early -= 1
            places.append((kind, deferred))
        return places

    def deferred_bytes(self, tokens: int) -> int:
        """Return the bytes of so many tokens that come to the device behind prefill."""
        whole = self.deferred_resident_layers * self._bytes(self.layer_shape)
        codes = self.deferred_split_layers * self._layer_codes_bytes()
        return (whole + codes) * tokens // self.capacity

    def streamed_bytes(self, tokens: int) -> int:
        """Return the bytes of so many tokens that a pass streams, where the link copies."""
        if not self.streams:
            return 0
        kinds = self._offloaded_counts().items()
        far = sum(count * self.host_layer_bytes(kind) for kind, count in kinds)
        return far * tokens // self.capacity

    def host_sizes(self) -> list[int]:
        """Return the elements of the host store for each far layer, then for each late one."""
        parts = [
            self.host_layer_bytes(kind, deferred) for kind, deferred in self.offloaded_placement()
        ]
        parts += self.deferred_resident_layers * [self._bytes(self.layer_shape)]
        return [nbytes // self.layout.dtype.itemsize for nbytes in parts]

    @property
    def slot_numel(self) -> int:
        """Elements of one slot of the ring: `slot_heads` heads of the largest layer on the host."""
        largest = max((self.host_layer_bytes(kind) for kind in self._offloaded_counts()), default=0)
        head = largest // self.layout.heads
        return self.slot_heads * head // self.layout.dtype.itemsize

    @property
    def ring_numel(self) -> int:
        """Elements of the ring: prefill builds one whole layer in its memory."""
        slots = self.slots * self.slot_numel if self.streams else 0
        staged = self.streams or self.split_or_compressed_layers > 0
        return max(slots, prod(self.layer_shape) if staged else 0)

    @property
    def outliers(self) -> int:
        """Elements of one layer in slices that may be outliers."""
        return ceil(OUTLIER_SHARE * prod(self.layer_shape))

    # -- bytes -------------------------------------------------------------------------------------

    def device_breakdown(self, prefill: bool) -> dict[str, int]:
        """Return the device bytes by what they are for, in prefill or when decoding."""
        layers, split = self.resident_layers, self.split_layers
        if prefill:
            layers -= self.deferred_resident_layers
            split -= self.deferred_split_layers
        return {
            "resident layers": layers * self._bytes(self.layer_shape),
            "ring, in prefill one layer": self.ring_numel * self.layout.dtype.itemsize,
            "recent tokens": self._bytes(self.tails_shape),
            "high_bytes": split * self._layer_codes_bytes() + self._outliers_bytes(),
            "joining slices": self._bytes(self.reconstruct_shape) + prod(self.writeback_shape),
        }

    def device_bytes(self, prefill: bool = False) -> int:
        """Return the device bytes, in prefill or when decoding."""
        return sum(self.device_breakdown(prefill).values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host_sizes()) * self.layout.dtype.itemsize

    def _offloaded_counts(self) -> dict[str, int]:
        """Return how many far layers there are of each kind that there is."""
        counts = {SPLIT: self.split_layers, OFFLOADED: self.streamed_layers}
        return {kind: count for kind, count in counts.items() if count}

    def _layer_codes_bytes(self) -> int:
        """Return the bytes of a layer's codes on the device."""
        if self.format is None:
            return 0
        return prod(self.planes_shape(self.format.high_planes))

    def _outliers_bytes(self) -> int:
        return self.split_or_compressed_layers * self.outliers * OUTLIER_BYTES

    @property
    def splitting_bytes(self) -> int:
        """Return the bytes that splitting elements into slices takes while it is done."""
        if not self.split_or_compressed_layers:
            return 0
        tokens = min(SPLIT_TOKENS, self.capacity)
        return SPLIT_BYTES * 2 * self.layout.heads * tokens * self.layout.head_dim

    def _bytes(self, buffer: tuple[int, ...]) -> int:
        return prod(buffer) * self.layout.dtype.itemsize


def _spread(count: int, chosen: int) -> list[bool]:
    """Return `count` values of which `chosen` are true, evenly spread, the first among them."""
    return [index * chosen % count < chosen for index in range(count)]
