"""Sums in shared memory: right, in the order of ranks, counted, and left where they cannot be."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from parallel.batch_invariant import batch_invariant
from parallel.ranks import process_group, shared_memory, shared_sum
from parallel.ranks.environment import RankLost
from parallel.ranks.partition import LARGE_SUM_BYTES
from parallel.ranks.process_group import TensorParallelGroup
from parallel.ranks.shared_sum import PIECE_BYTES, SLOTS, HostSum, SharedSum
from support.ranks import run_ranks

DTYPES = torch.float32, torch.bfloat16, torch.float16
# more than the slots hold and a part of a piece; a few pieces; the smallest
SIZES = (SLOTS + 2) * PIECE_BYTES + 4, 3 * PIECE_BYTES, LARGE_SUM_BYTES


def on_shared_memory() -> tuple[TensorParallelGroup, SharedSum]:
    """Return this rank's group, whose large sums go through shared memory however slow."""
    group = TensorParallelGroup.from_environment("cpu")
    assert group.shared_sum is not None
    group.uses_shared_sum = True
    return group, group.shared_sum


def parts(size: int, nbytes: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensor of each rank."""
    generator = torch.Generator().manual_seed(nbytes)
    shape = (-1, 2, nbytes // dtype.itemsize // 2)
    return [torch.randn(shape[1:], generator=generator).to(dtype) for _ in range(size)]


def in_order(tensors: list[Tensor]) -> Tensor:
    """Return the sum of tensors, added one after another."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def sums_on_rank() -> list[bool]:
    group, shared = on_shared_memory()
    correct = []
    for dtype in DTYPES:
        tensors = [parts(group.size, nbytes, dtype) for nbytes in SIZES]
        written, read = shared.written_bytes, shared.read_bytes
        pending = [group.start_all_reduce(each[group.rank].clone()) for each in tensors]
        sums = [finish() for finish in pending]  # all were in flight
        correct += [torch.equal(x, in_order(each)) for x, each in zip(sums, tensors, strict=True)]
        total = sum(x.nbytes for x in sums)
        correct.append(shared.written_bytes - written == total)
        correct.append(shared.read_bytes - read == (group.size - 1) * total)
    group.close()
    return correct


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_the_ranks_in_order(size: int) -> None:
    """Every element is added in one order, so the sums of all ranks are equal to the last bit."""
    for correct in run_ranks(size, sums_on_rank):
        assert correct == [True] * len(DTYPES) * (len(SIZES) + 2)


def backend_sums_on_rank() -> tuple[int, list[bool]]:
    group, shared = on_shared_memory()
    written = shared.written_bytes
    own = parts(group.size, LARGE_SUM_BYTES, torch.bfloat16)[group.rank]
    group.all_reduce(own.flatten()[:-1].clone())  # too small
    group.all_reduce(torch.cat((own, own)).t())  # not contiguous
    if group.size > 2:  # the backend's order in a block of rows is that of every other block
        with batch_invariant():
            group.all_reduce(own.clone())
    group.graph_capturer.is_capturing = True  # a graph would wait for the counts of its capture
    group.all_reduce(own.clone())
    group.graph_capturer.is_capturing = False
    unchanged = shared.written_bytes - written
    by_both = []
    for shares in (False, True):
        group.uses_shared_sum = shares
        by_both.append(group.all_reduce(own.clone()))
    return unchanged, [torch.equal(*by_both)] if group.size == 2 else []


@pytest.mark.parametrize("size", [2, 3])
def test_other_sums_are_the_backends(size: int) -> None:
    for written, equal in run_ranks(size, backend_sums_on_rank):
        assert written == 0
        assert all(equal)


def leave_on_rank(leave: Callable[[TensorParallelGroup], None]) -> str:
    group, _ = on_shared_memory()
    x = torch.ones(LARGE_SUM_BYTES)
    group.all_reduce(x)
    if group.rank == 1:
        leave(group)
        return "left"
    try:
        while True:
            group.all_reduce(x)
    except RankLost as error:
        return str(error)


def return_only(_: TensorParallelGroup) -> None:
    """The process ends."""


def close_and_stay(group: TensorParallelGroup) -> None:
    group.close()


@pytest.mark.parametrize("leave", [return_only, close_and_stay])
def test_a_lost_rank_is_detected(leave: Callable[[TensorParallelGroup], None]) -> None:
    waited, left = run_ranks(2, leave_on_rank, leave)
    assert left == "left"
    assert "another rank ended unexpectedly" in waited


def sum_without_sharing(prevent: Callable[[int], Any]) -> tuple[list[str], float, bool]:
    lines: list[str] = []
    with prevent(int(os.environ["RANK"])):
        group = TensorParallelGroup.from_environment("cpu", lines.append)
    x = group.all_reduce(torch.ones(LARGE_SUM_BYTES))
    return lines, float(x.mean()), group.uses_shared_sum


class TooLarge:
    """No file may be larger than a page, as if memory were full."""

    def __init__(self, rank: int):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __enter__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.limits[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def on_two_machines(rank: int) -> Any:
    return patch.object(shared_memory, "_place", lambda: (f"machine {rank}", "the same"))


def without_access(rank: int) -> Any:
    def deny(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    return patch.object(shared_memory.os, "open", deny if rank == 1 else os.open)


def on_another_processor(rank: int) -> Any:
    return patch.object(shared_sum.platform, "machine", lambda: "aarch64")


def wrong_on_rank_1(rank: int) -> Any:
    def memmove(to: int, source: int, nbytes: int) -> None:
        ctypes.memset(to, 1, nbytes)

    return patch.object(shared_sum.ctypes, "memmove", memmove if rank == 1 else ctypes.memmove)


def stuck_on_rank_1(rank: int) -> Any:
    def start(self: HostSum, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    patch.object(process_group, "_TEST_S", 0.2).start()
    return patch.object(HostSum, "start", start if rank == 1 else HostSum.start)


@pytest.mark.parametrize(
    ("prevent", "reason"),
    [
        (TooLarge, "the ranks cannot share memory ([Errno 27] File too large)"),
        (
            on_two_machines,
            "the ranks cannot share memory (they run on several machines, or in several "
            "containers)",
        ),
        (without_access, "the ranks cannot share memory ([Errno 13] Permission denied)"),
        (on_another_processor, "sums in shared memory are not made on aarch64"),
        (wrong_on_rank_1, "a sum in shared memory is wrong"),
        (stuck_on_rank_1, "a sum in shared memory does not end"),
    ],
)
def test_where_it_cannot_be_the_backend_sums(prevent: Callable[[int], Any], reason: str) -> None:
    """One line says why, on rank 0, and all ranks agree."""
    for rank, (lines, mean, shares) in enumerate(run_ranks(2, sum_without_sharing, prevent)):
        expected = [f"large all-reduces go through gloo: {reason}."] if rank == 0 else []
        assert (lines, mean, shares) == (expected, 2.0, False)
