"""The pipeline of a prefill: which chunk computes when, and that chunks through it are let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from offload.layout import ceil_div
from parallel.model.pipeline import Chunk, in_chunks, pipelined

Event = tuple[str, int]


@pytest.mark.parametrize("most", [45, 64, 256, 512])
@pytest.mark.parametrize("tokens", [1, 44, 64, 500, 513, 1003, 5003])
def test_chunks_are_even_and_all_but_the_last_whole_units(tokens: int, most: int) -> None:
    x = torch.arange(tokens)
    chunks = list(in_chunks(x, most))
    assert torch.equal(torch.cat([chunk.x for chunk in chunks]), x)
    assert [chunk.start for chunk in chunks] == [int(chunk.x[0]) for chunk in chunks]
    sizes = [len(chunk.x) for chunk in chunks]
    assert len(sizes) == ceil_div(tokens, most)
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) < 2 * 64
    if most % 64 == 0:
        assert not any(size % 64 for size in sizes[:-1])


def noting(events: list[Event], names: str) -> list[Callable[[int], object]]:
    """Stages that note which chunk they see."""

    def stage(name: str) -> Callable[[int], object]:
        return lambda chunk: events.append((name, chunk))

    return [stage(name) for name in names]


def test_the_newest_chunk_goes_first_and_two_rounds_finish_the_rest() -> None:
    events: list[Event] = []
    for chunk in pipelined(range(3), noting(events, "abc")):
        events.append(("through", chunk))
    assert events == [
        *[("a", 0)],
        *[("a", 1), ("b", 0)],
        *[("a", 2), ("b", 1), ("c", 0), ("through", 0)],
        *[("b", 2), ("c", 1), ("through", 1)],
        *[("c", 2), ("through", 2)],
    ]


@pytest.mark.parametrize("chunks", [0, 1, 2, 7])
@pytest.mark.parametrize("stages", ["a", "ab", "abcd"])
def test_every_chunk_goes_through_every_stage_in_turn(chunks: int, stages: str) -> None:
    events: list[Event] = []
    assert list(pipelined(range(chunks), noting(events, stages))) == list(range(chunks))
    for chunk in range(chunks):
        assert [name for name, each in events if each == chunk] == list(stages)
    # in any round, by rounds: the newest first
    wanted = [
        (name, begun - steps)
        for begun in range(chunks + len(stages) - 1)
        for steps, name in enumerate(stages)
        if 0 <= begun - steps < chunks
    ]
    assert events == wanted


def test_no_more_chunks_are_begun_than_there_are_stages() -> None:
    alive: weakref.WeakSet[Chunk] = weakref.WeakSet()

    def chunks() -> Iterator[Chunk]:
        for start in range(10):
            assert len(alive) <= 3  # two on their way, and the one that the loop below holds
            chunk = Chunk(torch.zeros(1, 1), start)
            alive.add(chunk)
            yield chunk

    gc.disable()
    try:
        for _ in pipelined(chunks(), [Chunk.finish_sum] * 3):
            assert len(alive) <= 3
    finally:
        gc.enable()


def test_a_chunk_settles_once() -> None:
    chunk, waits = Chunk(torch.ones(2, 3), 5), []
    chunk.start_sum(lambda: waits.append(1) or torch.full((2, 3), 2.0))
    assert chunk.finish_sum().tolist() == [[3.0] * 3] * 2
    assert chunk.finish_sum().tolist() == [[3.0] * 3] * 2
    assert len(waits) == 1


def test_a_sum_that_was_added_is_let_go() -> None:
    chunk, total = Chunk(torch.ones(2, 3), 0), torch.ones(2, 3)
    gone = weakref.ref(total)
    chunk.start_sum(lambda total=total: total)  # type: ignore[misc]
    del total
    assert gone() is not None
    chunk.finish_sum()
    assert gone() is None
