"""Sums in shared memory: right, in the order of ranks, counted, and left where they cannot be."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.batch_invariant import batch_invariant
from parallel.ranks import process_group, shared_memory, shared_sum
from parallel.ranks.environment import RankLost
from parallel.ranks.partition import LARGE_SUM_BYTES
from parallel.ranks.process_group import TensorParallelGroup
from parallel.ranks.shared_memory import LEFT
from parallel.ranks.shared_sum import PIECE_BYTES, SLOTS, HostSum, SharedSum
from support.ranks import run_ranks
from support.slow import slow_except

DTYPES = torch.float32, torch.bfloat16, torch.float16
Leave = Callable[[TensorParallelGroup, SharedSum], None]
# more than the slots hold and a part of a piece; a few pieces; the smallest
SIZES = (SLOTS + 2) * PIECE_BYTES + 4, 3 * PIECE_BYTES, LARGE_SUM_BYTES


def on_shared_memory() -> tuple[TensorParallelGroup, SharedSum]:
    """Return this rank's group, whose large sums go through shared memory however slow."""
    group = TensorParallelGroup.from_environment("cpu")
    assert group.shared_sum is not None
    group.shared_sum.is_faster = True
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


@pytest.mark.parametrize("size", slow_except([2, 3]))
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
    for shared.is_faster in (False, True):
        by_both.append(group.all_reduce(own.clone()))
    return unchanged, [torch.equal(*by_both)] if group.size == 2 else []


@pytest.mark.parametrize("size", slow_except([2, 3]))
def test_other_sums_are_the_backends(size: int) -> None:
    for written, equal in run_ranks(size, backend_sums_on_rank):
        assert written == 0
        assert all(equal)


def leave_on_rank(leave: Leave) -> str:
    group, shared = on_shared_memory()
    x = torch.ones(LARGE_SUM_BYTES)
    group.all_reduce(x)
    if group.rank == 1:
        leave(group, shared)
        return "left"
    try:
        while True:
            group.all_reduce(x)
    except RankLost as error:
        group.close()
        return str(error)


def return_only(group: TensorParallelGroup, shared: SharedSum) -> None:
    """The process ends."""


def close_and_stay(group: TensorParallelGroup, shared: SharedSum) -> None:
    memory = shared.memory
    group.close()
    ends_at = time.monotonic() + 60
    while not memory.count(memory.counter(0, LEFT)):  # this process lives until rank 0 has left
        assert time.monotonic() < ends_at
        time.sleep(0.01)


@pytest.mark.parametrize("leave", slow_except([return_only, close_and_stay]))
def test_a_lost_rank_is_detected(leave: Leave) -> None:
    waited, left = run_ranks(2, leave_on_rank, leave)
    assert left == "left"
    assert "another rank ended unexpectedly" in waited


def sum_without_sharing(prevent: Callable[[int], Any]) -> tuple[list[str], float, bool]:
    lines: list[str] = []
    with prevent(int(os.environ["RANK"])):
        group = TensorParallelGroup.from_environment("cpu", lines.append)
    x = group.all_reduce(torch.ones(LARGE_SUM_BYTES))
    return lines, float(x.mean()), group.shared_sum is not None


class TooLarge:
    """No file may be larger than a page, as if memory were full."""

    def __init__(self, rank: int):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __enter__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.limits[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def without_access(rank: int) -> Any:
    def deny(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    return patch.object(shared_memory.os, "open", deny if rank == 1 else os.open)


def without_pidfd(rank: int) -> Any:
    def deny(_: int) -> int:
        raise OSError(38, "Function not implemented")

    return patch.object(shared_memory.os, "pidfd_open", deny)


def wrong_on_rank_1(rank: int) -> Any:
    def memmove(to: int, source: int, nbytes: int) -> None:
        ctypes.memset(to, 1, nbytes)

    return patch.object(shared_sum.ctypes, "memmove", memmove if rank == 1 else ctypes.memmove)


def failing_on_rank_1(rank: int) -> Any:
    def start(self: HostSum, x: Tensor) -> Callable[[], Tensor]:
        raise RuntimeError("a driver's error")

    patch.object(process_group, "_TEST_S", 0.2).start()
    return patch.object(HostSum, "start", start if rank == 1 else HostSum.start)


def stuck_on_rank_1(rank: int) -> Any:
    def start(self: HostSum, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    patch.object(process_group, "_TEST_S", 0.2).start()
    return patch.object(HostSum, "start", start if rank == 1 else HostSum.start)


@pytest.mark.parametrize(
    ("prevent", "reason"),
    slow_except(
        [
            (TooLarge, "the ranks cannot share memory ([Errno 27] File too large)"),
            (without_access, "the ranks cannot share memory ([Errno 13] Permission denied)"),
            (
                without_pidfd,
                "the ranks cannot watch each other ([Errno 38] Function not implemented)",
            ),
            (wrong_on_rank_1, "a sum in shared memory is wrong"),
            (stuck_on_rank_1, "a sum in shared memory does not end"),
            (failing_on_rank_1, "a sum in shared memory does not end"),  # as rank 0 sees it
        ],
        *(0, 3),
    ),
)
def test_where_it_cannot_be_the_backend_sums(prevent: Callable[[int], Any], reason: str) -> None:
    """One line says why, on rank 0, and all ranks agree."""
    for rank, (lines, mean, is_shared) in enumerate(run_ranks(2, sum_without_sharing, prevent)):
        expected = [f"large all-reduces go through gloo: {reason}."] if rank == 0 else []
        assert (lines, mean, is_shared) == (expected, 2.0, False)


def on_two_machines(rank: int) -> Any:
    return patch.object(shared_memory, "_place", lambda: (f"machine {rank}", "the same"))


def on_another_processor(rank: int) -> Any:
    return patch.object(shared_sum.platform, "machine", lambda: "aarch64")


@pytest.mark.parametrize("prevent", slow_except([on_two_machines, on_another_processor]))
def test_where_it_is_not_meant_to_be_no_line_says_so(prevent: Callable[[int], Any]) -> None:
    assert run_ranks(2, sum_without_sharing, prevent) == [([], 2.0, False)] * 2


def chosen_on_rank(slow: str) -> tuple[bool, bool]:
    def delayed(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_slowly(*args: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return make(*args, **options)

        return make_slowly

    owner, name = (HostSum, "start") if slow == "shared memory" else (dist, "all_reduce")
    with patch.object(owner, name, delayed(getattr(owner, name))):
        group = TensorParallelGroup.from_environment("cpu")
    assert group.shared_sum is not None
    written = group.shared_sum.written_bytes
    group.all_reduce(torch.ones(LARGE_SUM_BYTES))
    return group.shared_sum.is_faster, group.shared_sum.written_bytes > written


@pytest.mark.parametrize(
    ("slow", "is_shared"), slow_except([("shared memory", False), ("the backend", True)])
)
def test_the_faster_one_is_chosen(slow: str, is_shared: bool) -> None:
    assert run_ranks(2, chosen_on_rank, slow) == [(is_shared, is_shared)] * 2


def leave_at_startup() -> str:
    if os.environ["RANK"] == "1":
        with patch.object(process_group, "open_shared_sum", lambda _: None):
            TensorParallelGroup.from_environment("cpu")
        return "left"
    lines: list[str] = []
    try:
        TensorParallelGroup.from_environment("cpu", lines.append)
    except RankLost as error:
        assert not lines
        return str(error)
    return "started"


def test_a_rank_that_is_lost_at_startup_is_detected() -> None:
    waited, left = run_ranks(2, leave_at_startup)
    assert left == "left"
    assert "another rank ended unexpectedly" in waited


def group_again_on_rank() -> bool:
    first = TensorParallelGroup.from_environment("cpu")
    return TensorParallelGroup.from_environment("cpu").shared_sum is first.shared_sum is not None


def test_later_groups_of_a_process_share_memory_too() -> None:
    assert run_ranks(2, group_again_on_rank) == [True, True]
