"""The target's cache: some layers on the device, of the others the prefix in host memory."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from offload.cache.base import AttentionObserver, Cache
from offload.errors import InsufficientMemoryError
from offload.memory.host import allocate
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.transfer_ring import TransferRing
from offload.rotary import Rotary
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader, head_blocks
from offload.tiered.layer import TieredLayer
from offload.tiered.offloaded import OffloadedLayer
from offload.tiered.resident import ResidentLayer
from offload.tiered.shape import RESIDENT, SPLIT, TieredCacheSpec
from offload.tiered.split import SplitKV, SplitLayer, WritebackBuffers


class TieredCache(Cache):
    """Exact KV of the whole sequence over two tiers.

    `boundary` splits the tokens into a prefix and recent ones. What a layer does with either is its
    own affair (`TieredLayer`). The boundary moves in whole blocks when a pass begins, once
    enough recent tokens stand behind the next one; streamed layers write to the host what it
    passes.
    """

    _state: ClassVar[tuple[str, ...]] = ("length", "boundary", "_tails")

    def __init__(self, shape: TieredCacheSpec, link: Link, rotary: Rotary, arena: HostArena):
        """Allocate everything but late layers. Raises InsufficientMemoryError where host memory does not do."""
        super().__init__(shape.layout)
        if shape.copies != link.copies:
            raise ValueError("the shape was counted for another kind of link")
        self.shape = shape
        self.link = link
        self.rotary = rotary
        self.boundary = 0
        self.observers: list[AttentionObserver] = []
        self.host = arena.allocate((sum(shape.host_sizes()),))  # far layers, then late ones
        dtype = shape.layout.dtype
        self._tails = torch.empty(shape.tails_shape, dtype=dtype, device=link.device)
        self._joined = torch.empty(shape.reconstruct_shape, dtype=dtype, device=link.device)
        self._outbox = WritebackBuffers(shape, link)
        self._ring: TransferRing | None = None
        if shape.offloaded_layers:
            self._ring = TransferRing(link, shape.slots, shape.slot_numel, dtype, shape.ring_numel)
        self.layers = self._make_layers()
        self.is_batch_invariant = shape.batch_invariant
        for layer in self.layers:
            layer.is_batch_invariant = shape.batch_invariant

    def _make_layers(self) -> list[TieredLayer]:
        shape = self.shape
        hosts = iter(self.host.split(shape.host_sizes()))
        tails = iter(self._tails)
        far = []
        for place in shape.offloaded_placement():
            far.append(self._far_layer(place, next(tails), next(hosts)))
        early = shape.resident_layers - shape.deferred_resident_layers
        resident = []
        for index in range(shape.resident_layers):
            deferred = next(hosts) if index >= early else None
            resident.append(self._resident_layer(deferred))
        layers = []
        for kind in shape.placement():
            group = resident if kind == RESIDENT else far
            layers.append(group.pop(0))
        return layers

    def _resident_layer(self, deferred: Tensor | None) -> TieredLayer:
        """Return a layer on the device, or one that comes there from this part of the host."""
        host = None
        if deferred is not None:
            host = HostLayer(deferred.view(self.shape.layer_shape), self.link, self.traffic)
        return ResidentLayer(self.shape, self.link.device, self.traffic, host)

    def _far_layer(self, place: tuple[str, bool], tail: Tensor, part: Tensor) -> TieredLayer:
        """Return a layer with a part of the host store, and maybe with codes on the device.

        `place` is its kind, and whether its codes come late.
        """
        shape, traffic = self.shape, self.traffic
        assert self._ring is not None
        kind, deferred = place
        planes = shape.host_planes(kind, deferred)
        if not planes:
            host = HostLayer(part.view(shape.layer_shape), self.link, traffic)
            return OffloadedLayer(host, tail, self._ring, shape.slot_heads, traffic)
        assert shape.format is not None
        slices = part.view(torch.uint8).view(shape.planes_shape(planes))
        host = HostLayer(slices, self.link, traffic)
        coding = SplitKV.allocate(shape, self.link.device, kind == SPLIT, deferred)
        return SplitLayer(host, tail, self._ring, self._joined, traffic, coding, self._outbox)

    @property
    def device_bytes(self) -> int:
        ring = self._ring.nbytes if self._ring is not None else 0
        layers = sum(layer.device_bytes for layer in self.layers)
        return layers + ring + self._joined.nbytes + self._outbox.nbytes

    # -- prefill (offload.tiered.prefill) ----------------------------------------------------------

    def check_room(self, rows: int) -> None:
        """Raise ValueError where so many tokens more do not fit."""
        if self.length + rows > self.shape.capacity:
            raise ValueError(
                f"{self.length} tokens and {rows} more do not fit a cache of {self.shape.capacity}"
            )

    def staging_buffer(self, tokens: int) -> Tensor | None:
        """Return the memory in which layers of so many tokens are built, (2, Hkv, N, D).

        None where each has a buffer of its own.
        """
        if self._ring is None or not self.shape.ring_numel:
            return None
        _, *shape = self.layout.shape(1, tokens)
        return self._ring.borrow(shape)

    def onload_deferred(self) -> None:
        """Bring the late layers to the device, into memory that prefill has left.

        Raises InsufficientMemoryError where others have taken it meanwhile.
        """
        deferred = [layer for layer in self.layers if layer.is_deferred]
        for layer in deferred:
            try:
                layer.onload_deferred(self.length, self.boundary)
            except torch.OutOfMemoryError as error:
                raise InsufficientMemoryError(
                    f"others took device memory meant for {len(deferred)} layers: use fewer "
                    "`gpu_kv_layers` or `split_layers`."
                ) from error
        if deferred:
            self.link.drain()

    def copy_to_host(self) -> list[Tensor]:
        """Return copies in host memory of what each layer holds (2, Hkv, length, D).

        For `Prefill.fill` of another cache. Raises InsufficientMemoryError where the host has no room for them.
        """
        _, *shape = self.layout.shape(1, self.length)
        copies = []
        for excerpt in self.host_readers():
            copy = allocate(prod(shape), self.layout.dtype)
            copy = copy.view(shape)
            for piece in head_blocks(copy):
                piece.kv.copy_(excerpt(piece.head, 0, self.length))
            copies.append(copy)
        return copies

    def host_readers(self) -> list[HostReader]:
        """Return what gives the KV of the text as it stands, by layer (`TieredLayer.excerpt`)."""
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
        for follower in self.observers:
            follower.on_forward(self.boundary, self.length, self.length + rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        q = self.rotary(q, start, layer)
        k = self.rotary(k, start, layer)
        end = start + len(q)
        show = partial(self.notify, layer)
        place = self.layers[layer]
        place.append(k, v, start, self.boundary)
        return place.attend(q, end, self.boundary, show)

    def crop(self, length: int) -> None:
        self._notify_advance(min(self.length, length))  # one of them may refuse
        super().crop(length)
        # a tail that would start past the end is empty
        self.boundary = min(self.boundary, self.length)

    def truncate(self, length: int) -> None:
        """Let only the first `length` tokens count, however few: another text goes on from there.

        Followers begin anew with the next pass. It is a prefill, unless the cache `is_block_aligned`.
        """
        self._notify_advance(0)
        super().crop(length)
        if self.length < self.boundary:
            self.boundary = self.length
            for layer in self.layers:
                layer.truncate(self.length)

    @property
    def is_block_aligned(self) -> bool:
        """Return whether the boundary is where passes may leave it."""
        return self.boundary % self.shape.block == 0

    def advance(self, rows: int) -> None:
        super().advance(rows)
        self._notify_advance(self.length)

    def notify(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        """Show the followers what a layer attends with, and to what (`Follower.observe`)."""
        for follower in self.observers:
            follower.on_attention(layer, head, q, prefix, recent)

    def _notify_advance(self, length: int) -> None:
        for follower in self.observers:
            follower.on_advance(length)

    def _move_boundary(self) -> None:
        """Move the boundary as far as it may go; what it passes goes where prefixes are."""
        count = self.shape.boundary(self.length) - self.boundary
        if count <= 0:
            return
        tickets = [layer.offload_block(self.boundary, count) for layer in self.layers]
        written = [ticket for ticket in tickets if ticket is not None]
        if written:  # copies keep order; the tails are about to be written again
            self.link.wait(written[-1])
        self.boundary += count
        rest = self.length - self.boundary
        for layer in self.layers:
            layer.shift_tail(count, rest)
