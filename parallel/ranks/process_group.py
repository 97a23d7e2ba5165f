"""The process group: with the link, the only place that knows devices and backends."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import InsufficientMemoryError, TierForceError, is_out_of_memory, one_line
from offload.memory.numa import gpu_address
from parallel.batch_invariant import blocks_of
from parallel.ranks.driver import unseen_gpus
from parallel.ranks.environment import RankInfo, RankLost, rank_from_env, warn_from_rank
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.partition import share
from parallel.ranks.watchdog import Watchdog

T = TypeVar("T")
AsyncSum = Callable[[], Tensor]  # waits for a sum over the ranks that is under way, and returns it
_TESTED_SUM_SIZES = 1, 1 << 21  # numbers that are summed at the start
COLLECTIVE_TIMEOUT = timedelta(hours=2)  # for a rank that computes, or waits for a person
# how gloo, NCCL and torch's store say that a connection's other end is gone
_CLOSED_CONNECTION_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "likely closed",
    "remote process exited",
    "ncclRemoteError",
)
RENDEZVOUS_TIMEOUT = timedelta(minutes=2)  # ranks that a launcher starts are there in seconds
_WARN_AFTER_S = 5.0  # seconds after which a rank says that it waits for them


class TensorParallelGroup:
    """The ranks of one tensor-parallel model.

    With one rank every collective is a no-op, so callers never ask.
    """

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

    @classmethod
    def from_environment(
        cls,
        device: str = "auto",
        warn: Callable[[str], None] | None = None,
    ) -> TensorParallelGroup:
        """Join the group that torchrun, or our own launcher, describes in the environment.

        Where it describes none, this rank is alone.

        Args:
            device: auto, cpu or cuda.
            warn: called on rank 0 with a line where a GPU that the driver knows is not used,
                because torch does not see it; by default a warning of Python.

        Raises TierForceError when CUDA is asked for and missing, or has too few GPUs for the ranks.
        """
        place = rank_from_env()
        gpus = _usable_gpus(device, place.local_size)
        if gpus:
            # a launcher may show each rank a GPU of its own alone
            where = torch.device("cuda", 0 if gpus == 1 else place.local_rank)
            torch.cuda.set_device(where)
            if place.size > 1 and "GeForce" in torch.cuda.get_device_name(where):
                # no peer access; patched drivers return wrong data
                os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        else:
            if device == "auto" and place.rank == 0 and (line := unseen_gpus()):
                line = f"the processor does all the work: {line}"
                if warn is None:
                    warnings.warn(line, stacklevel=2)
                else:
                    warn(line)
            where = torch.device("cpu")
        watchdog = None
        starts = place.size > 1 and not dist.is_initialized()
        if starts:
            store = _rendezvous(place)
            watchdog = Watchdog(place.rank, place.size, store)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpus else "gloo",
                store=store,
                rank=place.rank,
                world_size=place.size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            watchdog.start()
        group = cls(place.rank, place.size, where, watchdog)
        if starts and gpus:
            _check_distinct_gpus(group)
            for count in _TESTED_SUM_SIZES:
                with group.sync_errors():  # a sum may be wrong on one rank alone
                    _test_nccl(group, count)
        return group

    def share(self, total: int, unit: int = 1) -> slice:
        """Return this rank's part of `total` rows or columns, in whole units."""
        return share(total, self.rank, self.size, unit)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place, and return it."""
        return self.start_all_reduce(x)()

    def start_all_reduce(self, x: Tensor) -> AsyncSum:
        """Start to sum x over the ranks, in place; nobody may touch x before it is waited for."""
        if self.size == 1:
            return lambda: x
        # the order in which several ranks sum up goes by size, and by the place in what is sent
        parts = blocks_of(x) if self.size > 2 else (x,)
        with self._guarded():
            work = [dist.all_reduce(part, async_op=True) for part in parts]

        def wait() -> Tensor:
            with self._guarded():
                for each in work:
                    each.wait()  # on a GPU the stream waits, not the host
            return x

        return wait

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over the ranks: (T, N) -> (T, N * ranks).

        Every rank holds the same number of columns.
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
        box: list[Any] = [value]
        with self._guarded():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's small Python value, by rank, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with self._guarded():
                dist.all_gather_object(values, value)
        return values

    def broadcast_ints(self, numbers: list[int], count: int) -> list[int]:
        """Return rank 0's `count` whole numbers on every rank, in one message."""
        if self.size == 1:
            return numbers
        message = torch.tensor(numbers if self.rank == 0 else [0] * count, dtype=torch.int64)
        with self._guarded():
            dist.broadcast(message, src=0)
        return message.tolist()

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Raise on all ranks what the block raised on any, so that none waits for one that left.

        A TierForceError is shared; of several, the lowest rank's. Memory that runs out, a GPU's or
        the host's, becomes a InsufficientMemoryError: no plan knows what others take, or how memory is cut up.
        """
        own: TierForceError | None = None
        try:
            yield
        except TierForceError as error:
            own = error
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            own = InsufficientMemoryError(f"rank {self.rank}: out of memory: {one_line(error)}")
        shared = self._first_error(own)
        try:
            if shared:
                raise shared
        finally:
            del own, shared  # which its traceback would hold, and with it what the block had

    def close(self) -> None:
        """Leave the group; no collective can follow."""
        if self.watchdog:
            self.watchdog.stop()
        if self.size > 1 and dist.is_initialized():
            self.graph_capturer.reset()
            dist.destroy_process_group()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise RankLost for what every backend raises when a peer's connection closes."""
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

    def _first_error(self, own: TierForceError | None) -> TierForceError | None:
        """Return the error of the lowest rank that has one; where that is this rank's, `own`."""
        if self.size == 1:
            return own
        errors = self.gather(own and (type(own), str(own)))
        first = next((error for error in errors if error), None)
        if first is None or first == errors[self.rank]:
            return own
        kind, text = first
        return kind(text)


def _rank_lost(reason: str) -> RankLost:
    """Return what a collective that failed for this reason is to raise.

    On a GPU it may be a fault of this rank's own, such as a setting that NCCL does not like.
    """
    if any(words in reason for words in _CLOSED_CONNECTION_MESSAGES):
        return RankLost("another rank ended unexpectedly (killed, or out of memory).")
    return RankLost(f"the ranks cannot exchange data any more ({reason}).")


def ints_to_device_async(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers (N,) in the device's memory, without waiting for the device's work."""
    # by way of numpy: torch reads a list number by number
    return copy_to_device_async(torch.from_numpy(np.array(numbers, dtype=np.int64)), device)


def copy_to_device_async(on_host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host in the device's memory, without waiting for the device's work."""
    if device.type == "cpu":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)  # unpinned, the host would wait


def _rendezvous(place: RankInfo) -> dist.Store:
    """Return the store through which the ranks find each other. Raises TierForceError."""
    waiting = Timer(_WARN_AFTER_S, _warn_of_waiting, (place,))
    waiting.daemon = True
    waiting.start()
    try:
        store, _, _ = next(
            dist.rendezvous("env://", place.rank, place.size, timeout=RENDEZVOUS_TIMEOUT)
        )
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TierForceError(
            f"rank {place.rank} of {place.size} does not find the others at {address} "
            f"({one_line(error)}): start all of them, or unset RANK and WORLD_SIZE to work alone."
        ) from error
    finally:
        waiting.cancel()
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return store


def _warn_of_waiting(place: RankInfo) -> None:
    """Warn on standard error that the environment makes this process wait for others."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.append("TORCHELASTIC_RUN_ID")
    warn_from_rank(
        place.rank,
        f"waiting for the other ranks at {address}, for {RENDEZVOUS_TIMEOUT.seconds} s at most: "
        f"RANK={place.rank} and WORLD_SIZE={place.size} in the environment say that this is one of "
        f"{place.size} processes. If no others are to come, stop it and unset "
        f"{', '.join(names[:-1])} and {names[-1]}.",
    )


def _usable_gpus(device: str, ranks: int) -> int:
    """Return the number of GPUs to run on, 0 for a CPU. Raises TierForceError."""
    if device not in ("auto", "cpu", "cuda"):
        raise TierForceError(f"`device` {device} is not known: use auto, cpu or cuda.")
    if device == "cpu":
        return 0
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus == 0:
        hint = "Use `device` cpu, or install a CUDA build of torch."
        raise TierForceError(f"`device` cuda, but torch sees no GPU here. {unseen_gpus() or hint}")
    has_own = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if 0 < gpus < ranks and not has_own:
        raise TierForceError(
            f"{ranks} ranks, but only {gpus} GPUs: use `gpus` {gpus}, or `device` cpu."
        )
    return gpus


def _check_distinct_gpus(group: TensorParallelGroup) -> None:
    """Raise TierForceError, on all ranks, where two of them have the same GPU: NCCL would hang.

    GPUs of two machines may have the same address.
    """
    gpus = group.gather((socket.gethostname(), gpu_address(group.device)))
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first != rank:
            host, address = gpu
            raise TierForceError(
                f"ranks {first} and {rank} have the same GPU ({address} of {host}): use `gpus` "
                f"{sum(other == host for other, _ in set(gpus))}, or let CUDA_VISIBLE_DEVICES "
                "name another for each rank."
            )


def _test_nccl(group: TensorParallelGroup, count: int) -> None:
    """Start NCCL now, which takes memory that is not planned yet, and see that it sums right.

    It goes other ways for large sums than for small ones. Raises TierForceError.
    """
    numbers = torch.arange(count, device=group.device, dtype=torch.float32) % 1024
    wanted = group.size * numbers + group.size * (group.size - 1) // 2
    numbers += group.rank
    try:
        dist.all_reduce(numbers)
        is_right = torch.equal(numbers, wanted)  # where NCCL's faults show that came meanwhile
    except RuntimeError as error:
        raise TierForceError(
            f"NCCL does not start on these GPUs ({one_line(error)}); NCCL_DEBUG=INFO shows more."
        ) from error
    if not is_right:
        raise TierForceError(
            f"NCCL sums {count} numbers wrongly on these GPUs, as it does with drivers that "
            "are patched for peer access: set NCCL_P2P_DISABLE=1, or use one GPU."
        )
