"""Fixtures all tests share: checkpoints built once a session, links that are closed, and a GPU or a
stand-in for one.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from offload.memory.link import Link
from standin import Machine, gpu_or_standin
from support.links import make_test_link
from support.models import build_checkpoint

if not torch.cuda.is_available():  # triton looks when it is imported first
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    """Let interrupts interrupt, and keep each worker to a core.

    What a shell starts in the background ignores SIGINT, and so would all that tests start.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _keep_to_a_core()


def pytest_collection_finish() -> None:
    """Let the garbage collector pass by what libraries and tests are made of: it is looked at again
    and again, and stays.
    """
    gc.collect()
    gc.freeze()


def _keep_to_a_core() -> None:
    """Keep a worker, and all that it starts, to a core of its own.

    An engine takes as many threads as it has cores; those of two workers would wait for each other,
    three times as long.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(worker.removeprefix("gw"))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> Iterator[Machine | None]:
    """For tests marked `cuda`: a stand-in where there is no GPU, which it then is.
    `cuda(standin=False)` wants the real one.
    """
    mark = request.node.get_closest_marker("cuda")
    if mark is None:
        yield None
        return
    if not mark.kwargs.get("standin", True) and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    with gpu_or_standin() as machine:
        yield machine


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Every test draws the same numbers, alone or not. One thread: on a busy machine two wait for
    each other, ten times as long.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`build_checkpoint` less the folder: the same arguments give the same folder, built once. Not
    to be written to.
    """
    built: dict[str, Path] = {}

    def get(family: str = "llama", **arguments: object) -> Path:
        key = repr((family, sorted(arguments.items())))
        if key not in built:
            built[key] = build_checkpoint(tmp_path_factory.mktemp(family), family, **arguments)
        return built[key]

    return get


@pytest.fixture
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """The link that an indirect parameter names."""
    made = make_test_link(request.param)
    yield made
    made.close()
