"""Capture and replay of CUDA graphs on one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor


class GraphCapturer:
    """Captures CUDA graphs on one device; on a CPU, functions run as they are."""

    def __init__(self, device: torch.device):
        self.device = device
        # error of a failed capture, which leaves torch's state undefined: captures end there
        self.broken: str | None = None
        self.is_capturing = False
        self._stream: Any = None  # one for all captures: cuBLAS keeps a workspace per stream
        # The graphs share a memory pool, since no two are replayed at the same time.
        # It is freed with the last of them.
        self._graphs: WeakSet[Any] = WeakSet()
        self._memory_pool: Any = None

    def reset(self) -> None:
        """Free the memory of all captured graphs; none can be replayed again.

        Must be called before `torch.distributed.destroy_process_group`, which hangs while a graph
        with an NCCL collective exists.
        """
        for graph in list(self._graphs):
            graph.reset()

    def free_cached(self) -> None:
        """Return the memory of freed graphs, and all that torch caches, to the driver."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def driver_bytes(self) -> int:
        """Return the bytes of device memory in use that torch did not allocate; 0 on a CPU.

        They are modules, the launches of graphs, and all that other processes use.
        """
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free - torch.cuda.memory_reserved(self.device))

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that does the same as `function`.

        On a GPU it replays one CUDA graph, including collectives, and returns the same output
        tensor each time; on other devices it is `function` itself. `function` must have run before.
        Raises RuntimeError if it cannot be captured.
        """
        if self.device.type != "cuda":
            return function
        self._stream = self._stream or torch.cuda.Stream(self.device)
        if not self._graphs:
            self._memory_pool = torch.cuda.graph_pool_handle()
        memory_pool, graph = self._memory_pool, torch.cuda.CUDAGraph()
        stream_before = torch.cuda.current_stream(self.device)
        self.is_capturing = True
        try:
            with torch.cuda.graph(
                graph,
                pool=memory_pool,
                stream=self._stream,
                # other threads, such as NCCL's watchdog, may make calls a capture forbids
                capture_error_mode="thread_local",
            ):
                out = function()
        except BaseException as error:
            torch.cuda.set_stream(stream_before)  # a failed capture does not restore it
            # Before torch 2.13 the allocator stays in capture mode too, and frees no cached memory.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, memory_pool)
            self.broken = repr(error.__cause__ or error)
            raise
        finally:
            self.is_capturing = False
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
