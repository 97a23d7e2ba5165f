"""Fixtures of all tests: checkpoints built once per session, links that are closed at the end, and
a GPU or a stand-in for one.
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

if not torch.cuda.is_available():  # read when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    """Restore the handler of SIGINT, and pin each worker to a core.

    Background jobs of a shell ignore SIGINT, and processes that tests start would inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _pin_to_core()


def pytest_collection_finish() -> None:
    """Exempt the objects of libraries and tests from garbage collection: they are never freed, and
    every collection would traverse them.
    """
    gc.collect()
    gc.freeze()


def _pin_to_core() -> None:
    """Pin a worker, and all processes that it starts, to its own core.

    An engine uses as many threads as it has cores; those of two workers would wait for each other
    and take three times as long.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(worker.removeprefix("gw"))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> Iterator[Machine | None]:
    """Return the stand-in for a GPU in tests marked `cuda`, None with a real one.

    Tests marked `cuda(standin=False)` are skipped without a real GPU.
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
    """Seed every test, whether it runs alone or not, and use one thread: on a busy machine two wait
    for each other and take ten times as long.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `build_checkpoint` without its folder: checkpoints are built once per arguments, and
    must not be changed.
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
    """Yield the link that an indirect parameter names."""
    test_link = make_test_link(request.param)
    yield test_link
    test_link.close()
