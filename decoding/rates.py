"""What a device and its link can do, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig

from offload import KVLayout, Link, Rotary, StreamingCache
from parallel import Group, ModelConfig, random_model

T = TypeVar("T")
_COPY, _SUM = 128 << 20, 16 << 20  # bytes
_REPEATS = 5
_CUDA_READ, _CPU_READ = 1 << 30, 256 << 20  # bytes: far more than any cache holds


class Copies:
    """Large copies between the link's host memory and the device, one after another."""

    def __init__(self, link: Link, size: int = _COPY):
        """Allocates `size` bytes on both sides. Raises FitError."""
        self.link, self.size = link, size
        # pages that were never written would all be one page, in the processor's cache
        self._host = link.host_empty(size, torch.uint8).zero_()
        self._device = torch.zeros(size, dtype=torch.uint8, device=link.device)

    def rate(self, out: bool, seconds: float = 0.5) -> float:
        """Bytes a second, over so many seconds: other ranks that copy at the same time have their share of it."""
        self._copy(out)
        self.link.drain()
        started, copied = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < seconds or not copied:
            self._copy(out)
            self.link.drain()
            copied += self.size
        return copied / elapsed

    def meanwhile(self, ask: Callable[[], T]) -> T:
        """What `ask` says while copies towards the device are under way: links that are idle report a lower speed."""
        for _ in range(20):
            self._copy(out=False)
        answer = ask()
        self.link.drain()
        return answer

    def close(self) -> None:
        self.link.release(self._host)

    def _copy(self, out: bool) -> None:
        self.link.copy([(self._host, self._device) if out else (self._device, self._host)])


def read_rate(device: torch.device) -> float:
    """Bytes a second of reading device memory."""
    size = _CUDA_READ if device.type == "cuda" else _CPU_READ
    numbers = torch.ones(size // 4, device=device)
    return size / _seconds(lambda: numbers.sum())


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of one large matrix product: what arithmetic could reach here at most."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b)


def layer_seconds(device: torch.device, layers: int = 16) -> float:
    """What a layer of a one-token pass takes when its weights and cache are next to nothing: launches and dispatch."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": layers,
        "vocab_size": 64,
    }
    config = ModelConfig.from_hf(LlamaConfig(**sizes, rope_parameters=rope))
    model, layout = random_model(config, Group(device=device), torch.bfloat16), KVLayout(layers, 1, 64, torch.bfloat16)
    cache = StreamingCache(layout, 1, 8, 8, Rotary(*config.inverse_frequencies(17), 17, torch.bfloat16, device), device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return _seconds(lambda: model(token, cache, 1)) / layers


def sum_seconds(group: Group, size: int) -> float:
    """One all-reduce of `size` bytes, on all ranks at once."""
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=group.device)
    return _seconds(lambda: group.all_reduce(x))


def sum_rate(group: Group, size: int = _SUM) -> float:
    """Bytes a second of a large all-reduce."""
    return size / sum_seconds(group, size)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Of one of several runs on the device, with one wait for all; the least of a few times, the first of which does not count."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        for _ in range(_REPEATS):
            out = work()
        out.flatten()[0].item()
        times.append((time.perf_counter() - started) / _REPEATS)
    return min(times[1:])
