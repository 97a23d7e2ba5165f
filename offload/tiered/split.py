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
from offload.attention.head_major import attend_to, span
from offload.codec.format import SPLIT_TOKENS
from offload.codec.outliers import Outliers
from offload.codec.split_float import Offsets, SliceCodec
from offload.kernels.selection import fused_kernels
from offload.memory.link import Link, by_head
from offload.memory.transfer_ring import TransferRing
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import Excerpt
from offload.tiered.layer import show_nobody
from offload.tiered.offloaded import StreamedLayer
from offload.tiered.shape import TieredShape
from offload.traffic import Traffic


@dataclass
class Coding:
    """How a layer is cut, and what the device keeps of its prefix."""

    codec: SliceCodec
    outliers: Outliers
    codes: Tensor | None  # (2, Hkv, capacity, D) uint8; None: they are on the host
    late_codes: tuple[int, ...] | None = None  # their shape while they are still to come
    kernels: ModuleType | None = None  # `offload.kernels.split_float`, where they can be used
    offsets: Offsets | None = None  # by the text's first tokens
    table: Tensor | None = None  # these (2, Hkv) int32 on the device

    @classmethod
    def of(cls, shape: TieredShape, device: torch.device, on_device: bool, late: bool) -> Coding:
        """Allocate for one layer of a cache of this shape, but for codes that come late."""
        assert shape.format is not None
        outliers = Outliers(shape.outliers, shape.layout.heads, device)
        buffer = shape.planes_buffer(shape.format.code_planes)
        codes = None
        if on_device and not late:
            codes = torch.empty(buffer, dtype=torch.uint8, device=device)
        layout = shape.layout
        kernels, _ = fused_kernels(device.type, layout.dtype, layout.head_dim, layout.groups)
        late_codes = buffer if late else None
        return cls(SliceCodec(shape.format), outliers, codes, late_codes, kernels)

    def take_room(self, device: torch.device) -> Tensor:
        """Return memory on the device for codes that come late, which from now on it has.

        Raises torch.OutOfMemoryError.
        """
        assert self.late_codes is not None
        with torch.inference_mode(False):  # a link writes to it from outside
            self.codes = torch.empty(self.late_codes, dtype=torch.uint8, device=device)
        self.late_codes = None
        return self.codes

    @property
    def nbytes(self) -> int:
        codes = 0 if self.codes is None else self.codes.nbytes
        return codes + self.outliers.nbytes

    def packed_on_host(self) -> Coding:
        """Return what joins elements on the host, whose codes are there too, as they stand."""
        return replace(
            self,
            outliers=self.outliers.on_host(),
            codes=None,
            late_codes=None,
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
        self.outliers.put(kv, outliers, at)
        if self.codes is None:
            return torch.cat((codes, lows))
        span(self.codes, at, at + kv.shape[2]).copy_(codes)
        return lows

    def exact(self, planes: Tensor, head: int, out: Tensor) -> None:
        """Write the elements of heads from `head` on to the first tokens of out.

        planes (P, h, N, D) are what the host keeps of them; out is (2, h, capacity, D).
        """
        heads, tokens = planes.shape[1:3]
        codes, lows = planes[:2], planes[2:]
        if self.codes is not None:
            codes, lows = span(self.codes[:, head : head + heads], 0, tokens), planes
        self._join(codes, lows, head, span(out, 0, tokens))
        self.outliers.apply(out, head, heads)

    def near(self, head: int, out: Tensor) -> None:
        """Write to out (2, h, N, D) what the codes of the heads from `head` on stand for."""
        assert self.codes is not None
        heads, tokens = out.shape[1:3]
        codes = span(self.codes[:, head : head + heads], 0, tokens)
        self.codec.join(codes, None, self._offsets_of(head, heads), out)

    def attend(self, q: Tensor, tokens: int) -> Partial:
        """Return the attention of q to what the codes of the first tokens stand for."""
        assert self.kernels is not None
        assert self.codes is not None
        return self.kernels.attend(self.codec.format, q, span(self.codes, 0, tokens), self.table)

    def _join(self, codes: Tensor, lows: Tensor, head: int, out: Tensor) -> None:
        """Write to out (2, h, N, D) the elements of the heads from `head` on."""
        heads = out.shape[1]
        if self.kernels is None:
            self.codec.join(codes, lows, self._offsets_of(head, heads), out)
            return
        assert self.table is not None
        table = self.table[:, head : head + heads]
        self.kernels.join(self.codec.format, codes, lows, table, out)

    def _offsets_of(self, head: int, heads: int) -> Offsets:
        assert self.offsets is not None
        return [each[head : head + heads] for each in self.offsets]


class Outbox:
    """Buffers on the device, in turns, from which the link takes slices to the host."""

    def __init__(self, shape: TieredShape, link: Link):
        self._link = link
        buffers = torch.empty(shape.outbox_buffer, dtype=torch.uint8, device=link.device)
        self._free: deque[tuple[Tensor, Any]] = deque((buffer, None) for buffer in buffers)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _ in self._free)

    def write(self, kv: Tensor, coding: Coding, host: HostLayer, at: int) -> Any:
        """Split kv (2, Hkv, T, D), the tokens from `at` on, and start writing slices to the host.

        Returns the last ticket; None where there are no tokens.
        """
        ticket = None
        for start in range(0, kv.shape[2], SPLIT_TOKENS):
            planes = coding.split(span(kv, start, start + SPLIT_TOKENS), at + start)
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


class SlicedLayer(StreamedLayer):
    """A far layer in slices, with its codes on the device or, packed, on the host too.

    A pass joins codes with the low bits that come over the link: it attends to the very elements.
    """

    def __init__(
        self,
        host: HostLayer,
        tail: Tensor,
        ring: TransferRing,
        joined: Tensor,
        traffic: Traffic,
        coding: Coding,
        outbox: Outbox,
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

    is_cut = True

    @property
    def is_late(self) -> bool:  # type: ignore[override]
        return self._coding.late_codes is not None

    @property
    def is_near(self) -> bool:  # type: ignore[override]
        return self._coding.codes is not None

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self._coding.nbytes

    def attend_near(self, q: Tensor, end: int, boundary: int, traffic: Traffic) -> Tensor:
        coding = self._coding
        if coding.kernels is None or not boundary:
            return self._attend(q, end, boundary, self._near, show_nobody, traffic)
        recent = attend_to(self._tail.kv, q, end - boundary, traffic)
        assert coding.codes is not None
        traffic.attended += span(coding.codes, 0, boundary).numel()
        return merge([coding.attend(q, boundary), recent])[0]

    def write_back(self, boundary: int, count: int) -> Any:
        return self._outbox.write(self._tail.tokens(count), self._coding, self._host, boundary)

    def keep(self, kv: Tensor, start: int, boundary: int) -> Any:
        prefix = self._tail.store(kv, start, boundary)
        self._outbox.write(prefix, self._coding, self._host, start)
        return None  # what is copied is not kv

    def finish_reading(self) -> None:
        self._coding.outliers.put_in_order()

    def recall(self, kv: Tensor, length: int, boundary: int) -> Any:
        self._tail.load(kv, length, boundary)
        if not boundary:
            return None
        head = 0
        for chunk in self._host.chunks(boundary, self._slot_heads):
            last = head + chunk.shape[1]
            self._coding.exact(self._fetched(chunk), head, kv[:, head:last])
            head = last
        return None  # all of it is there

    def excerpt(self, length: int, boundary: int, link: Link) -> Excerpt:
        recent = self._tail.copy_to_host(length - boundary, link)
        stored = span(self._host.kv, 0, boundary)
        codes = self._coding.codes
        coding = self._coding.packed_on_host()

        def whole(head: int) -> Tensor:
            planes = stored[:, head : head + 1]
            if codes is not None:
                near = link.fetch(span(codes[:, head : head + 1], 0, boundary))
                planes = torch.cat((near, planes))
            prefix = torch.empty((2, *planes.shape[1:]), dtype=recent.dtype)
            if boundary:
                coding.exact(planes, head, prefix)
            return torch.cat((prefix[:, 0], recent[:, head]), dim=1)

        last_head = lru_cache(maxsize=1)(whole)
        return lambda head, start, end: span(last_head(head), start, end)

    def bring_in(self, length: int, boundary: int) -> None:
        host = self._host
        codes = self._coding.take_room(host.link.device)
        on_host, rest = host.kv.tensor_split([len(codes)])
        HostLayer(on_host, host.link, self._traffic).read(span(codes, 0, boundary))
        self._host = HostLayer(rest, host.link, self._traffic)

    def forget(self, length: int) -> None:
        self._coding.outliers.forget(length, self._tail.kv.shape[-1])

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
        link.wait(link.copy(by_head(planes, chunk)))
        return planes

    def _prefix(self, head: int, boundary: int) -> Tensor:
        planes = super()._prefix(head, boundary)
        out = self._joined[:, : planes.shape[1]]
        self._coding.exact(planes, head, out)
        return span(out, 0, boundary)

    def _near(self, head: int, boundary: int) -> Tensor:
        """Return what the codes of the next heads stand for."""
        heads = min(self._slot_heads, self._tail.kv.shape[1] - head)
        out = span(self._joined[:, :heads], 0, boundary)
        self._coding.near(head, out)
        return out
