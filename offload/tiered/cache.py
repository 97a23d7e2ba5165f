"""The target's KV cache: some layers on the device; of the others, the prefix is in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offload.cache.base import AttentionObserver, Cache
from offload.errors import InsufficientMemoryError
from offload.kernels.group_attention import BATCH_INVARIANT, FAST
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.transfer_ring import TransferRing
from offload.rotary import Rotary
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader
from offload.tiered.layer import KVGroup, TieredLayer, attend_groups
from offload.tiered.offloaded import OffloadedLayer
from offload.tiered.resident import ResidentLayer
from offload.tiered.shape import RESIDENT, SPLIT, TieredCacheSpec
from offload.tiered.split import SplitKV, SplitLayer, WritebackBuffers
from offload.traffic import ByteCounters


class TieredCache(Cache):
    """Exact KV of the whole sequence in two tiers.

    `boundary` splits the tokens into a prefix and a tail; each kind of layer decides where it keeps
    either (`TieredLayer`). The boundary moves by whole blocks when a forward begins, once enough
    tokens will remain after it; offloaded layers write the tokens it moves past to the host.
    """

    _state: ClassVar[tuple[str, ...]] = ("length", "boundary", "_tails")

    def __init__(self, shape: TieredCacheSpec, link: Link, rotary: Rotary, arena: HostArena):
        """Allocate everything but deferred layers.

        Raises InsufficientMemoryError if host memory does not suffice.
        """
        super().__init__(shape.layout)
        if shape.copies != link.copies:
            raise ValueError(
                f"the spec is for another kind of link: copies is {shape.copies}, this link's is "
                f"{link.copies}"
            )
        self.shape = shape
        self.link = link
        self.rotary = rotary
        self.boundary = 0
        self.observers: list[AttentionObserver] = []
        self._buffers = _Buffers.allocate(shape, link, arena)
        self._tails = self._buffers.tails
        self.layers = _make_layers(shape, link, self._buffers, self.traffic)
        self.is_batch_invariant = shape.batch_invariant

    @property
    def device_bytes(self) -> int:
        return self._buffers.shared_bytes + sum(layer.device_bytes for layer in self.layers)

    # -- prefill (offload.tiered.prefill) ----------------------------------------------------------

    def check_room(self, rows: int) -> None:
        """Raise ValueError if the cache has no room for `rows` more tokens."""
        if self.length + rows > self.shape.capacity:
            raise ValueError(
                f"{self.length} tokens and {rows} more do not fit a cache of {self.shape.capacity}"
            )

    def staging_buffer(self, tokens: int) -> Tensor | None:
        """Return memory (2, Hkv, tokens, D) in which prefill builds a layer's KV.

        None if every layer has a buffer of its own.
        """
        ring = self._buffers.ring
        if ring is None or not self.shape.ring_numel:
            return None
        _, *shape = self.layout.shape(1, tokens)
        return ring.borrow(shape)

    def onload_deferred(self) -> None:
        """Copy the deferred layers to the device, into memory that prefill has released.

        Raises InsufficientMemoryError if that memory is no longer free.
        """
        deferred = [layer for layer in self.layers if layer.is_deferred]
        for layer in deferred:
            try:
                layer.onload_deferred(self.length, self.boundary)
            except torch.OutOfMemoryError as error:
                raise InsufficientMemoryError(
                    f"another process took the device memory of {len(deferred)} layers: use fewer "
                    "`gpu_kv_layers` or `split_layers`."
                ) from error
        if deferred:
            self.link.drain()

    def host_readers(self) -> list[HostReader]:
        """Return a reader of each layer's current KV (`TieredLayer.host_reader`)."""
        self.link.drain()
        self.link.finish_compute()
        return [layer.host_reader(self.length, self.boundary, self.link) for layer in self.layers]

    # -- decoding ----------------------------------------------------------------------------------

    def begin_forward(self, rows: int) -> None:
        self.check_room(rows)
        self.onload_deferred()
        self._move_boundary()
        if self._buffers.ring is not None and self.boundary:
            chunks: list[Tensor] = []
            for layer in self.layers:
                chunks += layer.chunks(self.boundary)
            self._buffers.ring.start(chunks)
        for observer in self.observers:
            observer.on_forward(self.boundary, self.length, self.length + rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        q = self.rotary(q, start, layer)
        k = self.rotary(k, start, layer)
        end = start + len(q)
        layer_kv, boundary = self.layers[layer], self.boundary
        layer_kv.append(k, v, start, boundary)

        def observe(group: KVGroup, queries: Tensor) -> None:
            self.notify(layer, group.head, queries, *group.split_at(boundary))

        observer = observe if self.observers else None
        attention = BATCH_INVARIANT if self.is_batch_invariant else FAST
        groups = layer_kv.groups(end, boundary)
        return attend_groups(q, groups, attention, self.traffic, observer)

    def crop(self, length: int) -> None:
        self._notify_advance(min(self.length, length))  # an observer may raise
        super().crop(length)
        # below the boundary, the tail is empty
        self.boundary = min(self.boundary, self.length)

    def truncate(self, length: int) -> None:
        """Keep only the first `length` tokens, however few; another sequence continues from there.

        Observers are reset and select again in the next forward, which must be a prefill unless the
        cache `is_block_aligned`.
        """
        self._notify_advance(0)
        super().crop(length)
        if self.length < self.boundary:
            self.boundary = self.length
            for layer in self.layers:
                layer.truncate(self.length)

    @property
    def is_block_aligned(self) -> bool:
        """Return whether the boundary is a multiple of the block, as decoding requires."""
        return self.boundary % self.shape.block == 0

    def advance(self, rows: int) -> None:
        super().advance(rows)
        self._notify_advance(self.length)

    def notify(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        """Notify observers of a layer's attention (`AttentionObserver.on_attention`)."""
        for observer in self.observers:
            observer.on_attention(layer, head, q, prefix, recent)

    def _notify_advance(self, length: int) -> None:
        for observer in self.observers:
            observer.on_advance(length)

    def _move_boundary(self) -> None:
        """Move the boundary as far as possible, and write the tokens it moves past to the host."""
        count = self.shape.boundary(self.length) - self.boundary
        if count <= 0:
            return
        tickets = [layer.offload_block(self.boundary, count) for layer in self.layers]
        pending = [ticket for ticket in tickets if ticket is not None]
        if pending:  # copies run in order; the tails are about to be overwritten
            self.link.wait(pending[-1])
        self.boundary += count
        tail_tokens = self.length - self.boundary
        for layer in self.layers:
            layer.shift_tail(count, tail_tokens)


@dataclass(frozen=True)
class _Buffers:
    """The memory that a cache's layers get their parts of, or share."""

    host: Tensor  # flat: offloaded layers, then deferred ones
    tails: Tensor  # (offloaded layers, 2, Hkv, capacity, D)
    reconstruct: Tensor  # (2, heads, capacity, D)
    writeback: WritebackBuffers
    ring: TransferRing | None  # None without offloaded layers

    @classmethod
    def allocate(cls, shape: TieredCacheSpec, link: Link, arena: HostArena) -> _Buffers:
        host = arena.allocate((sum(shape.host_sizes()),))
        dtype, device = shape.layout.dtype, link.device
        tails = torch.empty(shape.tails_shape, dtype=dtype, device=device)
        reconstruct = torch.empty(shape.reconstruct_shape, dtype=dtype, device=device)
        ring = None
        if shape.offloaded_layers:
            ring = TransferRing(link, shape.slots, shape.slot_numel, dtype, shape.ring_numel)
        return cls(host, tails, reconstruct, WritebackBuffers(shape, link), ring)

    @property
    def shared_bytes(self) -> int:
        """Device memory that no layer counts as its own."""
        ring = self.ring.nbytes if self.ring is not None else 0
        return ring + self.reconstruct.nbytes + self.writeback.nbytes


def _make_layers(
    shape: TieredCacheSpec, link: Link, buffers: _Buffers, traffic: ByteCounters
) -> list[TieredLayer]:
    """Return a cache's layers, each with its part of the memory."""
    hosts, tails = iter(buffers.host.split(shape.host_sizes())), iter(buffers.tails)
    offloaded: list[TieredLayer] = []
    for kind, deferred in shape.offloaded_placement():
        tail, part = next(tails), next(hosts)
        assert buffers.ring is not None
        if planes := shape.host_planes(kind, deferred):
            byte_planes = part.view(torch.uint8).view(shape.planes_shape(planes))
            host = HostLayer(byte_planes, link, traffic)
            split_kv = SplitKV.allocate(shape, link.device, kind == SPLIT, deferred)
            shared = (buffers.ring, buffers.reconstruct, traffic)
            offloaded.append(SplitLayer(host, tail, *shared, split_kv, buffers.writeback))
        else:
            host = HostLayer(part.view(shape.layer_shape), link, traffic)
            offloaded.append(OffloadedLayer(host, tail, buffers.ring, shape.slot_heads, traffic))
    resident: list[TieredLayer] = []
    for index in range(shape.resident_layers):
        deferred_host = None
        if index >= shape.resident_layers - shape.deferred_resident_layers:
            deferred_host = HostLayer(next(hosts).view(shape.layer_shape), link, traffic)
        resident.append(ResidentLayer(shape, link.device, traffic, deferred_host))
    return [(resident if kind == RESIDENT else offloaded).pop(0) for kind in shape.placement()]
