"""Passes are made in the order in which they are asked for, and a clock leaves out what is none."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from decoding.speculation.coroutines import Clock, Steps, run
from parallel.execution.batched_forward import ForwardRequest
from support.toys import HistoryCache, Toy


def asked(tokens: list[int]) -> ForwardRequest:
    return ForwardRequest(Toy(0, 1.0), HistoryCache(), torch.tensor(tokens), 1)


def two_passes() -> Steps[list[float]]:
    first = yield asked([1])
    second = yield asked([2, 3])
    return [float(first), float(second)]


def test_each_pass_is_answered_once_and_in_order() -> None:
    made: list[list[int]] = []

    def make(each: ForwardRequest) -> Tensor:
        made.append(each.tokens.tolist())
        return torch.tensor(float(len(made)))

    assert run(two_passes(), make) == [1.0, 2.0]
    assert made == [[1], [2, 3]]


def test_who_makes_passes_ends_none_of_them_by_an_iteration_that_is_over() -> None:
    def make(each: ForwardRequest) -> Tensor:
        raise StopIteration("of something else")

    with pytest.raises(StopIteration, match="something else"):
        run(two_passes(), make)


def test_a_clock_stands_while_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    started = clock()
    now = 103.0
    assert clock() - started == 3.0
    with clock.paused():
        now = 110.0
        assert clock() - started == 3.0
        amid = clock()
    assert clock() == amid
    now = 111.0
    assert clock() - started == 4.0
    with suppress(OSError), clock.paused():
        now = 120.0
        raise OSError("over")
    assert clock() - started == 4.0
