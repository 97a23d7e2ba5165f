"""Recordings of passes that do what a test says, and caches whose passes can be recorded."""

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

USES = 3
Made = Callable[[], Tensor]


class Scripted(GraphCapturer):
    """Recordings that do what a test says."""

    def __init__(self, again: Callable[[Made], Made]):
        super().__init__(CPU)
        self.again = again
        self.made = 0

    def capture(self, function: Made) -> Made:
        self.made += 1
        made = self.again(function)
        self._graphs.add(made)
        return made


def faithful(function: Made) -> Made:
    return lambda: function()


def wrong(function: Made) -> Made:
    return lambda: function() * 1.02


def stale(function: Made) -> Made:
    """What a recording gives that has an address or a position of its own making in it."""
    out = function().clone()
    return lambda: out


def baked(function: Made) -> Made:
    """A recording that goes to the slots it was made at, whatever comes."""
    args = function.args  # type: ignore[attr-defined]
    fixed = args[2] if isinstance(args[0], Transformer) else [args[1]]
    places = [(one._start, one._start.clone()) for one in fixed]

    def again() -> Tensor:
        for place, was in places:
            place.copy_(was)
        return function()

    return again


def impossible(function: Made) -> Made:
    raise RuntimeError("operation not permitted when stream is capturing")


def not_a_number(function: Made) -> Made:
    return lambda: function() * torch.nan


def streaming(model: Transformer) -> StreamingCache:
    group, config = model.group, model.config
    layout = config.kv_layout(group.size, torch.float32, group.rank)
    rotary = config.rotary(132, 132, torch.float32, group.device)
    return StreamingCache(layout, StreamingCacheSpec(4, 64, 64), rotary, group.device)


def count_replays(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many texts, and ranks of their model, share each replay from now on."""
    shared: list[tuple[int, int]] = []
    replay = parallel.execution.cuda_graphs._CapturedGraph.replay

    def noted(self: Any, passes: Sequence[ForwardRequest]) -> Tensor:
        model = passes[0].model
        assert isinstance(model, Transformer)
        shared.append((len(passes), model.group.size))
        return replay(self, passes)

    patch.setattr(parallel.execution.cuda_graphs._CapturedGraph, "replay", noted)
    return shared
