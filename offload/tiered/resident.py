"""A layer of the target's cache whose KV is on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.head_major import (
    attend_prefix,
    in_pairs,
    token_slice,
    write_tokens,
)
from offload.memory.link import Copy, Link
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader, KVBlock, copies_to
from offload.tiered.layer import KVGroup, TieredLayer
from offload.tiered.shape import LayerSpec
from offload.traffic import ByteCounters


class ResidentLayer(TieredLayer):
    """A layer in one device buffer (2, Hkv, capacity, D).

    A deferred layer has no buffer until prefill has released the memory of its hidden states: its
    prompt is first written to host memory.
    """

    is_on_device = True

    def __init__(
        self,
        spec: LayerSpec,
        device: torch.device,
        traffic: ByteCounters,
        deferred_host: HostLayer | None = None,
    ):
        self._spec = spec
        self._device = device
        self._traffic = traffic
        self._host = deferred_host
        self._kv = self._allocate() if deferred_host is None else None

    @property
    def is_deferred(self) -> bool:  # type: ignore[override]
        return self._kv is None

    @property
    def buffer(self) -> Tensor | None:
        return self._kv

    @property
    def device_bytes(self) -> int:
        return 0 if self._kv is None else self._kv.nbytes

    def append(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        assert self._kv is not None
        write_tokens(self._kv, k, v, start)

    def groups(self, end: int, boundary: int) -> Iterator[KVGroup]:
        assert self._kv is not None
        yield KVGroup(0, self._kv.shape[1], [in_pairs(token_slice(self._kv, 0, end))])

    def attend_on_device(
        self, q: Tensor, end: int, boundary: int, traffic: ByteCounters
    ) -> Partial:
        assert self._kv is not None
        return attend_prefix(self._kv, q, end, traffic)

    def store(self, kv: Tensor, start: int, boundary: int) -> Any:
        if self._kv is not None:
            return None  # kv is a view of the buffer
        assert self._host is not None
        return self._host.store_async(kv, start)

    def load(self, kv: Tensor, length: int, boundary: int) -> Any:
        if self._kv is not None:
            return None
        assert self._host is not None
        return self._host.read(token_slice(kv, 0, length))

    def load_block(self, block: KVBlock, boundary: int) -> list[Copy]:
        if self._kv is not None:
            return copies_to(self._kv, block)
        assert self._host is not None
        for destination, source in copies_to(self._host.kv, block):
            destination.copy_(source)
        return []

    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        assert self._kv is not None
        kv = self._kv

        def read(head: int, start: int, end: int) -> Tensor:
            return link.read_to_host(token_slice(kv[:, head : head + 1], start, end))[:, 0]

        return HostReader(read)

    def onload_deferred(self, length: int, boundary: int) -> None:
        assert self._host is not None
        kv = self._allocate()
        self._host.read(token_slice(kv, 0, length))
        self._kv = kv

    def _allocate(self) -> Tensor:
        spec = self._spec
        with torch.inference_mode(False):  # a link's copies write to it
            return torch.empty(spec.shape, dtype=spec.layout.dtype, device=self._device)
