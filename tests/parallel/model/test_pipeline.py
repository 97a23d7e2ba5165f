"""The pipeline of prefill: the order in which chunks compute, and that finished ones are freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from offload.layout import ceil_div
from parallel.model.pipeline import Chunk, in_chunks, pipelined

Event = tuple[str, int]


@pytest.mark.parametrize("max_size", [45, 64, 256, 512])
@pytest.mark.parametrize("tokens", [1, 44, 64, 500, 513, 1003, 5003])
def test_chunks_are_even_and_whole_units_except_the_last(tokens: int, max_size: int) -> None:
    x = torch.arange(tokens)
    chunks = list(in_chunks(x, max_size))
    assert torch.equal(torch.cat([chunk.x for chunk in chunks]), x)
    assert [chunk.start for chunk in chunks] == [int(chunk.x[0]) for chunk in chunks]
    sizes = [len(chunk.x) for chunk in chunks]
    assert len(sizes) == ceil_div(tokens, max_size)
    assert max(sizes) <= max_size
    assert max(sizes) - min(sizes) < 2 * 64
    if max_size % 64 == 0:
        assert not any(size % 64 for size in sizes[:-1])


def recording_stages(events: list[Event], names: str) -> list[Callable[[int], object]]:
    """Return stages that append their name and chunk to `events`."""

    def stage(name: str) -> Callable[[int], object]:
        return lambda chunk: events.append((name, chunk))

    return [stage(name) for name in names]


def test_the_newest_chunk_runs_first_in_each_round() -> None:
    events: list[Event] = []
    for chunk in pipelined(range(3), recording_stages(events, "abc")):
        events.append(("done", chunk))
    assert events == [
        *[("a", 0)],
        *[("a", 1), ("b", 0)],
        *[("a", 2), ("b", 1), ("c", 0), ("done", 0)],
        *[("b", 2), ("c", 1), ("done", 1)],
        *[("c", 2), ("done", 2)],
    ]


@pytest.mark.parametrize("chunks", [0, 1, 2, 7])
@pytest.mark.parametrize("stages", ["a", "ab", "abcd"])
def test_every_chunk_runs_every_stage_in_order(chunks: int, stages: str) -> None:
    events: list[Event] = []
    assert list(pipelined(range(chunks), recording_stages(events, stages))) == list(range(chunks))
    for chunk in range(chunks):
        assert [name for name, index in events if index == chunk] == list(stages)
    # round by round, the newest chunk first
    expected = [
        (name, newest - step)
        for newest in range(chunks + len(stages) - 1)
        for step, name in enumerate(stages)
        if 0 <= newest - step < chunks
    ]
    assert events == expected


def test_no_more_chunks_are_in_flight_than_stages() -> None:
    alive: weakref.WeakSet[Chunk] = weakref.WeakSet()

    def chunks() -> Iterator[Chunk]:
        for start in range(10):
            assert len(alive) <= 3  # two in flight, and the one that the loop below holds
            chunk = Chunk(torch.zeros(1, 1), start)
            alive.add(chunk)
            yield chunk

    gc.disable()
    try:
        for _ in pipelined(chunks(), [Chunk.finish_sum] * 3):
            assert len(alive) <= 3
    finally:
        gc.enable()


def test_a_sum_is_added_once() -> None:
    chunk, waits = Chunk(torch.ones(2, 3), 5), []
    chunk.start_sum(lambda: waits.append(1) or torch.full((2, 3), 2.0))
    assert chunk.finish_sum().tolist() == [[3.0] * 3] * 2
    assert chunk.finish_sum().tolist() == [[3.0] * 3] * 2
    assert len(waits) == 1


def test_an_added_sum_is_freed() -> None:
    chunk, total = Chunk(torch.ones(2, 3), 0), torch.ones(2, 3)
    reference = weakref.ref(total)
    chunk.start_sum(lambda total=total: total)  # type: ignore[misc]
    del total
    assert reference() is not None
    chunk.finish_sum()
    assert reference() is None
