"""The process group: the only place, with the link, that knows which devices and which backend
there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import FitError, TierForceError, is_out_of_memory, one_line
from parallel.environment import RankLost, place_of

T = TypeVar("T")


class Group:
    """The ranks of one tensor-parallel model. With one rank every collective is a no-op, so callers
    never ask.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None):
        self.rank, self.size, self.device = rank, size, device or torch.device("cpu")
        self.recorder = Recorder(self.device)

    @classmethod
    def from_environment(cls, device: str = "auto") -> Group:
        """Join the group that torchrun (or our own launcher) describes in the environment; alone
        where there is none.

        `device`: auto, cpu or cuda. Raises TierForceError when CUDA is asked for and missing or too
        small for the ranks.
        """
        place = place_of()
        rank, size, local, local_size = place.rank, place.size, place.local_rank, place.local_size
        if device not in ("auto", "cpu", "cuda"):
            raise TierForceError(f"--device {device} is not known: use auto, cpu or cuda.")
        gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
        if device == "cuda" and gpus == 0:
            raise TierForceError(
                "--device cuda, but torch sees no GPU here. Use --device cpu, or install a CUDA "
                "build of torch."
            )
        if 0 < gpus < local_size:
            raise TierForceError(
                f"{local_size} ranks, but only {gpus} GPUs: use --gpus {gpus}, or --device cpu."
            )
        where = torch.device("cuda", local) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(where)
            if "GeForce" in torch.cuda.get_device_name(where):
                # no peer access; patched drivers return wrong data
                os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
        if size > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(hours=2))
            if gpus:
                _start_nccl(where)
        return cls(rank, size, where)

    def share(self, total: int) -> slice:
        """This rank's part of `total` rows or columns."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        return self.start_all_reduce(x)()

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to sum over ranks, in place. What is returned waits for the sum; x is not to be
        touched before.
        """
        if self.size == 1:
            return lambda: x
        with _peers():
            work = dist.all_reduce(x, async_op=True)

        def wait() -> Tensor:
            with _peers():
                work.wait()  # on a GPU the stream waits, not the host
            return x

        return wait

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over ranks; every rank holds the same number of columns.
        (T, N) -> (T, N * ranks).
        """
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with _peers():
            dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, value: T) -> T:
        """Rank 0's small Python value, on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        with _peers():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's small Python value, by rank, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with _peers():
                dist.all_gather_object(values, value)
        return values

    def broadcast_numbers(self, numbers: list[int], count: int) -> list[int]:
        """Rank 0's `count` whole numbers on every rank, in one message: the verdict of a round."""
        if self.size == 1:
            return numbers
        message = torch.tensor(numbers if self.rank == 0 else [0] * count, dtype=torch.int64)
        with _peers():
            dist.broadcast(message, src=0)
        return message.tolist()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What raises a TierForceError on any rank raises the lowest such rank's error on all: no
        rank waits for one that left.

        Memory that runs out, a GPU's or the host's, is a FitError: plans cannot know what others
        take, or how memory is cut up.
        """
        found: TierForceError | None = None
        try:
            yield
        except TierForceError as error:
            found = error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found = FitError(f"rank {self.rank}: out of memory: {one_line(error)}")
        if self.size > 1:
            errors = self.gather(found and (type(found), str(found)))
            first = next((error for error in errors if error), None)
            if first and first != errors[self.rank]:
                found = first[0](first[1])
        if found:
            raise found

    def records(self) -> bool:
        """Whether sums over the ranks can be recorded and replayed here, by trying. All ranks call
        it.
        """
        works = self.device.type == "cuda" and (
            self.size == 1 or "cuda:nccl" in str(dist.get_backend_config())
        )
        if not all(self.gather(works)):
            return False
        x, again = torch.ones(8, device=self.device), None

        def doubled() -> Tensor:
            return self.all_reduce(x * 2)

        with suppress(RuntimeError, TierForceError):
            doubled()
            again = self.recorder.record(doubled)
        # a collective is replayed by all or by none
        if not all(self.gather(again is not None)) or again is None:
            return False
        right = False
        with suppress(RuntimeError, TierForceError):
            x.fill_(3.0)
            right = bool((again() == 6 * self.size).all())
        self.recorder.forget()
        return all(self.gather(right))

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Recorder:
    """Records what is launched on a GPU; on a CPU there is nothing to record."""

    def __init__(self, device: torch.device):
        self.device = device
        # why nothing more can be recorded: a capture that fails leaves torch's state in doubt
        self.broken: str | None = None
        self._pool: Any = None  # memory that the recordings of one text share
        self._stream: Any = None  # one for all: cuBLAS keeps memory for each that it has met

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`function`, to be called again and again: on a GPU as one CUDA graph, collectives
        included, which writes its result to the same place each time; elsewhere as it is. It must
        have run before. Raises RuntimeError for what cannot be captured.
        """
        if self.device.type != "cuda":
            return function
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # thread_local: others, NCCL's watchdog for one, may go on calling what a capture must
            # not
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                out = function()
        except BaseException as error:
            torch.cuda.set_stream(before)  # which a capture that fails to end does not do
            # nor, before torch 2.13, does it let the allocator go, which then frees no cached
            # memory
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)
            self.broken = repr(error.__cause__ or error)
            raise

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def forget(self) -> None:
        """The next recordings get memory of their own: what others shared goes with the last of
        them.
        """
        self._pool = None


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers (N,) in the device's memory, without waiting for what the device is at."""
    found = torch.tensor(numbers, dtype=torch.int64)
    # unpinned, the host would wait
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _start_nccl(device: torch.device) -> None:
    """Now, for it takes memory, and none is planned yet. Raises TierForceError."""
    try:
        dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise TierForceError(
            f"NCCL does not start on these GPUs ({one_line(error)}); NCCL_DEBUG=INFO shows more."
        ) from error


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what every backend raises when a peer's connection closes
        if is_out_of_memory(error):
            raise
        raise RankLost("another rank ended unexpectedly (killed, or out of memory).") from error
