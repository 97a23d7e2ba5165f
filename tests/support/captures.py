"""Scripted stand-ins for captured graphs, and caches whose forwards can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel.execution.cuda_graphs
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from parallel.execution.batched_forward import ForwardRequest
from parallel.model.transformer import Transformer
from parallel.ranks.graph_capture import GraphCapturer
from support.links import CPU

LogitsFn = Callable[[], Tensor]


class ScriptedCapturer(GraphCapturer):
    """A capturer whose graphs a test scripts: `script` returns the replay of a function."""

    def __init__(self, script: Callable[[LogitsFn], LogitsFn]):
        super().__init__(CPU)
        self.script = script
        self.captures = 0
        self.graph_bytes = 0  # device memory of each graph

    @property
    def count(self) -> int:
        """The number of graphs that are alive."""
        return len(self._graphs)

    def capture(self, function: LogitsFn) -> LogitsFn:
        self.captures += 1
        replay = self.script(function)
        self._graphs.add(replay)
        return replay

    def driver_bytes(self) -> int:
        return self.count * self.graph_bytes


def exact_graph(function: LogitsFn) -> LogitsFn:
    return lambda: function()


def inaccurate_graph(function: LogitsFn) -> LogitsFn:
    return lambda: function() * 1.02


def stale_graph(function: LogitsFn) -> LogitsFn:
    """Return a graph that replays the result of its capture."""
    out = function().clone()
    return lambda: out


def fixed_slot_graph(function: LogitsFn) -> LogitsFn:
    """Return a graph that always writes to the slots of its capture."""
    _, _, static, _ = function.args  # type: ignore[attr-defined]
    captured = [each.clone() for each in static._places]

    def replay() -> Tensor:
        for each, saved in zip(static._places, captured, strict=True):
            each.copy_(saved)
        return function()

    return replay


def unpadded_graph(function: LogitsFn) -> LogitsFn:
    """Return a graph that computes all the tokens of its capture, also where padding is meant."""
    _, tokens, static, _ = function.args  # type: ignore[attr-defined]

    def replay() -> Tensor:
        places = [each.clone() for each in static._places]
        for each in static._places:
            each[:, 0].fill_(len(tokens) // len(each))
        out = function()
        for each, saved in zip(static._places, places, strict=True):
            each.copy_(saved)
        return out

    return replay


def failed_capture(function: LogitsFn) -> LogitsFn:
    raise RuntimeError("operation not permitted when stream is capturing")


def nan_graph(function: LogitsFn) -> LogitsFn:
    return lambda: function() * torch.nan


def streaming_cache(model: Transformer) -> StreamingCache:
    group, config = model.group, model.config
    layout = config.kv_layout(group.size, torch.float32, group.rank)
    rotary = model.rotary(132, 132)
    return StreamingCache(layout, StreamingCacheSpec(4, 64, 64), rotary, group.device)


def count_replays(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the numbers of sequences and of ranks of each replay from now on."""
    sizes: list[tuple[int, int]] = []
    replay = parallel.execution.cuda_graphs._CapturedForward.replay

    def counted_replay(self: Any, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        model = requests[0].model
        assert isinstance(model, Transformer)
        sizes.append((len(requests), model.group.size))
        return replay(self, requests)

    patch.setattr(parallel.execution.cuda_graphs._CapturedForward, "replay", counted_replay)
    return sizes
