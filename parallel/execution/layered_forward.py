"""A forward that runs layer by layer, so that others may run while a layer waits for the host."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from offload.cache.base import Cache
from offload.tiered.cache import TieredCache
from parallel.execution.batched_forward import ForwardRequest
from parallel.model.pipeline import LayerSteps


class LayeredForward:
    """A forward of requests of one model.

    Between two layers any forwards may run that use other caches, or views of these.
    """

    def __init__(self, requests: Sequence[ForwardRequest], steps: LayerSteps[list[Tensor]]):
        """Begin a forward of these requests, whose `steps` return their logits."""
        self.requests = requests
        self.logits: list[Tensor] | None = None  # (rows, V) of each request, at the end
        self._steps: Generator[int, None, list[Tensor]] = steps
        self._layer = 0  # the next one
        self.run_layer()  # none yet: only what precedes them

    @property
    def has_arrived(self) -> bool:
        """Return whether all KV of the next layer is on the device, or as much as there is room."""
        return all(_has_arrived(request.cache, self._layer) for request in self.requests)

    def reads_any(self, caches: Sequence[Cache]) -> bool:
        """Return whether it reads one of these caches."""
        return any(request.cache in caches for request in self.requests)

    @torch.inference_mode()
    def run_layer(self) -> None:
        """Run the next layer, and wait for its KV if need be."""
        try:
            self._layer = next(self._steps)
        except StopIteration as end:
            self.logits = end.value


def streams(request: ForwardRequest) -> bool:
    """Return whether a forward streams KV from the host."""
    cache = request.cache
    if not isinstance(cache, TieredCache) or (ring := cache.buffers.ring) is None:
        return False
    return ring.link.copies and cache.shape.boundary(cache.length) > 0


def _has_arrived(cache: Cache, layer: int) -> bool:
    if not isinstance(cache, TieredCache) or (ring := cache.buffers.ring) is None:
        return True
    return not cache.boundary or ring.has_arrived(len(cache.layers[layer].chunks(cache.boundary)))
