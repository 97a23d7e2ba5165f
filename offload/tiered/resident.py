"""A layer of the target's cache whose KV is on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.attention.head_major import attend_to, put, span
from offload.kernels.batch_invariant_attention import steady_attention
from offload.memory.link import Copy, Link
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import Excerpt, Piece, copies_to
from offload.tiered.layer import Show, TieredLayer
from offload.tiered.shape import TieredShape
from offload.traffic import Traffic


class ResidentLayer(TieredLayer):
    """A layer in one device buffer (2, Hkv, capacity, D).

    A late one has no buffer until prefill, which takes memory for hidden states, is over: its
    prompt goes to host memory.
    """

    is_near = True

    def __init__(
        self,
        shape: TieredShape,
        device: torch.device,
        traffic: Traffic,
        late_host: HostLayer | None = None,
    ):
        self._shape = shape
        self._device = device
        self._traffic = traffic
        self._host = late_host
        self._kv = self._allocate() if late_host is None else None

    @property
    def is_late(self) -> bool:  # type: ignore[override]
        return self._kv is None

    @property
    def buffer(self) -> Tensor | None:
        return self._kv

    @property
    def device_bytes(self) -> int:
        return 0 if self._kv is None else self._kv.nbytes

    def put(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        assert self._kv is not None
        put(self._kv, k, v, start)

    def attend(self, q: Tensor, end: int, boundary: int, show: Show) -> Tensor:
        assert self._kv is not None
        prefix = span(self._kv, 0, boundary)
        recent = span(self._kv, boundary, end)
        show(0, q, prefix, recent)
        if self.is_steady:
            return steady_attention(q, [span(self._kv, 0, end)], self._traffic)
        return self.attend_near(q, end, boundary, self._traffic)

    def attend_near(self, q: Tensor, end: int, boundary: int, traffic: Traffic) -> Tensor:
        assert self._kv is not None
        return attend_to(self._kv, q, end, traffic)[0]

    def keep(self, kv: Tensor, start: int, boundary: int) -> Any:
        if self._kv is not None:
            return None  # kv is part of it
        assert self._host is not None
        return self._host.fill(kv, start)

    def recall(self, kv: Tensor, length: int, boundary: int) -> Any:
        if self._kv is not None:
            return None
        assert self._host is not None
        return self._host.read(span(kv, 0, length))

    def fill(self, piece: Piece, boundary: int) -> list[Copy]:
        if self._kv is not None:
            return copies_to(self._kv, piece)
        assert self._host is not None
        for destination, source in copies_to(self._host.kv, piece):
            destination.copy_(source)
        return []

    def excerpt(self, length: int, boundary: int, link: Link) -> Excerpt:
        assert self._kv is not None
        kv = self._kv

        def of_head(head: int, start: int, end: int) -> Tensor:
            return link.fetch(span(kv[:, head : head + 1], start, end))[:, 0]

        return of_head

    def bring_in(self, length: int, boundary: int) -> None:
        assert self._host is not None
        kv = self._allocate()
        self._host.read(span(kv, 0, length))
        self._kv = kv

    def _allocate(self) -> Tensor:
        shape = self._shape
        with torch.inference_mode(False):  # a link writes to it from outside
            return torch.empty(shape.layer_buffer, dtype=shape.layout.dtype, device=self._device)
