"""The spec of the target's cache: it counts each tier's bytes, and the cache allocates by it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from offload.codec.format import (
    OUTLIER_BYTES,
    OUTLIER_SHARE,
    PLAIN_SPLIT_TOKENS,
    SPLIT_BYTES,
    SPLIT_TOKENS,
    UNREAD_BLOCKS,
    SplitFormat,
    split_format,
)
from offload.layout import WRITEBACK_BYTES, KVLayout, ceil_div

_MIN_COPY_BYTES = 2 << 20  # copies of this size or more run at line rate
_MAX_RING_BYTES = 1 << 30
_MAX_CHUNKS = 8  # slots that a layer fills: each is attended to, and selected from, on its own
# kinds of layers
RESIDENT, SPLIT, OFFLOADED, WINDOWED = "resident", "split", "streamed", "windowed"
RECURRENT = "recurrent"
_KINDS = RESIDENT, SPLIT, OFFLOADED, WINDOWED, RECURRENT


@dataclass(frozen=True)
class LayerSpec:
    """The place of one layer's KV, and what it takes in each tier.

    A resident layer has one buffer on the device. All others are offloaded: the tokens after the
    boundary are in a device tail, the prefix is in host memory, except for the high bytes of a
    split layer, which are on the device. For a deferred layer, prefill first writes to the host
    what belongs on the device (all KV of a resident layer, the high bytes of a split layer); it is
    copied to the device after prefill. A windowed layer has only its last tokens on the device, and
    on the host those before some positions, from which another sequence may go on. Of a recurrent
    one the host has states as if they were KV.
    """

    layout: KVLayout
    capacity: int  # tokens
    kind: str  # resident, split, streamed, windowed or recurrent
    deferred: bool = False
    compressed: bool = False  # whether a streamed layer is split floats on the host
    # positions at which a windowed layer's last tokens, or a state, are kept on the host
    checkpoints: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole layer (2, Hkv, capacity, D)."""
        return self.layout.shape(1, self.capacity)[1:]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole layer."""
        return prod(self.shape) * self.layout.dtype.itemsize

    @cached_property  # plans ask for it very often
    def format(self) -> SplitFormat | None:
        """The format of its split floats; None if it consists of whole elements."""
        if self.kind == SPLIT or (self.kind == OFFLOADED and self.compressed):
            return split_format(self.layout.dtype)
        return None

    def planes_shape(self, planes: int) -> tuple[int, ...]:
        """Return the shape of byte planes (planes, Hkv, capacity, D)."""
        return planes, self.layout.heads, self.capacity, self.layout.head_dim

    @property
    def host_planes(self) -> int:
        """Return how many byte planes it has on the host, deferred ones too; 0 if it has none."""
        if self.format is None:
            return 0
        has_all = self.kind == OFFLOADED or self.deferred
        return self.format.planes if has_all else self.format.low_planes

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory for its prefix, or all of it while it is deferred."""
        if self.kind in (WINDOWED, RECURRENT):
            return prod(self.checkpoints_shape) * self.layout.dtype.itemsize
        if self.kind == RESIDENT and not self.deferred:
            return 0
        return prod(self.planes_shape(self.host_planes)) if self.host_planes else self.nbytes

    @property
    def checkpoints_shape(self) -> tuple[int, ...]:
        """Return the shape of a layer's checkpoints (n, 2, Hkv, kept, D) on the host."""
        window = self.layout.window
        kept = self.capacity if window is None else window.kept
        return self.layout.shape(self.checkpoints, kept)

    @property
    def streamed_bytes(self) -> int:
        """Return the bytes of host memory that a forward reads."""
        if self.kind in (WINDOWED, RECURRENT, RESIDENT):
            return 0
        if self.format is None:
            return self.nbytes
        planes = self.format.planes if self.kind == OFFLOADED else self.format.low_planes
        return prod(self.planes_shape(planes))

    @property
    def high_bytes(self) -> int:
        """Return the bytes of a split layer's high bytes."""
        if self.kind != SPLIT or self.format is None:
            return 0
        return prod(self.planes_shape(self.format.high_planes))

    @property
    def deferred_bytes(self) -> int:
        """Return the bytes that are copied to the device after prefill."""
        if not self.deferred:
            return 0
        return self.nbytes if self.kind == RESIDENT else self.high_bytes

    @property
    def outliers(self) -> int:
        """Return the planned number of outliers among its split floats."""
        return ceil(OUTLIER_SHARE * prod(self.shape)) if self.format is not None else 0

    def device_bytes(self, prefill: bool) -> int:
        """Return its bytes on the device beside its tail, in prefill or when decoding."""
        whole = self.nbytes if self.kind in (RESIDENT, WINDOWED) else self.high_bytes
        return OUTLIER_BYTES * self.outliers + (0 if prefill and self.deferred else whole)


@dataclass(frozen=True)
class SharedBuffers:
    """The device buffers that a cache's layers share, or get their parts of."""

    tails: tuple[int, ...]  # shape of all tails (offloaded layers, 2, Hkv, tail, D)
    reconstruct: tuple[int, ...]  # shape of the reconstruction buffer (2, slot_heads, capacity, D)
    # shape of the buffers from which split floats are written to the host (2, bytes)
    writeback: tuple[int, int]
    slot_numel: int  # elements of a ring slot: `slot_heads` heads of the largest layer on the host
    ring_numel: int  # elements of the ring, at least one whole layer: prefill builds it there
    splitting_bytes: int  # scratch memory for splitting elements


@dataclass(frozen=True)
class TieredCacheSpec:
    """The placement of a cache's layers, and how many tokens each tier of one rank holds.

    The numbers of layers count those with full attention. All others, with a sliding window or a
    recurrent state, are on the device.
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
    forward_rows: int = 256  # query tokens of one forward, at most `rows`

    def __post_init__(self) -> None:
        on_device = self.resident_layers + self.split_layers
        if self.deferred_layers and not (self.streams and self.deferred_layers <= on_device):
            raise ValueError(
                f"{self.deferred_layers} of {on_device} on-device layers are deferred: "
                "that needs offloaded layers and a host link"
            )
        if (self.split_layers or self.compressed) and split_format(self.layout.dtype) is None:
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

        A slot has enough heads for a copy of all their keys or values to be 2 MB or more, and for a
        layer to need no more than 8. There are three slots, or two if three would exceed 1 GB, and
        as many more as fit in the memory of one layer, which prefill needs anyway.
        """
        head = layout.bytes(capacity, 1) // layout.heads
        smallest = max(ceil_div(2 * _MIN_COPY_BYTES, head), ceil_div(layout.heads, _MAX_CHUNKS))
        heads = min(layout.heads, smallest)
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

    @property
    def offloaded_layers(self) -> int:
        return self.layout.full_layers - self.resident_layers

    @property
    def streamed_layers(self) -> int:
        """Return the number of offloaded layers with nothing of the prefix on the device."""
        return self.offloaded_layers - self.split_layers

    @property
    def streams(self) -> bool:
        """Return whether decoding copies anything over the host link."""
        return self.copies and self.offloaded_layers > 0

    @property
    def tail(self) -> int:
        """Return the tokens of the tail: recent ones, a block being filled, those of a forward."""
        return self.recent + self.block + self.rows

    def boundary(self, length: int) -> int:
        """Return the number of prefix tokens: whole blocks, with at least `recent` tokens after."""
        return max(0, length - self.recent) // self.block * self.block

    @cached_property
    def counts(self) -> dict[LayerSpec, int]:
        """Return the number of layers of each kind, those that are deferred after the others."""
        resident = min(self.deferred_layers, self.resident_layers)
        split = self.deferred_layers - resident
        numbers = {
            (RESIDENT, False): self.resident_layers - resident,
            (RESIDENT, True): resident,
            (SPLIT, False): self.split_layers - split,
            (SPLIT, True): split,
            (OFFLOADED, False): self.streamed_layers,
        }
        counts = {
            LayerSpec(self.layout, self.capacity, *kind, self.compressed): count
            for kind, count in numbers.items()
            if count
        }
        if (window := self.layout.window) is not None:
            # those kept before the boundary, and the tail
            tokens = min(self.capacity, window.kept + self.tail)
            # one is for an extra position (`checkpoint_at`)
            checkpoints = self.capacity // window.step + 1 if tokens < self.capacity else 0
            spec = LayerSpec(self.layout.windowed, tokens, WINDOWED, checkpoints=checkpoints)
            counts[spec] = len(window.layers)
        if (states := self.layout.recurrent) is not None:
            layers, itemsize = states.layers, self.layout.dtype.itemsize
            kept = states.kept_tokens(itemsize)
            count = states.checkpoints(self.capacity)
            spec = LayerSpec(self.layout.of(min(layers)), kept, RECURRENT, checkpoints=count)
            counts[spec] = len(layers)
        return counts

    def layers(self) -> list[LayerSpec]:
        """Return each layer's spec.

        Resident layers are spread evenly over those with full attention, so that the link is busy
        while they compute. The first one is resident, to overlap with the first copy. Split layers
        are spread evenly over the rest. The last layers of a kind are deferred.
        """
        by_kind: dict[str, list[LayerSpec]] = {kind: [] for kind in _KINDS}
        for layer, count in self.counts.items():
            by_kind[layer.kind] += count * [layer]
        is_split = iter(_spread(self.offloaded_layers, self.split_layers))
        full_kinds = iter(
            RESIDENT if is_resident else SPLIT if next(is_split) else OFFLOADED
            for is_resident in _spread(self.layout.full_layers, self.resident_layers)
        )
        kinds = []
        for index in range(self.layout.layers):
            if self.layout.is_recurrent(index):
                kinds.append(RECURRENT)
            elif self.layout.window_of(index) is not None:
                kinds.append(WINDOWED)
            else:
                kinds.append(next(full_kinds))
        return [by_kind[kind].pop(0) for kind in kinds]

    @cached_property
    def buffers(self) -> SharedBuffers:
        """Return the device buffers that the layers share."""
        layout, capacity = self.layout, self.capacity
        split = [layer for layer in self.counts if layer.format is not None]
        planes = max((layer.host_planes for layer in split), default=0)
        row = layout.heads * layout.head_dim  # elements of a token's keys
        largest = max(layer.streamed_bytes for layer in self.counts) // layout.dtype.itemsize
        slot = self.slot_heads * (largest // layout.heads)
        slots = self.slots * slot if self.streams else 0
        # tokens; a short sequence has few, or the buffer would take as much memory as a layer
        written = min(ceil_div(WRITEBACK_BYTES, layout.head_dim), capacity // 8)
        splitting = SPLIT_BYTES * min(PLAIN_SPLIT_TOKENS, capacity)
        splitting += min(UNREAD_BLOCKS * SPLIT_TOKENS, capacity)  # a byte for each element
        return SharedBuffers(
            tails=layout.shape(self.offloaded_layers, self.tail),
            reconstruct=(2, self.slot_heads if split else 0, capacity, layout.head_dim),
            writeback=(2, planes * min(max(SPLIT_TOKENS, written), capacity) * row),
            slot_numel=slot,
            ring_numel=max(slots, layout.planes * capacity * row if self.streams or split else 0),
            splitting_bytes=2 * row * splitting if split else 0,
        )

    def deferred_bytes(self, tokens: int) -> int:
        """Return the bytes of this many tokens that are copied to the device after prefill."""
        whole = sum(count * layer.deferred_bytes for layer, count in self.counts.items())
        return whole * tokens // self.capacity

    def streamed_bytes(self, tokens: int) -> int:
        """Return the bytes of this many tokens that a forward streams, if the link copies."""
        if not self.streams:
            return 0
        whole = sum(count * layer.streamed_bytes for layer, count in self.counts.items())
        return whole * tokens // self.capacity

    @property
    def host_bytes(self) -> int:
        return sum(count * layer.host_bytes for layer, count in self.counts.items())

    def device_breakdown(self, prefill: bool) -> dict[str, int]:
        """Return the device bytes by purpose, in prefill or when decoding."""
        buffers, itemsize = self.buffers, self.layout.dtype.itemsize
        layers = dict.fromkeys(_KINDS, 0)
        for layer, count in self.counts.items():
            layers[layer.kind] += count * layer.device_bytes(prefill)
        return {
            "resident layers": layers[RESIDENT],
            "layers with a window": layers[WINDOWED],
            "recurrent states": 0
            if self.layout.recurrent is None
            else self.layout.recurrent.cache_bytes(self.forward_rows, itemsize),
            "ring, in prefill one layer": buffers.ring_numel * itemsize,
            "device tail": prod(buffers.tails) * itemsize,
            "high_bytes": layers[SPLIT] + layers[OFFLOADED],
            "reconstruction buffers": prod(buffers.reconstruct) * itemsize
            + prod(buffers.writeback),
        }


def _spread(count: int, selected: int) -> list[bool]:
    """Return `count` booleans, the first and `selected` in all true, evenly spread."""
    return [index * selected % count < selected for index in range(count)]
