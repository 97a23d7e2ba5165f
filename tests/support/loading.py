"""The memory that loading takes, and the logits of a loaded model."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import torch
from torch import Tensor

from offload.memory.host_arena import HostArena
from offload.tiered.cache import TieredCache
from offload.tiered.shape import TieredCacheSpec
from parallel.model.loading import load_model, parameter_bytes
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.links import make_test_link


def load_and_watch(path: Path, warm: Path) -> tuple[int, int]:
    """Load `path` as rank 0 of 2; return the bytes of its share, and the peak growth of resident
    memory. `warm` is loaded first.
    """
    group, process = TensorParallelGroup(rank=0, size=2), psutil.Process()
    load_model(warm, group)  # imports of a first load take memory too
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(path, group)
    done.set()
    watcher.join()
    return parameter_bytes(model), max(peak, process.memory_info().rss) - before


def all_logits(model: Transformer, tokens: Tensor) -> Tensor:
    """Return float32 logits (T, V) of tokens (T,), from one forward with all KV on the device."""
    link, count = make_test_link("view"), len(tokens)
    layout = model.config.kv_layout(model.group.size, torch.float32, model.group.rank)
    rotary = model.rotary(count, count)
    shape = TieredCacheSpec(layout, count, layout.full_layers, copies=link.copies)
    return model(tokens, TieredCache(shape, link, rotary, HostArena(link, torch.float32)), count)


def assert_same_parameters(one: Transformer, other: Transformer) -> None:
    """Assert that two models have identical parameters."""
    parameters = dict(other.named_parameters())
    assert [name for name, _ in one.named_parameters()] == list(parameters)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, parameters[name]), name
