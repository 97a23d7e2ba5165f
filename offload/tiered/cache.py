"""The target's cache: some layers on the device, of the others the prefix in host memory."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from offload.cache.base import Cache, Follower
from offload.errors import FitError
from offload.memory.host import allocate
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.transfer_ring import TransferRing
from offload.rotary import Rotary
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import Excerpt, whole_heads
from offload.tiered.layer import TieredLayer
from offload.tiered.offloaded import StreamedLayer
from offload.tiered.resident import ResidentLayer
from offload.tiered.shape import NEAR, SLICED, TieredShape
from offload.tiered.split import Coding, Outbox, SlicedLayer


class TieredCache(Cache):
    """Exact KV of the whole sequence over two tiers.

    `boundary` splits the tokens into a prefix and recent ones. What a layer does with either is its
    own affair (`TieredLayer`). The boundary moves in whole blocks when a pass begins, once
    enough recent tokens stand behind the next one; streamed layers write to the host what it
    passes.
    """

    _state: ClassVar[tuple[str, ...]] = ("length", "boundary", "_tails")

    def __init__(self, shape: TieredShape, link: Link, rotary: Rotary, arena: HostArena):
        """Allocate everything but late layers. Raises FitError where host memory does not do."""
        super().__init__(shape.layout)
        if shape.copies != link.copies:
            raise ValueError("the shape was counted for another kind of link")
        self.shape = shape
        self.link = link
        self.rotary = rotary
        self.boundary = 0
        self.followers: list[Follower] = []
        self.host = arena.take((sum(shape.host_parts()),))  # far layers, then late ones
        dtype = shape.layout.dtype
        self._tails = torch.empty(shape.tails_buffer, dtype=dtype, device=link.device)
        self._joined = torch.empty(shape.joined_buffer, dtype=dtype, device=link.device)
        self._outbox = Outbox(shape, link)
        self._ring: TransferRing | None = None
        if shape.far_layers:
            self._ring = TransferRing(link, shape.slots, shape.slot_numel, dtype, shape.ring_numel)
        self.layers = self._make_layers()
        self.is_steady = shape.steady
        for layer in self.layers:
            layer.is_steady = shape.steady

    def _make_layers(self) -> list[TieredLayer]:
        shape = self.shape
        hosts = iter(self.host.split(shape.host_parts()))
        tails = iter(self._tails)
        far = []
        for place in shape.far_places():
            far.append(self._far_layer(place, next(tails), next(hosts)))
        early = shape.resident_layers - shape.late_resident_layers
        resident = []
        for index in range(shape.resident_layers):
            late = next(hosts) if index >= early else None
            resident.append(self._resident_layer(late))
        layers = []
        for kind in shape.kinds():
            group = resident if kind == NEAR else far
            layers.append(group.pop(0))
        return layers

    def _resident_layer(self, late: Tensor | None) -> TieredLayer:
        """Return a layer on the device, or one that comes there from this part of the host."""
        host = None
        if late is not None:
            host = HostLayer(late.view(self.shape.layer_buffer), self.link, self.traffic)
        return ResidentLayer(self.shape, self.link.device, self.traffic, host)

    def _far_layer(self, place: tuple[str, bool], tail: Tensor, part: Tensor) -> TieredLayer:
        """Return a layer with a part of the host store, and maybe with codes on the device.

        `place` is its kind, and whether its codes come late.
        """
        shape, traffic = self.shape, self.traffic
        assert self._ring is not None
        kind, late = place
        planes = shape.host_planes(kind, late)
        if not planes:
            host = HostLayer(part.view(shape.layer_buffer), self.link, traffic)
            return StreamedLayer(host, tail, self._ring, shape.slot_heads, traffic)
        assert shape.format is not None
        slices = part.view(torch.uint8).view(shape.planes_buffer(planes))
        host = HostLayer(slices, self.link, traffic)
        coding = Coding.of(shape, self.link.device, kind == SLICED, late)
        return SlicedLayer(host, tail, self._ring, self._joined, traffic, coding, self._outbox)

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
        return self._ring.lend(shape)

    def bring_in(self) -> None:
        """Bring the late layers to the device, into memory that prefill has left.

        Raises FitError where others have taken it meanwhile.
        """
        late = [layer for layer in self.layers if layer.is_late]
        for layer in late:
            try:
                layer.bring_in(self.length, self.boundary)
            except torch.OutOfMemoryError as error:
                raise FitError(
                    f"others took device memory meant for {len(late)} layers: use fewer "
                    "`resident_layers` or `sliced_layers`."
                ) from error
        if late:
            self.link.drain()

    def taken_out(self) -> list[Tensor]:
        """Return copies in host memory of what each layer holds (2, Hkv, length, D).

        For `Prefill.fill` of another cache. Raises FitError where the host has no room for them.
        """
        _, *shape = self.layout.shape(1, self.length)
        copies = []
        for excerpt in self.excerpts():
            copy = allocate(prod(shape), self.layout.dtype)
            copy = copy.view(shape)
            for piece in whole_heads(copy):
                piece.kv.copy_(excerpt(piece.head, 0, self.length))
            copies.append(copy)
        return copies

    def excerpts(self) -> list[Excerpt]:
        """Return what gives the KV of the text as it stands, by layer (`TieredLayer.excerpt`)."""
        self.link.drain()
        self.link.finish_compute()
        return [layer.excerpt(self.length, self.boundary, self.link) for layer in self.layers]

    # -- decoding ----------------------------------------------------------------------------------

    def begin(self, rows: int) -> None:
        self.check_room(rows)
        self.bring_in()
        self._move_boundary()
        if self._ring is not None and self.boundary:
            chunks: list[Tensor] = []
            for layer in self.layers:
                chunks += layer.chunks(self.boundary)
            self._ring.start(chunks)
        for follower in self.followers:
            follower.follow(self.boundary, self.length, self.length + rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        q = self.rotary(q, start, layer)
        k = self.rotary(k, start, layer)
        end = start + len(q)
        show = partial(self.show, layer)
        place = self.layers[layer]
        place.put(k, v, start, self.boundary)
        return place.attend(q, end, self.boundary, show)

    def crop(self, length: int) -> None:
        self._tell_followers(min(self.length, length))  # one of them may refuse
        super().crop(length)
        # a tail that would start past the end is empty
        self.boundary = min(self.boundary, self.length)

    def go_back(self, length: int) -> None:
        """Let only the first `length` tokens count, however few: another text goes on from there.

        Followers begin anew with the next pass. It is a prefill, unless the cache `is_in_blocks`.
        """
        self._tell_followers(0)
        super().crop(length)
        if self.length < self.boundary:
            self.boundary = self.length
            for layer in self.layers:
                layer.forget(self.length)

    @property
    def is_in_blocks(self) -> bool:
        """Return whether the boundary is where passes may leave it."""
        return self.boundary % self.shape.block == 0

    def advance(self, rows: int) -> None:
        super().advance(rows)
        self._tell_followers(self.length)

    def show(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        """Show the followers what a layer attends with, and to what (`Follower.observe`)."""
        for follower in self.followers:
            follower.observe(layer, head, q, prefix, recent)

    def _tell_followers(self, length: int) -> None:
        for follower in self.followers:
            follower.advanced(length)

    def _move_boundary(self) -> None:
        """Move the boundary as far as it may go; what it passes goes where prefixes are."""
        count = self.shape.boundary(self.length) - self.boundary
        if count <= 0:
            return
        tickets = [layer.write_back(self.boundary, count) for layer in self.layers]
        written = [ticket for ticket in tickets if ticket is not None]
        if written:  # copies keep order; the tails are about to be written again
            self.link.wait(written[-1])
        self.boundary += count
        rest = self.length - self.boundary
        for layer in self.layers:
            layer.drop(count, rest)
