"""The process group. Besides the host link, it and its sums alone know devices and backends."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Timer
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import InsufficientMemoryError, TierForceError, is_out_of_memory, one_line
from offload.memory.numa import gpu_address, gpu_node
from parallel.batch_invariant import is_batch_invariant, row_blocks
from parallel.ranks.cuda_shared_sum import CudaSum
from parallel.ranks.driver import unseen_gpus
from parallel.ranks.environment import RankInfo, RankLost, rank_from_env, warn_from_rank
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.partition import LARGE_SUM_BYTES, share
from parallel.ranks.shared_memory import SharedMemory
from parallel.ranks.shared_sum import RANK_BYTES, AsyncSum, HostSum, SharedSum, has_ordered_writes
from parallel.ranks.watchdog import Watchdog

T = TypeVar("T")
_TESTED_SUM_SIZES = 1, 1 << 21  # elements of the sums that test NCCL at startup
_TESTED_SHARED_ELEMENTS = 2_200_001  # float32: more than the slots hold, and a part of a piece
_TEST_S = 10.0  # seconds for that sum
_TIMED_BYTES = 4 << 20
_TIMED_RUNS = 3
COLLECTIVE_TIMEOUT = timedelta(hours=2)  # allows a rank to compute, or to wait for a user
# parts of the messages of gloo, NCCL and torch's store when a peer closes the connection
_CLOSED_CONNECTION_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "likely closed",
    "remote process exited",
    "ncclRemoteError",
)
RENDEZVOUS_TIMEOUT = timedelta(minutes=2)  # ranks started by a launcher arrive within seconds
_WARN_AFTER_S = 5.0  # seconds of waiting for the other ranks before a warning


class TensorParallelGroup:
    """The ranks of one tensor-parallel model.

    With one rank every collective is a no-op, so callers need no special case.
    """

    # sums in memory that this process's ranks share, if they can: all its groups use them
    shared_sum: ClassVar[SharedSum | None] = None

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        watchdog: Watchdog | None = None,
    ):
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self.watchdog = watchdog
        self.graph_capturer = GraphCapturer(self.device)
        # those of each rank's GPU, at least; None on CPUs, and if they are not known
        self.multiprocessors = _multiprocessors(self.device) if size == 1 else None

    @classmethod
    def from_environment(
        cls,
        device: str = "auto",
        warn: Callable[[str], None] | None = None,
    ) -> TensorParallelGroup:
        """Join the group that torchrun or `launch` describes in the environment.

        Without one, return a group of one rank.

        Args:
            device: auto, cpu or cuda.
            warn: called on rank 0 with a line if the driver finds a GPU that torch does not see, or
                if the ranks cannot share memory; by default a Python warning is issued.

        Raises TierForceError if CUDA is requested but missing, or has too few GPUs for the ranks.
        """
        warn = warn or partial(warnings.warn, stacklevel=3)
        info = rank_from_env()
        gpus = _usable_gpus(device, info.local_size)
        if gpus:
            # a launcher may make only its own GPU visible to each rank
            torch_device = torch.device("cuda", 0 if gpus == 1 else info.local_rank)
            torch.cuda.set_device(torch_device)
            if info.size > 1 and "GeForce" in torch.cuda.get_device_name(torch_device):
                # no peer access; patched drivers return wrong data
                os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        else:
            if device == "auto" and info.rank == 0 and (line := unseen_gpus()):
                warn(f"the processor does all the work: {line}")
            torch_device = torch.device("cpu")
        watchdog = None
        creates_group = info.size > 1 and not dist.is_initialized()
        if creates_group:
            store = _rendezvous(info)
            watchdog = Watchdog(info.rank, info.size, store)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpus else "gloo",
                store=store,
                rank=info.rank,
                world_size=info.size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            watchdog.start()
        group = cls(info.rank, info.size, torch_device, watchdog)
        if creates_group and gpus:
            _check_distinct_gpus(group)
            found = group.gather(_multiprocessors(torch_device))
            group.multiprocessors = min(each for each in found if each is not None)
            for count in _TESTED_SUM_SIZES:
                with group.sync_errors():  # a sum may be wrong on a single rank
                    _test_nccl(group, count)
        if creates_group:
            _share_memory(group, warn)
        return group

    def share(self, total: int, unit: int = 1) -> slice:
        """Return this rank's slice of `total` rows or columns, in whole units."""
        return share(total, self.rank, self.size, unit)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place, and return it."""
        return self.start_all_reduce(x)()

    def start_all_reduce(self, x: Tensor) -> AsyncSum:
        """Start to sum x over the ranks, in place; x must not be used before the wait returns."""
        if self.size == 1:
            return lambda: x
        shared_sum = self.shared_sum
        if shared_sum is not None and shared_sum.is_faster and self._may_share(x):
            with self._guarded():
                pending = shared_sum.start(x)
            return partial(self._finish, pending)
        # With more than two ranks, the order of summation depends on the size of the message and on
        # the position in it.
        parts = row_blocks(x) if self.size > 2 else (x,)
        with self._guarded():
            work = [dist.all_reduce(part, async_op=True) for part in parts]

        def wait() -> Tensor:
            for handle in work:
                handle.wait()  # on a GPU the stream waits, not the host
            return x

        return partial(self._finish, wait)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over the ranks: (T, N) -> (T, N * ranks).

        All ranks must hold the same number of columns.
        """
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._guarded():
            dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, value: T) -> T:
        """Return rank 0's small Python value, on every rank."""
        if self.size == 1:
            return value
        objects: list[Any] = [value]
        with self._guarded():
            dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
        return objects[0]

    def gather(self, value: T) -> list[T]:
        """Return the small Python values of all ranks, in rank order, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with self._guarded():
                dist.all_gather_object(values, value)
        return values

    def broadcast_ints(self, numbers: list[int], count: int) -> list[int]:
        """Return rank 0's `count` integers on every rank, in one message."""
        if self.size == 1:
            return numbers
        message = torch.tensor(numbers if self.rank == 0 else [0] * count, dtype=torch.int64)
        with self._guarded():
            dist.broadcast(message, src=0)
        return message.tolist()

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Raise on all ranks an error raised on any, so that no rank waits for one that has left.

        A TierForceError is shared; if there are several, that of the lowest rank. Running out of
        GPU or host memory becomes an InsufficientMemoryError: it can happen despite a plan, which
        knows neither other processes' use nor fragmentation.
        """
        own_error: TierForceError | None = None
        try:
            yield
        except TierForceError as error:
            own_error = error
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            own_error = InsufficientMemoryError(
                f"rank {self.rank}: out of memory: {one_line(error)}"
            )
        first_error = self._first_error(own_error)
        try:
            if first_error:
                raise first_error
        finally:
            # the traceback refers to this frame: a cycle that would keep the block's objects alive
            del own_error, first_error

    def close(self) -> None:
        """Leave the group; no collective may follow."""
        if self.watchdog:
            self.watchdog.stop()
        if self.size > 1 and dist.is_initialized():
            if self.shared_sum is not None:
                self.shared_sum.close()
                TensorParallelGroup.shared_sum = None
            self.graph_capturer.reset()
            dist.destroy_process_group()

    def _may_share(self, x: Tensor) -> bool:
        """Return whether x may be summed in shared memory: the same on all ranks."""
        return (
            x.nbytes >= LARGE_SUM_BYTES
            and x.is_contiguous()
            and not self.graph_capturer.is_capturing
            # with two ranks there is only one order of summation
            and (self.size == 2 or not is_batch_invariant())
        )

    def _finish(self, pending: AsyncSum) -> Tensor:
        """Wait for a sum in progress, and return its result."""
        with self._guarded():
            return pending()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise RankLost in place of the errors of any backend when a peer's connection closes."""
        if self.watchdog:
            self.watchdog.arrive()
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise _rank_lost(one_line(error)) from error
        finally:
            if self.watchdog:
                self.watchdog.leave()

    def _first_error(self, own_error: TierForceError | None) -> TierForceError | None:
        """Return the error of the lowest rank that has one; this rank's own is `own_error`."""
        if self.size == 1:
            return own_error
        errors = self.gather(own_error and (type(own_error), str(own_error)))
        first = next((error for error in errors if error), None)
        if first is None or first == errors[self.rank]:
            return own_error
        kind, message = first
        return kind(message)


def _rank_lost(reason: str) -> RankLost:
    """Return the error for a collective that failed for `reason`.

    On a GPU this rank may be at fault itself, for instance by an invalid setting of NCCL.
    """
    if any(phrase in reason for phrase in _CLOSED_CONNECTION_MESSAGES):
        return RankLost("another rank ended unexpectedly (killed, or out of memory).")
    return RankLost(f"the ranks cannot exchange data any more ({reason}).")


def ints_to_device_async(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return integers (N,) on the device, without waiting for the device."""
    # numpy is faster: torch converts a list element by element
    return copy_to_device_async(torch.from_numpy(np.array(numbers, dtype=np.int64)), device)


def copy_to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on the device, without waiting for the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # without pinning, the host would wait


def _rendezvous(info: RankInfo) -> dist.Store:
    """Return the store shared by the ranks. Raises TierForceError if they do not all arrive."""
    timer = Timer(_WARN_AFTER_S, _warn_of_waiting, (info,))
    timer.daemon = True
    timer.start()
    try:
        store, _, _ = next(
            dist.rendezvous("env://", info.rank, info.size, timeout=RENDEZVOUS_TIMEOUT)
        )
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TierForceError(
            f"rank {info.rank} of {info.size} does not find the others at {address} "
            f"({one_line(error)}): start all of them, or unset RANK and WORLD_SIZE to run alone."
        ) from error
    finally:
        timer.cancel()
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return store


def _warn_of_waiting(info: RankInfo) -> None:
    """Warn that this process waits for other ranks because of its environment."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.append("TORCHELASTIC_RUN_ID")
    warn_from_rank(
        info.rank,
        f"waiting for the other ranks at {address}, for up to {RENDEZVOUS_TIMEOUT.seconds} s: "
        f"RANK={info.rank} and WORLD_SIZE={info.size} in the environment say that this is one of "
        f"{info.size} processes. If there are no others, stop it and unset "
        f"{', '.join(names[:-1])} and {names[-1]}.",
    )


def _usable_gpus(device: str, ranks: int) -> int:
    """Return the number of GPUs, 0 to run on a CPU. Raises TierForceError for too few."""
    if device not in ("auto", "cpu", "cuda"):
        raise TierForceError(f"`device` {device} is not known: use auto, cpu or cuda.")
    if device == "cpu":
        return 0
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus == 0:
        hint = "Use `device` cpu, or install a CUDA build of torch."
        raise TierForceError(f"`device` cuda, but torch sees no GPU here. {unseen_gpus() or hint}")
    has_private_gpu = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if 0 < gpus < ranks and not has_private_gpu:
        raise TierForceError(
            f"{ranks} ranks, but only {gpus} GPUs: use `gpus` {gpus}, or `device` cpu."
        )
    return gpus


def _multiprocessors(device: torch.device) -> int | None:
    """Return the number of a GPU's multiprocessors; None for a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check_distinct_gpus(group: TensorParallelGroup) -> None:
    """Raise TierForceError on all ranks if two of them use the same GPU: NCCL would hang.

    GPUs of different machines may have the same address.
    """
    gpus = group.gather((socket.gethostname(), gpu_address(group.device)))
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first != rank:
            host, address = gpu
            raise TierForceError(
                f"ranks {first} and {rank} have the same GPU ({address} of {host}): use `gpus` "
                f"{sum(name == host for name, _ in set(gpus))}, or let CUDA_VISIBLE_DEVICES "
                "name a different one for each rank."
            )


def _test_numbers(group: TensorParallelGroup, count: int) -> tuple[Tensor, Tensor]:
    """Return this rank's numbers (count,) to test a sum with, and the sum over the ranks."""
    numbers = torch.arange(count, device=group.device, dtype=torch.float32) % 1024
    return numbers + group.rank, group.size * numbers + group.size * (group.size - 1) // 2


def _test_nccl(group: TensorParallelGroup, count: int) -> None:
    """Start NCCL and check that it sums `count` elements correctly.

    Starting it before the plan lets the plan account for its memory. Large and small sums use
    different algorithms. Raises TierForceError.
    """
    numbers, expected = _test_numbers(group, count)
    try:
        dist.all_reduce(numbers)
        is_correct = torch.equal(numbers, expected)  # raises pending errors of NCCL
    except RuntimeError as error:
        raise TierForceError(
            f"NCCL does not start on these GPUs ({one_line(error)}); NCCL_DEBUG=INFO shows more."
        ) from error
    if not is_correct:
        raise TierForceError(
            f"NCCL sums {count} numbers wrongly on these GPUs, as happens with drivers that "
            "are patched for peer access: set NCCL_P2P_DISABLE=1, or use one GPU."
        )


def _share_memory(group: TensorParallelGroup, warn: Callable[[str], None]) -> None:
    """Sum large tensors through shared memory, if that is possible here and the faster way.

    Raises RankLost.
    """
    TensorParallelGroup.shared_sum = None
    try:
        shared_sum = open_shared_sum(group)
    except RankLost:
        raise
    except TierForceError as error:
        if group.rank == 0:
            backend = "NCCL" if group.device.type == "cuda" else "gloo"
            warn(f"large all-reduces go through {backend}: {error}.")
        return
    if shared_sum is not None:
        TensorParallelGroup.shared_sum = shared_sum
        _choose_faster_sum(group, shared_sum)


def open_shared_sum(group: TensorParallelGroup) -> SharedSum | None:
    """Return tested sums in memory that all ranks share; None where they are not made.

    Raises TierForceError, on all ranks, if the system refuses or the test fails.
    """
    is_cuda = group.device.type == "cuda"
    if not is_cuda and not has_ordered_writes():
        return None
    memory = SharedMemory.open(group, RANK_BYTES, gpu_node(group.device) if is_cuda else None)
    if memory is None:
        return None
    shared_sum: SharedSum | None = None
    try:
        with group.sync_errors():
            shared_sum = CudaSum(memory, group.device) if is_cuda else HostSum(memory)
        numbers, expected = _test_numbers(group, _TESTED_SHARED_ELEMENTS)
        with group.sync_errors():
            _test_shared_sum(shared_sum, numbers, expected)
    except TierForceError:
        memory.release()
        (shared_sum or memory).close()
        raise
    return shared_sum


def _test_shared_sum(shared_sum: SharedSum, numbers: Tensor, expected: Tensor) -> None:
    """Raise TierForceError unless a sum of `numbers` is the expected one."""
    try:
        pending = shared_sum.start(numbers)
        if not shared_sum.drain(_TEST_S):
            raise TierForceError("a sum in shared memory does not end")
        if not torch.equal(pending(), expected):
            raise TierForceError("a sum in shared memory is wrong")
    except RuntimeError as error:
        raise TierForceError(f"a sum in shared memory fails ({one_line(error)})") from error


def _choose_faster_sum(group: TensorParallelGroup, shared_sum: SharedSum) -> None:
    """Choose between shared memory and the backend for large all-reduces, by timing both."""
    x = torch.zeros(_TIMED_BYTES // 2, dtype=torch.bfloat16, device=group.device)
    seconds = {}
    for is_shared in (False, True):
        shared_sum.is_faster = is_shared
        times = []
        for _ in range(1 + _TIMED_RUNS):
            started = time.perf_counter()
            group.all_reduce(x)[0].item()
            times.append(time.perf_counter() - started)
        seconds[is_shared] = max(group.gather(min(times[1:])))
    shared_sum.is_faster = seconds[True] < seconds[False]
