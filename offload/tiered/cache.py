"""The target's KV cache: some layers on the device; of the others, the prefix is in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.cache.base import AttentionObserver, Cache
from offload.codec.format import SPLIT_TOKENS, UNREAD_BLOCKS
from offload.errors import InsufficientMemoryError
from offload.kernels.group_attention import BATCH_INVARIANT, FAST
from offload.layout import STATE_CHUNK
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.transfer_ring import TransferRing
from offload.rotary import Rotary
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader
from offload.tiered.layer import KVGroup, TieredLayer, attend_groups
from offload.tiered.offloaded import OffloadedLayer
from offload.tiered.recurrent import RecurrentLayer, TieredStates
from offload.tiered.resident import ResidentLayer
from offload.tiered.shape import RECURRENT, RESIDENT, WINDOWED, LayerSpec, TieredCacheSpec
from offload.tiered.split import SplitKV, SplitLayer, WritebackBuffers
from offload.tiered.windowed import WindowedLayer
from offload.traffic import ByteCounters


class TieredCache(Cache):
    """Exact KV of the whole sequence in two tiers.

    `boundary` splits the tokens into a prefix and a tail; each kind of layer decides where it keeps
    either (`TieredLayer`). The boundary moves by whole blocks when a forward begins, once enough
    tokens will remain after it; offloaded layers write the tokens it moves past to the host.
    """

    _state: ClassVar[tuple[str, ...]] = ("length", "boundary", "layers")
    recurrent: TieredStates | None

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
        self.buffers = SharedMemory.allocate(shape, link)
        self.layers = _make_layers(shape, link, arena, self.buffers, self.traffic)
        recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        self.recurrent = recurrent[0].states if recurrent else None
        self.is_batch_invariant = shape.batch_invariant

    @property
    def device_bytes(self) -> int:
        states = self.recurrent.nbytes if self.recurrent is not None else 0
        layers = sum(layer.device_bytes for layer in self.layers)
        return self.buffers.shared_bytes + layers + states

    @property
    def state_tensors(self) -> list[Tensor]:
        return [self.buffers.tails]

    # -- prefill (offload.prefill.layer_major) -----------------------------------------------------

    def resumable(self, length: int) -> int:
        """Return the largest length, up to `length`, to which the sequence can be shortened.

        Layers with a window have dropped the tokens before it, and a state is that of one position.
        """
        if self.recurrent is not None:
            length = self.recurrent.resumable(length)
        for layer in self.layers:
            if isinstance(layer, WindowedLayer):  # equal for all of them
                return layer.resumable(length, self.length)
        return length

    def copyable(self, length: int) -> int:
        """Return how many of its first tokens can be copied to another cache, up to `length`."""
        length = self.resumable(length)
        return length if self.recurrent is None else self.recurrent.copyable(length)

    def check_room(self, rows: int) -> None:
        """Raise ValueError if the cache has no room for `rows` more tokens."""
        if self.length + rows > self.shape.capacity:
            raise ValueError(
                f"{self.length} tokens and {rows} more do not fit a cache of {self.shape.capacity}"
            )

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
        super().begin_forward(rows)
        unchanged = self.boundary
        self._move_boundary(rows)
        if self.buffers.ring is not None:
            chunks: list[Tensor] = []
            for layer in self.layers if self.boundary else ():
                chunks += layer.chunks(self.boundary)
            self.buffers.ring.start(chunks, unchanged)
        for observer in self.observers:
            observer.on_forward(self.boundary, self.length, self.length + rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        q, k = self.rotary.queries_and_keys(q, k, start, layer)
        end = start + len(q)
        layer_kv, boundary = self.layers[layer], self.boundary
        layer_kv.append(k, v, start, boundary)

        def observe(group: KVGroup, queries: Tensor) -> None:
            notify(self.observers, layer, group.head, queries, *group.split_at(boundary))

        observer = observe if self.observers else None
        attention = BATCH_INVARIANT if self.is_batch_invariant else FAST
        groups = layer_kv.groups(end, boundary)
        attended = attend_groups(q, groups, attention, self.traffic, observer)
        if self.buffers.ring is not None:
            self.buffers.ring.release()
        return attended

    def crop(self, length: int) -> None:
        windowed = [layer for layer in self.layers if isinstance(layer, WindowedLayer)]
        if length < self.length and not all(layer.holds_window(length) for layer in windowed):
            raise _no_window(length)
        for layer in windowed:
            layer.truncate(min(length, self.length))
        _notify_advance(self.observers, min(self.length, length))  # an observer may raise
        super().crop(length)
        # below the boundary, the tail is empty
        self.boundary = min(self.boundary, self.length)

    def truncate(self, length: int) -> None:
        """Keep only the first `length` tokens, however few; another sequence continues from there.

        Observers are reset and select again in the next forward, which must be a prefill unless the
        cache `is_block_aligned`. Raises ValueError for a length that is not `resumable`.
        """
        if self.resumable(length) < min(length, self.length):
            raise _no_window(length)
        _notify_advance(self.observers, 0)
        super().crop(length)
        if self.recurrent is not None:
            self.recurrent.truncate(self.length)
        is_cut = self.length < self.boundary or not self.length
        if is_cut:
            self.boundary = self.length
        for layer in self.layers:
            if is_cut or isinstance(layer, WindowedLayer):
                layer.truncate(self.length)

    @property
    def is_block_aligned(self) -> bool:
        """Return whether the boundary is a multiple of the block, as decoding requires."""
        return self.boundary % self.shape.block == 0

    def advance(self, rows: int) -> None:
        super().advance(rows)
        _notify_advance(self.observers, self.length)

    def _move_boundary(self, rows: int) -> None:
        """Move the boundary as far as possible, and write the tokens it moves past to the host.

        The tail keeps the `rows` tokens of a draft, too: during the forward others may be drafted
        after them (`OnDeviceCache`).
        """
        count = self.shape.boundary(self.length) - self.boundary
        if count <= 0:
            return
        tickets = []
        step = max(1, UNREAD_BLOCKS * SPLIT_TOKENS // count)  # layers: this bounds scratch memory
        for first in range(0, len(self.layers), step):
            part = self.layers[first : first + step]
            tickets += [layer.offload_block(self.boundary, count) for layer in part]
            for layer in part:
                layer.finish_store()
        pending = [ticket for ticket in tickets if ticket is not None]
        if pending:  # copies run in order; the tails are about to be overwritten
            self.link.wait(pending[-1])
        self.boundary += count
        tail_tokens = min(self.length + rows - self.boundary, self.shape.tail - count)
        for layer in self.layers:
            layer.shift_tail(self.boundary, count, tail_tokens)


@dataclass(frozen=True)
class SharedMemory:
    """The memory that a cache's layers get their parts of, or share."""

    tails: Tensor  # (offloaded layers, 2, Hkv, capacity, D)
    reconstruct: Tensor  # (2, heads, capacity, D)
    writeback: WritebackBuffers
    ring: TransferRing | None  # None without offloaded layers

    @classmethod
    def allocate(cls, shape: TieredCacheSpec, link: Link) -> SharedMemory:
        dtype, device, sizes = shape.layout.dtype, link.device, shape.buffers
        tails = torch.empty(sizes.tails, dtype=dtype, device=device)
        reconstruct = torch.empty(sizes.reconstruct, dtype=dtype, device=device)
        ring = None
        if shape.offloaded_layers:
            ring = TransferRing(link, shape.slots, sizes.slot_numel, dtype, sizes.ring_numel)
        return cls(tails, reconstruct, WritebackBuffers(sizes.writeback, link), ring)

    def staging(self, spec: TieredCacheSpec, tokens: int) -> Tensor | None:
        """Return memory (2, Hkv, tokens, D) in which prefill builds a layer's KV.

        None if every layer has a buffer of its own.
        """
        if self.ring is None or not spec.buffers.ring_numel:
            return None
        _, *shape = spec.layout.shape(1, tokens)
        return self.ring.borrow(shape)

    @property
    def shared_bytes(self) -> int:
        """Device memory that no layer counts as its own."""
        ring = self.ring.nbytes if self.ring is not None else 0
        return ring + self.reconstruct.nbytes + self.writeback.nbytes


def checkpoint_at(cache: TieredCache, position: int) -> None:
    """Let a cache keep windows and states at a position near this one, too; before its prompt.

    The sequence, or another one, may go on from there, as from multiples of a step.
    """
    if cache.recurrent is not None:
        cache.recurrent.extra = position // STATE_CHUNK * STATE_CHUNK
    for layer in cache.layers:
        if isinstance(layer, WindowedLayer):
            layer.checkpoints.extra = position


def notify(
    observers: Iterable[AttentionObserver],
    layer: int,
    head: int,
    q: Tensor,
    prefix: Tensor,
    recent: Tensor,
) -> None:
    """Notify observers of a layer's attention (`AttentionObserver.on_attention`)."""
    for observer in observers:
        observer.on_attention(layer, head, q, prefix, recent)


def _notify_advance(observers: Iterable[AttentionObserver], length: int) -> None:
    for observer in observers:
        observer.on_advance(length)


def _no_window(length: int) -> ValueError:
    return ValueError(f"cannot shorten to {length} tokens: layers have dropped their window")


def _make_layers(
    shape: TieredCacheSpec,
    link: Link,
    arena: HostArena,
    buffers: SharedMemory,
    traffic: ByteCounters,
) -> list[TieredLayer]:
    """Return a cache's layers, each with its part of the memory."""
    specs, tails = shape.layers(), iter(buffers.tails)
    numels = [spec.host_bytes // shape.layout.dtype.itemsize for spec in specs]
    hosts = arena.allocate((sum(numels),)).split(numels)
    states = _make_states(shape, specs, hosts, link, traffic)
    layers: list[TieredLayer] = []
    for index, (spec, part) in enumerate(zip(specs, hosts, strict=True)):
        if spec.kind == RECURRENT:
            assert states is not None
            layers.append(RecurrentLayer(index, states))
            continue
        if spec.kind == WINDOWED:
            checkpoints = part.view(spec.checkpoints_shape) if len(part) else None
            is_whole = spec.capacity == shape.capacity
            layers.append(WindowedLayer(spec, link, checkpoints, traffic, is_whole))
            continue
        if spec.host_planes:
            memory = part.view(torch.uint8).view(spec.planes_shape(spec.host_planes))
        else:
            memory = part.view(spec.shape) if len(part) else None
        host = None if memory is None else HostLayer(memory, link, traffic)
        if spec.kind == RESIDENT:
            layers.append(ResidentLayer(spec, link.device, traffic, host))
            continue
        assert host is not None
        assert buffers.ring is not None
        tail = next(tails)
        if spec.format is None:
            layers.append(OffloadedLayer(host, tail, buffers.ring, shape.slot_heads, traffic))
        else:
            split_kv = SplitKV.allocate(spec, link)
            shared = (buffers.ring, buffers.reconstruct, traffic)
            layers.append(SplitLayer(host, tail, *shared, split_kv, buffers.writeback))
    return layers


def _make_states(
    shape: TieredCacheSpec,
    specs: Sequence[LayerSpec],
    hosts: Sequence[Tensor],
    link: Link,
    traffic: ByteCounters,
) -> TieredStates | None:
    """Return the states of a cache's recurrent layers; None if there are none."""
    recurrent = shape.layout.recurrent
    if recurrent is None:
        return None
    kept = {layer: hosts[layer].view(specs[layer].checkpoints_shape) for layer in recurrent.layers}
    return TieredStates(recurrent, shape.forward_rows, kept, link, traffic, shape.batch_invariant)
