"""The target's KV cache: some layers on the device; of the others, the prefix is in host memory."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from offload.cache.base import AttentionObserver, Cache
from offload.errors import InsufficientMemoryError
from offload.kernels.group_attention import BatchInvariantAttention, GroupAttention
from offload.memory.host import allocate
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.transfer_ring import TransferRing
from offload.rotary import Rotary
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader, head_blocks
from offload.tiered.layer import KVGroup, TieredLayer, attend_groups
from offload.tiered.offloaded import OffloadedLayer
from offload.tiered.resident import ResidentLayer
from offload.tiered.shape import RESIDENT, SPLIT, TieredCacheSpec
from offload.tiered.split import SplitKV, SplitLayer, WritebackBuffers


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
        self.host = arena.allocate((sum(shape.host_sizes()),))  # offloaded, then deferred
        dtype = shape.layout.dtype
        self._tails = torch.empty(shape.tails_shape, dtype=dtype, device=link.device)
        self._reconstruct_buffer = torch.empty(
            shape.reconstruct_shape, dtype=dtype, device=link.device
        )
        self._writeback = WritebackBuffers(shape, link)
        self._ring: TransferRing | None = None
        if shape.offloaded_layers:
            self._ring = TransferRing(link, shape.slots, shape.slot_numel, dtype, shape.ring_numel)
        self.layers = self._make_layers()
        self.is_batch_invariant = shape.batch_invariant
        self._attention = BatchInvariantAttention() if shape.batch_invariant else GroupAttention()

    def _make_layers(self) -> list[TieredLayer]:
        shape = self.shape
        hosts = iter(self.host.split(shape.host_sizes()))
        tails = iter(self._tails)
        offloaded = []
        for placement in shape.offloaded_placement():
            offloaded.append(self._offloaded_layer(placement, next(tails), next(hosts)))
        not_deferred = shape.resident_layers - shape.deferred_resident_layers
        resident = []
        for index in range(shape.resident_layers):
            deferred = next(hosts) if index >= not_deferred else None
            resident.append(self._resident_layer(deferred))
        layers = []
        for kind in shape.placement():
            group = resident if kind == RESIDENT else offloaded
            layers.append(group.pop(0))
        return layers

    def _resident_layer(self, deferred: Tensor | None) -> TieredLayer:
        """Return a resident layer, deferred if it is given its part of the host store."""
        host = None
        if deferred is not None:
            host = HostLayer(deferred.view(self.shape.layer_shape), self.link, self.traffic)
        return ResidentLayer(self.shape, self.link.device, self.traffic, host)

    def _offloaded_layer(
        self, placement: tuple[str, bool], tail: Tensor, part: Tensor
    ) -> TieredLayer:
        """Return an offloaded or split layer with its part of the host store.

        `placement` is its kind, and whether its high bytes are deferred.
        """
        shape, traffic = self.shape, self.traffic
        assert self._ring is not None
        kind, deferred = placement
        planes = shape.host_planes(kind, deferred)
        if not planes:
            host = HostLayer(part.view(shape.layer_shape), self.link, traffic)
            return OffloadedLayer(host, tail, self._ring, shape.slot_heads, traffic)
        assert shape.format is not None
        byte_planes = part.view(torch.uint8).view(shape.planes_shape(planes))
        host = HostLayer(byte_planes, self.link, traffic)
        split_kv = SplitKV.allocate(shape, self.link.device, kind == SPLIT, deferred)
        return SplitLayer(
            host, tail, self._ring, self._reconstruct_buffer, traffic, split_kv, self._writeback
        )

    @property
    def device_bytes(self) -> int:
        ring = self._ring.nbytes if self._ring is not None else 0
        layers = sum(layer.device_bytes for layer in self.layers)
        return layers + ring + self._reconstruct_buffer.nbytes + self._writeback.nbytes

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
        if self._ring is None or not self.shape.ring_numel:
            return None
        _, *shape = self.layout.shape(1, tokens)
        return self._ring.borrow(shape)

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

    def copy_to_host(self) -> list[Tensor]:
        """Return a copy of each layer's KV (2, Hkv, length, D) in host memory.

        It is loaded by another cache's `Prefill.load_blocks`. Raises InsufficientMemoryError if
        host memory does not suffice.
        """
        _, *shape = self.layout.shape(1, self.length)
        copies = []
        for read in self.host_readers():
            copy = allocate(prod(shape), self.layout.dtype)
            copy = copy.view(shape)
            for block in head_blocks(copy):
                block.kv.copy_(read(block.head, 0, self.length))
            copies.append(copy)
        return copies

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
        if self._ring is not None and self.boundary:
            chunks: list[Tensor] = []
            for layer in self.layers:
                chunks += layer.chunks(self.boundary)
            self._ring.start(chunks)
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

        groups, tail = layer_kv.groups(end, boundary), layer_kv.tail(end, boundary)
        observer = observe if self.observers else None
        return attend_groups(q, groups, tail, self._attention, self.traffic, observer)

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
