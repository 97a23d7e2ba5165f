"""Layers whose prefix is kept in slices: codes near, and the bits that they lack on the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from offload.attention.folding import Partial, merge
from offload.attention.head_major import attend_prefix, token_slice
from offload.codec.format import SPLIT_TOKENS
from offload.codec.outliers import Outliers
from offload.codec.split_float import Offsets, SplitFloatCodec
from offload.kernels.selection import split_kernels
from offload.memory.link import Link, copies_by_head
from offload.memory.transfer_ring import TransferRing
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader
from offload.tiered.layer import notify_none
from offload.tiered.offloaded import OffloadedLayer
from offload.tiered.shape import TieredCacheSpec
from offload.traffic import ByteCounters


@dataclass
class SplitKV:
    """How a layer is cut, and what the device keeps of its prefix."""

    codec: SplitFloatCodec
    outliers: Outliers
    codes: Tensor | None  # (2, Hkv, capacity, D) uint8; None: they are on the host
    deferred_codes: tuple[int, ...] | None = None  # their shape while they are still to come
    kernels: ModuleType | None = None  # `offload.kernels.split_float`, where they can be used
    offsets: Offsets | None = None  # by the text's first tokens
    table: Tensor | None = None  # these (2, Hkv) int32 on the device

    @classmethod
    def allocate(
        cls,
        shape: TieredCacheSpec,
        device: torch.device,
        ints_to_device_async: bool,
        deferred: bool,
    ) -> SplitKV:
        """Allocate for one layer of a cache of this shape, but for codes that come late."""
        assert shape.format is not None
        outliers = Outliers(shape.outliers, shape.layout.heads, device)
        buffer = shape.planes_shape(shape.format.high_planes)
        codes = None
        if ints_to_device_async and not deferred:
            codes = torch.empty(buffer, dtype=torch.uint8, device=device)
        layout = shape.layout
        kernels, _ = split_kernels(device.type, layout.dtype, layout.head_dim, layout.groups)
        deferred_codes = buffer if deferred else None
        return cls(SplitFloatCodec(shape.format), outliers, codes, deferred_codes, kernels)

    def allocate_deferred(self, device: torch.device) -> Tensor:
        """Return memory on the device for codes that come late, which from now on it has.

        Raises torch.OutOfMemoryError.
        """
        assert self.deferred_codes is not None
        with torch.inference_mode(False):  # a link writes to it from outside
            self.codes = torch.empty(self.deferred_codes, dtype=torch.uint8, device=device)
        self.deferred_codes = None
        return self.codes

    @property
    def nbytes(self) -> int:
        codes = 0 if self.codes is None else self.codes.nbytes
        return codes + self.outliers.nbytes

    def host_copy(self) -> SplitKV:
        """Return what joins elements on the host, whose codes are there too, as they stand."""
        return replace(
            self,
            outliers=self.outliers.to_host(),
            codes=None,
            deferred_codes=None,
            kernels=None,
            table=None,
        )

    def split(self, kv: Tensor, at: int) -> Tensor:
        """Keep of kv (2, Hkv, T, D), the tokens from `at` on, what the device keeps.

        Returns the planes (P, Hkv, T, D) that the host is to keep.
        """
        if self.offsets is None:
            self.offsets = self.codec.offsets(kv)
            if self.kernels is not None:
                self.table = torch.tensor(self.offsets, dtype=torch.int32, device=kv.device)
        offsets = self.offsets if self.table is None else self.table
        codes, lows, outliers = self.codec.split(kv, offsets)
        self.outliers.append(kv, outliers, at)
        if self.codes is None:
            return torch.cat((codes, lows))
        token_slice(self.codes, at, at + kv.shape[2]).copy_(codes)
        return lows

    def reconstruct(self, planes: Tensor, head: int, out: Tensor) -> None:
        """Write the elements of heads from `head` on to the first tokens of out.

        planes (P, h, N, D) are what the host keeps of them; out is (2, h, capacity, D).
        """
        heads, tokens = planes.shape[1:3]
        codes, lows = planes[:2], planes[2:]
        if self.codes is not None:
            codes, lows = token_slice(self.codes[:, head : head + heads], 0, tokens), planes
        self._reconstruct_block(codes, lows, head, token_slice(out, 0, tokens))
        self.outliers.apply(out, head, heads)

    def decode_high(self, head: int, out: Tensor) -> None:
        """Write to out (2, h, N, D) what the codes of the heads from `head` on stand for."""
        assert self.codes is not None
        heads, tokens = out.shape[1:3]
        codes = token_slice(self.codes[:, head : head + heads], 0, tokens)
        self.codec.reconstruct(codes, None, self._offsets_of(head, heads), out)

    def attend(self, q: Tensor, tokens: int) -> Partial:
        """Return the attention of q to what the codes of the first tokens stand for."""
        assert self.kernels is not None
        assert self.codes is not None
        return self.kernels.attend(
            self.codec.format, q, token_slice(self.codes, 0, tokens), self.table
        )

    def _reconstruct_block(self, codes: Tensor, lows: Tensor, head: int, out: Tensor) -> None:
        """Write to out (2, h, N, D) the elements of the heads from `head` on."""
        heads = out.shape[1]
        if self.kernels is None:
            self.codec.reconstruct(codes, lows, self._offsets_of(head, heads), out)
            return
        assert self.table is not None
        table = self.table[:, head : head + heads]
        self.kernels.reconstruct(self.codec.format, codes, lows, table, out)

    def _offsets_of(self, head: int, heads: int) -> Offsets:
        assert self.offsets is not None
        return [each[head : head + heads] for each in self.offsets]


class WritebackBuffers:
    """Buffers on the device, in turns, from which the link takes slices to the host."""

    def __init__(self, shape: TieredCacheSpec, link: Link):
        self._link = link
        buffers = torch.empty(shape.writeback_shape, dtype=torch.uint8, device=link.device)
        self._free: deque[tuple[Tensor, Any]] = deque((buffer, None) for buffer in buffers)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _ in self._free)

    def write(self, kv: Tensor, coding: SplitKV, host: HostLayer, at: int) -> Any:
        """Split kv (2, Hkv, T, D), the tokens from `at` on, and start writing slices to the host.

        Returns the last ticket; None where there are no tokens.
        """
        ticket = None
        for start in range(0, kv.shape[2], SPLIT_TOKENS):
            planes = coding.split(token_slice(kv, start, start + SPLIT_TOKENS), at + start)
            ticket = self._send(planes, host, at + start)
        return ticket

    def _send(self, planes: Tensor, host: HostLayer, at: int) -> Any:
        """Start writing planes (P, Hkv, T, D) to the host, from slot `at` on; return the ticket."""
        buffer, ticket = self._free.popleft()
        if ticket is not None:
            self._link.wait(ticket)
        copied = buffer[: planes.numel()].view(planes.shape)
        copied.copy_(planes)
        ticket = host.write(copied, at)
        self._free.append((buffer, ticket))
        return ticket


class SplitLayer(OffloadedLayer):
    """A far layer in slices, with its codes on the device or, packed, on the host too.

    A pass joins codes with the low bits that come over the link: it attends to the very elements.
    """

    def __init__(
        self,
        host: HostLayer,
        tail: Tensor,
        ring: TransferRing,
        joined: Tensor,
        traffic: ByteCounters,
        coding: SplitKV,
        outbox: WritebackBuffers,
    ):
        """Keep in `host` what is not on the device.

        Args:
            host: planes (P, Hkv, capacity, D) of bytes: low bits and, packed, codes before them.
            tail: as of any far layer.
            ring: likewise.
            joined: (2, slot_heads, capacity, D), which all layers in slices share.
            traffic: of the cache.
            coding: of this layer alone.
            outbox: of all layers.
        """
        super().__init__(host, tail, ring, joined.shape[1], traffic)
        self._joined = joined
        self._coding = coding
        self._outbox = outbox

    is_split = True

    @property
    def is_deferred(self) -> bool:  # type: ignore[override]
        return self._coding.deferred_codes is not None

    @property
    def is_on_device(self) -> bool:  # type: ignore[override]
        return self._coding.codes is not None

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self._coding.nbytes

    def attend_on_device(self, q: Tensor, end: int, boundary: int, traffic: ByteCounters) -> Tensor:
        coding = self._coding
        if coding.kernels is None or not boundary:
            return self._attend(q, end, boundary, self._near, notify_none, traffic)
        recent = attend_prefix(self._tail.kv, q, end - boundary, traffic)
        assert coding.codes is not None
        traffic.attended += token_slice(coding.codes, 0, boundary).numel()
        return merge([coding.attend(q, boundary), recent])[0]

    def offload_block(self, boundary: int, count: int) -> Any:
        return self._outbox.write(self._tail.tokens(count), self._coding, self._host, boundary)

    def store(self, kv: Tensor, start: int, boundary: int) -> Any:
        prefix = self._tail.store(kv, start, boundary)
        self._outbox.write(prefix, self._coding, self._host, start)
        return None  # what is copied is not kv

    def finish_prefill(self) -> None:
        self._coding.outliers.sort()

    def load(self, kv: Tensor, length: int, boundary: int) -> Any:
        self._tail.load(kv, length, boundary)
        if not boundary:
            return None
        head = 0
        for chunk in self._host.chunks(boundary, self._slot_heads):
            last = head + chunk.shape[1]
            self._coding.reconstruct(self._fetched(chunk), head, kv[:, head:last])
            head = last
        return None  # all of it is there

    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        recent = self._tail.copy_to_host(length - boundary, link)
        stored = token_slice(self._host.kv, 0, boundary)
        codes = self._coding.codes
        coding = self._coding.host_copy()

        def whole(head: int) -> Tensor:
            planes = stored[:, head : head + 1]
            if codes is not None:
                near = link.read_to_host(token_slice(codes[:, head : head + 1], 0, boundary))
                planes = torch.cat((near, planes))
            prefix = torch.empty((2, *planes.shape[1:]), dtype=recent.dtype)
            if boundary:
                coding.reconstruct(planes, head, prefix)
            return torch.cat((prefix[:, 0], recent[:, head]), dim=1)

        last_head = lru_cache(maxsize=1)(whole)
        return lambda head, start, end: token_slice(last_head(head), start, end)

    def onload_deferred(self, length: int, boundary: int) -> None:
        host = self._host
        codes = self._coding.allocate_deferred(host.link.device)
        on_host, rest = host.kv.tensor_split([len(codes)])
        HostLayer(on_host, host.link, self._traffic).read(token_slice(codes, 0, boundary))
        self._host = HostLayer(rest, host.link, self._traffic)

    def truncate(self, length: int) -> None:
        self._coding.outliers.truncate(length, self._tail.kv.shape[-1])

    def _fetched(self, chunk: Tensor) -> Tensor:
        """Return planes (P, h, N, D) of the host on the device, good until the next call.

        They lie where slices are joined else.
        """
        link = self._host.link
        if not link.copies:
            return chunk
        self._traffic.link_in += chunk.nbytes
        with torch.inference_mode(False):  # a link writes to it from outside
            memory = self._joined.view(-1).view(torch.uint8)
            planes = memory[: chunk.numel()].view(chunk.shape)
        link.wait(link.copy(copies_by_head(planes, chunk)))
        return planes

    def _prefix(self, head: int, boundary: int) -> Tensor:
        planes = super()._prefix(head, boundary)
        out = self._joined[:, : planes.shape[1]]
        self._coding.reconstruct(planes, head, out)
        return token_slice(out, 0, boundary)

    def _near(self, head: int, boundary: int) -> Tensor:
        """Return what the codes of the next heads stand for."""
        heads = min(self._slot_heads, self._tail.kv.shape[1] - head)
        out = token_slice(self._joined[:, :heads], 0, boundary)
        self._coding.decode_high(head, out)
        return out
