"""Forwards run in the order of their requests, and a paused clock counts no seconds."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from decoding.speculation.coroutines import Clock, Steps, run
from parallel.execution.batched_forward import ForwardRequest
from support.toys import HistoryCache, Toy


def request(tokens: list[int]) -> ForwardRequest:
    return ForwardRequest(Toy(0, 1.0), HistoryCache(), torch.tensor(tokens), 1)


def two_forwards() -> Steps[list[float]]:
    first = yield request([1])
    second = yield request([2, 3])
    return [float(first), float(second)]


def test_each_forward_runs_once_and_in_order() -> None:
    inputs: list[list[int]] = []

    def forward(request: ForwardRequest) -> Tensor:
        inputs.append(request.tokens.tolist())
        return torch.tensor(float(len(inputs)))

    assert run(two_forwards(), forward) == [1.0, 2.0]
    assert inputs == [[1], [2, 3]]


def test_a_stop_iteration_raised_by_a_forward_is_propagated() -> None:
    def forward(request: ForwardRequest) -> Tensor:
        raise StopIteration("of something else")

    with pytest.raises(StopIteration, match="something else"):
        run(two_forwards(), forward)


def test_a_paused_clock_does_not_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    started = clock()
    now = 103.0
    assert clock() - started == 3.0
    with clock.paused():
        now = 110.0
        assert clock() - started == 3.0
        while_paused = clock()
    assert clock() == while_paused
    now = 111.0
    assert clock() - started == 4.0
    with suppress(OSError), clock.paused():
        now = 120.0
        raise OSError("over")
    assert clock() - started == 4.0
