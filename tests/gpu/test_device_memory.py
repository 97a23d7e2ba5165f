"""Device memory that no plan knows: a GPU loads modules, and graphs hold their launches.

The stand-in counts both. What a real GPU takes, `python -m bench gpu` measures.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import GREEDY, Engine, Sampling, Settings
from decoding.engine import levels, session_manager, warm_up
from offload.errors import InsufficientMemoryError
from offload.memory.cuda_link import CudaLink
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from standin import Machine, gpu_or_standin
from standin.machine import MODULE_BYTES
from support.engines import DEMO, Pair
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except

pytestmark = pytest.mark.cuda
PROMPT = prompt("argparse")


@pytest.fixture
def machine(gpu: Machine | None, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A stand-in that has loaded nothing."""
    if gpu is None:
        pytest.skip("only a stand-in counts modules")
    monkeypatch.setattr(warm_up, "_done", set())
    return gpu


@contextmanager
def open_engine(mode: str, dtype: str = "bfloat16", **options: Any) -> Iterator[Engine]:
    settings = Settings(mode=mode, dtype=dtype, **{"retrieval_budget": 128, **options})
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("mode", "dtype", "graphs"),
    slow_except(
        [
            ("plain", "float32", False),
            ("hierarchical", "float32", True),
            ("auto", "bfloat16", True),
            ("split-hierarchical", "bfloat16", True),
            ("split-hierarchical", "bfloat16", False),
        ],
        0,
    ),
)
def test_requests_load_hardly_anything(
    mode: str, dtype: str, graphs: bool, machine: Machine
) -> None:
    """Of about a hundred kernels that they launch, at most four are not in the warm-up."""
    with open_engine(mode, dtype, graphs=graphs, gpu_kv_layers=2) as engine:
        loaded = set(machine.modules)
        for tokens in (300, 1500):
            list(engine.generate(PROMPT[:tokens], 20, Sampling(0.6, top_p=0.9)))
    assert len(loaded) > 50
    assert len(machine.modules - loaded) <= 4


def test_an_engine_like_an_earlier_one_is_not_warmed_up_again(machine: Machine) -> None:
    counts = []
    for _ in range(2):
        started = len(machine.launches)
        with open_engine("plain", gpu_kv_layers=2):
            counts.append(len(machine.launches) - started)
    assert 5 * counts[1] < counts[0]  # the second one loads weights alone


@pytest.mark.slow
@pytest.mark.parametrize("error", [InsufficientMemoryError, torch.OutOfMemoryError])
def test_without_memory_for_it_there_is_no_warm_up(
    error: type[Exception], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are refused, or fail, in their own words."""

    failed = []

    def fail(*_: Any) -> None:
        failed.append(1)
        raise error("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(warm_up, "_run_level", fail)
        with open_engine("hierarchical", gpu_kv_layers=2) as engine:
            expected = list(engine.generate(PROMPT[:300], 7, GREEDY))
    assert failed
    assert not warm_up._done
    with open_engine("plain", gpu_kv_layers=2) as engine:
        assert list(engine.generate(PROMPT[:300], 7, GREEDY)) == expected


@pytest.mark.parametrize(
    "options",
    slow_except([{}, {"chunk_size": 5000, "retrieval_budget": None}, {"gpu_kv_layers": 2}], 1),
)
def test_the_warm_up_leaves_no_allocations(
    options: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collection of cycles: the first request's memory is measured right after it."""
    mode, allocated = "plain" if "chunk_size" in options else "split-hierarchical", []
    launched = []
    for warms in (False, True):
        with monkeypatch.context() as patch:
            if not warms:
                patch.setattr(session_manager, "warm_up", lambda runtime: None)
            gc.collect()
            gc.disable()
            try:
                started = len(machine.launches)
                with open_engine(mode, **options):
                    allocated.append(torch.cuda.memory_allocated())
                    launched.append(len(machine.launches) - started)
            finally:
                gc.enable()
    assert launched[0] < launched[1]
    assert allocated[0] == allocated[1]
    assert not machine.pinned


@pytest.mark.parametrize(("drafted", "warms"), [(40, True), (512, False)])
def test_a_model_with_a_short_context_opens(
    drafted: int, warms: bool, machine: Machine, checkpoint: Callable[..., Path]
) -> None:
    """It has 512 positions; two of the longest drafts and a prompt may need more."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    folder, ran = checkpoint(), []
    pair = Pair(folder, folder, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "_run", lambda *_, **__: ran.append(1) or True)
        with pair.engine("speculative", num_draft_tokens=drafted):
            assert bool(ran) == warms


@pytest.mark.slow
def test_ranks_with_different_drafts_warm_up_together() -> None:
    """A rank without a draft cannot tell two engines apart, and the first rank can."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    (first, counts), (_, others) = run_ranks(2, open_two_engines)
    assert first[0] == first[1]
    assert min(counts + others) > 0


def open_two_engines() -> tuple[list[list[int]], list[int]]:
    """Return the outputs of engines with two drafts, and what each launched when it was opened."""
    outputs, launched = [], []
    with gpu_or_standin() as machine:
        group = TensorParallelGroup.from_environment("cuda")
        pair = Pair(DEMO / "target", DEMO / "draft", group)
        alone = TensorParallelGroup(device=group.device)
        for draft in ("draft", "target"):
            if group.rank == 0:
                pair.draft = load_model(DEMO / draft, alone, "float32")
            started = len(machine.launches) if machine is not None else -1
            with pair.engine("speculative", gpu_kv_layers=1, num_draft_tokens=4) as engine:
                launched.append(len(machine.launches) - started if machine is not None else 1)
                outputs.append(list(engine.generate(PROMPT[:300], 7, GREEDY)))
    return outputs, launched


def test_a_full_gpu_is_not_warmed_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it runs")

    monkeypatch.setattr(CudaLink, "device_available", lambda _: 1000)
    monkeypatch.setattr(warm_up, "SequenceState", fail)
    with (
        open_engine("plain", gpu_kv_layers=2) as engine,
        pytest.raises(InsufficientMemoryError, match="this job needs"),
    ):
        list(engine.generate(PROMPT[:300], 7, GREEDY))


@pytest.mark.slow
def test_graphs_take_no_memory_from_later_plans(machine: Machine) -> None:
    with open_engine("hierarchical", gpu_kv_layers=2) as engine:
        memory = engine.sessions.memory
        first = memory.now().device
        list(engine.generate(PROMPT[:300], 7, GREEDY))
        graphs = engine.stats.cuda_graphs
        assert graphs is not None
        assert graphs["bytes"] == machine.driver_bytes - len(machine.modules) * MODULE_BYTES > 1e6
        # the difference is the buffers in which they leave logits
        assert memory.now().device == pytest.approx(first, abs=1 << 20)


@pytest.mark.slow
def test_plans_fit_after_another_process_has_taken_memory(machine: Machine) -> None:
    """The memory of graphs is not free: the plan of the first request may not fit any more."""
    with open_engine("hierarchical", gpu_kv_layers=2) as engine:
        list(engine.generate(PROMPT[:300], 7, GREEDY))
        slots, graphs = engine.sessions.slots, engine.sessions.executor.graphs
        assert graphs.nbytes > 1e6
        free = machine.limit - machine.allocated - machine.driver_bytes
        machine.limit -= free - graphs.nbytes  # as much is free as graphs have
        available = graphs.nbytes + slots.reusable_bytes
        assert engine.sessions.memory.now().device <= 0.95 * available
        machine.limit = machine.memory


@pytest.mark.slow
def test_graphs_have_a_limited_share_of_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards that were not captured are launched, with the same results."""
    outputs, replayed = [], []
    for share in (0.05, 1e-9, 0.0):
        monkeypatch.setattr(levels, "MAX_GRAPH_SHARE", share)
        with open_engine("hierarchical", "float32", gpu_kv_layers=2) as engine:
            outputs.append(list(engine.generate(PROMPT[:300], 7, GREEDY)))
            graphs = engine.stats.cuda_graphs
            assert graphs is not None
            replayed.append(graphs["replayed"])
            assert ("as much as graphs may have" in str(graphs["why"])) == (share < 0.05)
    assert outputs[0] == outputs[1] == outputs[2]
    assert replayed[0] > 2
    assert replayed[1:] == [1, 0]
