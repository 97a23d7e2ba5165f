"""Run a function on several ranks: gloo over the loopback, started as torchrun does."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallel.ranks import process_group
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.process_group import TensorParallelGroup
from parallel.ranks.shared_sum import SharedSum

# modules that take seconds to import, preloaded for ranks and for commands forked in tests
PRELOAD = [
    "torch.distributed.run",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.streamers",
    "accelerate",
    "parallel.ranks.launch",
    "decoding.engine.engine",
    "decoding.probe.probe",
    "decoding.app.main",
    "decoding.app.commands",
    "decoding.app.interactive.generate",
    "decoding.app.batch.summarize",
    "decoding.app.server.run",
    "pydantic.type_adapter",
    "typer.rich_utils",
]


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a module-level function in `size` new processes, and return each rank's result.

    The processes have torchrun's environment. The function joins the group itself, as a real rank
    does: `TensorParallelGroup.from_environment("cpu")`. An exception of a rank is raised here
    (torch.multiprocessing.ProcessRaisedException, with the rank's traceback as its message). The
    processes are forked from a server that imports torch once per session, which saves seconds per
    process; they inherit the environment in which the server was started.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(PRELOAD)
        mp.start_processes(
            _rank,
            (size, free_port(), Path(folder), function, args),
            size,
            start_method="forkserver",
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def share_all_sums(group: TensorParallelGroup) -> SharedSum:
    """Sum through shared memory whatever the size and however slow, in the rest of the process."""
    assert group.shared_sum is not None
    group.shared_sum.is_faster = True
    process_group.LARGE_SUM_BYTES = 1
    return group.shared_sum


def leave_group() -> None:
    """Leave this process's group if it is in one, even after a failure."""
    if dist.is_initialized():
        for each in gc.get_objects():  # a graph with an NCCL collective would block the end
            if type(each) is GraphCapturer:
                each.reset()
        dist.destroy_process_group()


def freeze_imports() -> None:
    """Exempt the objects that a forked process inherited from garbage collection.

    A collection writes to all of them, and the kernel would copy their pages: a third of a second.
    """
    gc.freeze()


def free_port() -> int:
    """Return a free port on the loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank(
    rank: int,
    size: int,
    port: int,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    freeze_imports()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    try:
        torch.save(function(*args), folder / f"{rank}.pt")
    finally:
        leave_group()
