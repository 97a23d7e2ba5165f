"""The maker of CUDA graphs, one for each device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor


class GraphCapturer:
    """The maker of CUDA graphs on one device; on a CPU there is nothing to record."""

    def __init__(self, device: torch.device):
        self.device = device
        # why nothing more can be recorded: a capture that fails leaves torch's state in doubt
        self.broken: str | None = None
        self._stream: Any = None  # one for all: cuBLAS keeps memory for each that it has met
        # whose memory all share, for no two are replayed at once: it goes with the last of them
        self._graphs: WeakSet[Any] = WeakSet()
        self._pool: Any = None

    def reset(self) -> None:
        """Free what all recordings hold; none can be replayed again.

        NCCL does not end while a graph with one of its collectives exists: to be called before
        `torch.distributed.destroy_process_group`, which would hang.
        """
        for graph in list(self._graphs):
            graph.reset()

    @property
    def count(self) -> int:
        """Return how many recordings there are."""
        return len(self._graphs)

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return what does the same as `function` each time it is called.

        On a GPU that is the replay of one CUDA graph, collectives included, which writes its result
        to the same place each time; elsewhere it is the function itself. The function must have run
        before. Raises RuntimeError for what cannot be captured.
        """
        if self.device.type != "cuda":
            return function
        self._stream = self._stream or torch.cuda.Stream(self.device)
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        pool, graph = self._pool, torch.cuda.CUDAGraph()
        stream_before = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(
                graph,
                pool=pool,
                stream=self._stream,
                # other threads, such as NCCL's watchdog, may call what a capture must not
                capture_error_mode="thread_local",
            ):
                out = function()
        except BaseException as error:
            torch.cuda.set_stream(stream_before)  # which a failing capture does not do
            # Before torch 2.13 the allocator stays in the capture too, and frees no cached memory.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)
            self.broken = repr(error.__cause__ or error)
            raise
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
