"""Layers with a split prefix: high bytes on the device, the remaining low bits on the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.head_major import attend_prefix, token_slice
from offload.codec.format import PLAIN_SPLIT_TOKENS, SPLIT_TOKENS
from offload.codec.outliers import Outliers
from offload.codec.selected_keys import SelectedKeys
from offload.codec.split_float import Offsets, SplitFloatCodec
from offload.kernels.group_attention import FAST
from offload.kernels.selection import split_kernels
from offload.memory.link import Link, copies_by_head
from offload.memory.transfer_ring import TransferRing
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader
from offload.tiered.layer import attend_groups
from offload.tiered.offloaded import OffloadedLayer
from offload.tiered.shape import SPLIT, LayerSpec
from offload.traffic import ByteCounters


@dataclass
class SplitKV:
    """The split format of one layer, and the device's part of its prefix."""

    codec: SplitFloatCodec
    outliers: Outliers
    high_bytes: Tensor | None  # (2, Hkv, capacity, D) uint8; None if on the host
    deferred_shape: tuple[int, ...] | None = None  # shape of high bytes yet to be loaded
    kernels: ModuleType | None = None  # `offload.kernels.split_float`, if supported
    offsets: Offsets | None = None  # from the first tokens of the sequence
    device_offsets: Tensor | None = None  # (2, Hkv) int32

    @classmethod
    def allocate(
        cls,
        spec: LayerSpec,
        link: Link,
    ) -> SplitKV:
        """Allocate the memory of one layer, except for deferred high bytes."""
        assert spec.format is not None
        layout, device = spec.layout, link.device
        outliers = Outliers(spec.outliers, layout.heads, device, link.read_later)
        buffer = spec.planes_shape(spec.format.high_planes)
        high_bytes = None
        if spec.kind == SPLIT and not spec.deferred:
            high_bytes = torch.empty(buffer, dtype=torch.uint8, device=device)
        kernels, _ = split_kernels(device.type, layout.dtype, layout.head_dim, layout.groups)
        deferred_shape = buffer if spec.deferred else None
        return cls(SplitFloatCodec(spec.format), outliers, high_bytes, deferred_shape, kernels)

    def allocate_deferred(self, device: torch.device) -> Tensor:
        """Allocate and return the device memory of deferred high bytes.

        Raises torch.OutOfMemoryError.
        """
        assert self.deferred_shape is not None
        with torch.inference_mode(False):  # a link's copies write to it
            self.high_bytes = torch.empty(self.deferred_shape, dtype=torch.uint8, device=device)
        self.deferred_shape = None
        return self.high_bytes

    @property
    def nbytes(self) -> int:
        high_bytes = 0 if self.high_bytes is None else self.high_bytes.nbytes
        return high_bytes + self.outliers.nbytes

    def host_copy(self) -> SplitKV:
        """Return a copy that reconstructs elements on the host, from planes with high bytes."""
        return replace(
            self,
            outliers=self.outliers.to_host(),
            high_bytes=None,
            deferred_shape=None,
            kernels=None,
            device_offsets=None,
        )

    def split(self, kv: Tensor, at: int) -> Tensor:
        """Split kv (2, Hkv, T, D), the tokens from `at` on, and store the device's part.

        Returns the planes (P, Hkv, T, D) to be stored on the host.
        """
        if self.offsets is None:
            self.offsets = self.codec.offsets(kv)
            if self.kernels is not None:
                self.device_offsets = torch.tensor(
                    self.offsets, dtype=torch.int32, device=kv.device
                )
        offsets = self.offsets if self.device_offsets is None else self.device_offsets
        if self.kernels is None:
            high_bytes, lows, outliers = self.codec.split(kv, offsets)
        else:
            high_bytes, lows, outliers = self.kernels.split(self.codec.format, kv, offsets)
        self.outliers.append(kv, outliers, at)
        if self.high_bytes is None:
            return torch.cat((high_bytes, lows))
        token_slice(self.high_bytes, at, at + kv.shape[2]).copy_(high_bytes)
        return lows

    def reconstruct(self, planes: Tensor, head: int, out: Tensor) -> None:
        """Reconstruct the heads from `head` on into the first tokens of out.

        planes (P, h, N, D) are the host's part of them; out is (2, h, capacity, D).
        """
        heads, tokens = planes.shape[1:3]
        high, lows = planes[:2], planes[2:]
        if self.high_bytes is not None:
            high, lows = token_slice(self.high_bytes[:, head : head + heads], 0, tokens), planes
        self._reconstruct_block(high, lows, head, token_slice(out, 0, tokens))
        self.outliers.apply(out, head, heads, self.kernels)

    def decode_high(self, head: int, out: Tensor) -> None:
        """Write to out (2, h, N, D) the values of the high bytes of the heads from `head` on."""
        assert self.high_bytes is not None
        heads, tokens = out.shape[1:3]
        high_bytes = token_slice(self.high_bytes[:, head : head + heads], 0, tokens)
        self.codec.reconstruct(high_bytes, None, self._head_offsets(head, heads), out)

    def attend(
        self, q: Tensor, tokens: int, recent: Partial, selected: SelectedKeys | None = None
    ) -> Partial:
        """Return the attention of q to the values of the first tokens' high bytes, and `recent`.

        Keys that are `selected` are exact.
        """
        assert self.kernels is not None
        assert self.high_bytes is not None
        high_bytes = token_slice(self.high_bytes, 0, tokens)
        format, offsets = self.codec.format, self.device_offsets
        attended: Partial = self.kernels.attend(format, q, high_bytes, offsets, recent, selected)
        return attended

    def _reconstruct_block(self, high_bytes: Tensor, lows: Tensor, head: int, out: Tensor) -> None:
        """Write to out (2, h, N, D) the elements of the heads from `head` on."""
        heads = out.shape[1]
        if self.kernels is None:
            self.codec.reconstruct(high_bytes, lows, self._head_offsets(head, heads), out)
            return
        assert self.device_offsets is not None
        device_offsets = self.device_offsets[:, head : head + heads]
        self.kernels.reconstruct(self.codec.format, high_bytes, lows, device_offsets, out)

    def _head_offsets(self, head: int, heads: int) -> Offsets:
        assert self.offsets is not None
        return [offsets[head : head + heads] for offsets in self.offsets]


class _Staged(NamedTuple):
    """Planes of a layer in a writeback buffer, not written to the host yet."""

    host: HostLayer
    planes: Tensor  # (P, Hkv, room, D)
    at: int  # position of the first token
    tokens: int


class WritebackBuffers:
    """Alternating device buffers from which the link copies byte planes to the host.

    Planes of one layer are gathered until a buffer is full: short copies are slow.
    """

    def __init__(self, shape: tuple[int, int], link: Link):
        """Allocate buffers of this shape (2, bytes)."""
        self._link = link
        buffers = torch.empty(shape, dtype=torch.uint8, device=link.device)
        self._free: deque[tuple[Tensor, Any]] = deque((buffer, None) for buffer in buffers)
        self._staged: _Staged | None = None  # in the first of them

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _ in self._free)

    def write(self, kv: Tensor, split_kv: SplitKV, host: HostLayer, at: int) -> None:
        """Split kv (2, Hkv, T, D), the tokens from `at` on, and start writing planes to the host.

        The last of them only start with `flush`.
        """
        step = PLAIN_SPLIT_TOKENS if split_kv.kernels is None else SPLIT_TOKENS
        for start in range(0, kv.shape[2], step):
            block = token_slice(kv, start, start + step)
            self._stage(split_kv.split(block, at + start), host, at + start)

    def flush(self) -> Any:
        """Start writing what is left; return the ticket of that, None if there is nothing."""
        if self._staged is None:
            return None
        host, planes, at, tokens = self._staged
        self._staged = None
        buffer, _ = self._free.popleft()
        ticket = host.write(token_slice(planes, 0, tokens), at)
        self._free.append((buffer, ticket))
        return ticket

    def _stage(self, planes: Tensor, host: HostLayer, at: int) -> None:
        """Copy planes (P, Hkv, T, D) of the tokens from `at` on to a buffer."""
        staged, count = self._staged, planes.shape[2]
        if (
            staged is None
            or staged.host is not host
            or staged.at + staged.tokens != at
            or staged.tokens + count > staged.planes.shape[2]
        ):
            self.flush()
            staged = self._begin(planes, host, at)
        end = staged.tokens + count
        token_slice(staged.planes, staged.tokens, end).copy_(planes)
        self._staged = staged._replace(tokens=end)

    def _begin(self, planes: Tensor, host: HostLayer, at: int) -> _Staged:
        """Return a buffer without tokens, for planes like these (P, Hkv, T, D)."""
        buffer, ticket = self._free[0]
        if ticket is not None:
            self._link.wait(ticket)
        count, heads, _, dim = planes.shape
        room = len(buffer) // (count * heads * dim)
        whole = buffer[: count * heads * room * dim].view(count, heads, room, dim)
        return _Staged(host, whole, at, 0)


class SplitLayer(OffloadedLayer):
    """An offloaded split layer; its high bytes are on the device or, compressed, on the host too.

    A forward reconstructs the exact elements from the high bytes and the streamed low bits.
    """

    def __init__(
        self,
        host: HostLayer,
        tail: Tensor,
        ring: TransferRing,
        reconstruct_buffer: Tensor,
        traffic: ByteCounters,
        split_kv: SplitKV,
        writeback: WritebackBuffers,
    ):
        """Keep in `host` what is not on the device.

        Args:
            host: byte planes (P, Hkv, capacity, D): low bits, if compressed after the high bytes.
            tail: as in `OffloadedLayer`.
            ring: as in `OffloadedLayer`.
            reconstruct_buffer: (2, slot_heads, capacity, D), shared by all split layers.
            traffic: the cache's counters.
            split_kv: this layer's own.
            writeback: shared by all split layers.
        """
        super().__init__(host, tail, ring, reconstruct_buffer.shape[1], traffic)
        self._reconstruct_buffer = reconstruct_buffer
        self._split_kv = split_kv
        self._writeback = writeback

    is_split = True

    @property
    def is_deferred(self) -> bool:  # type: ignore[override]
        return self._split_kv.deferred_shape is not None

    @property
    def is_on_device(self) -> bool:  # type: ignore[override]
        return self._split_kv.high_bytes is not None

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self._split_kv.nbytes

    def attend_on_device(
        self,
        q: Tensor,
        end: int,
        boundary: int,
        traffic: ByteCounters,
        selected: SelectedKeys | None = None,
    ) -> Partial:
        """As of `TieredLayer`; `selected` keys of the prefix are exact."""
        split_kv = self._split_kv
        if selected is not None:
            traffic.attended += selected.nbytes
        if split_kv.kernels is None or not boundary:
            decoded = partial(self._decoded_prefix, selected=selected)
            return attend_groups(q, self._groups(end, boundary, decoded), FAST, traffic)
        recent = attend_prefix(self._tail.kv, q, end - boundary, traffic)
        assert split_kv.high_bytes is not None
        traffic.attended += token_slice(split_kv.high_bytes, 0, boundary).numel()
        return split_kv.attend(q, boundary, recent, selected)

    def offload_block(self, boundary: int, count: int) -> Any:
        self._writeback.write(self._tail.tokens(count), self._split_kv, self._host, boundary)
        return self._writeback.flush()

    def store(self, kv: Tensor, start: int, boundary: int) -> Any:
        prefix = self._tail.store(kv, start, boundary)
        self._writeback.write(prefix, self._split_kv, self._host, start)
        return None  # the copies read other buffers than kv; for the rest see `finish_store`

    def finish_store(self) -> None:
        self._writeback.flush()
        self._split_kv.outliers.sort()

    def load(self, kv: Tensor, length: int, boundary: int) -> Any:
        self._tail.load(kv, length, boundary)
        if not boundary:
            return None
        head = 0
        for chunk in self._host.chunks(boundary, self._slot_heads):
            last = head + chunk.shape[1]
            self._split_kv.reconstruct(self._planes_on_device(chunk), head, kv[:, head:last])
            head = last
        return None  # the prefix is in kv already

    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        recent = self._tail.copy_to_host(length - boundary, link)
        stored = token_slice(self._host.kv, 0, boundary)
        high_bytes = self._split_kv.high_bytes
        split_kv = self._split_kv.host_copy()

        def read_head(head: int) -> Tensor:
            planes = stored[:, head : head + 1]
            if high_bytes is not None:
                high = link.read_to_host(token_slice(high_bytes[:, head : head + 1], 0, boundary))
                planes = torch.cat((high, planes))
            prefix = torch.empty((2, *planes.shape[1:]), dtype=recent.dtype)
            if boundary:
                split_kv.reconstruct(planes, head, prefix)
            return torch.cat((prefix[:, 0], recent[:, head]), dim=1)

        cached_head = lru_cache(maxsize=1)(read_head)
        return HostReader(lambda head, start, end: token_slice(cached_head(head), start, end))

    def onload_deferred(self, length: int, boundary: int) -> None:
        host = self._host
        high_bytes = self._split_kv.allocate_deferred(host.link.device)
        on_host, rest = host.kv.tensor_split([len(high_bytes)])
        HostLayer(on_host, host.link, self._traffic).read(token_slice(high_bytes, 0, boundary))
        self._host = HostLayer(rest, host.link, self._traffic)

    def truncate(self, length: int) -> None:
        self._split_kv.outliers.truncate(length, self._tail.kv.shape[-1])

    def _planes_on_device(self, chunk: Tensor) -> Tensor:
        """Return the host's planes (P, h, N, D) on the device, valid until the next call.

        They are copied to the reconstruction buffer.
        """
        link = self._host.link
        if not link.copies:
            return chunk
        self._traffic.link_in += chunk.nbytes
        with torch.inference_mode(False):  # a link's copies write to it
            memory = self._reconstruct_buffer.view(-1).view(torch.uint8)
            planes = memory[: chunk.numel()].view(chunk.shape)
        link.wait(link.copy(copies_by_head(planes, chunk)))
        return planes

    def _prefix(self, head: int, boundary: int) -> Tensor:
        planes = super()._prefix(head, boundary)
        out = self._reconstruct_buffer[:, : planes.shape[1]]
        self._split_kv.reconstruct(planes, head, out)
        return token_slice(out, 0, boundary)

    def _decoded_prefix(
        self, head: int, boundary: int, selected: SelectedKeys | None = None
    ) -> Tensor:
        """Return the values of the next heads' high bytes, with exact keys if they are selected."""
        heads = min(self._slot_heads, self._tail.kv.shape[1] - head)
        out = token_slice(self._reconstruct_buffer[:, :heads], 0, boundary)
        self._split_kv.decode_high(head, out)
        if selected is not None:
            selected.complete(out[0], head)
        return out
