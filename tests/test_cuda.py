"""The engine on a GPU writes what it writes on a CPU: wherever the KV lives, whatever the mode, and over two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import DEMO
from test_greedy import prompt
from torch import Tensor

import parallel.replay
from bench.ranks import run_ranks
from decoding import Engine, Settings
from parallel import Group, Recorder

pytestmark = pytest.mark.cuda
NEW = 48
MODES = ["plain", "retrieval", "speculative", "hierarchical"]


class SharedGpu(Group):
    """Ranks that share the first GPU, over gloo, which gathers in host memory only."""

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(x.device)


def opened(group: Group, mode: str, **choices: Any) -> Engine:
    settings = Settings(mode=mode, dtype="float32", budget=256, **choices)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.stop_tokens = frozenset()
    return engine


def text(group: Group, mode: str, **choices: Any) -> list[int]:
    """Greedy, in float32: the demo pair behind a text that outgrows the retrieval budget."""
    engine = opened(group, mode, **choices)
    if group.rank:
        engine.follow()
        return []
    found = list(engine.generate(prompt("argparse"), NEW))
    engine.close()
    return found


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return text(Group(), "plain")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resident", [0, 2, 6])
def test_greedy_text_is_that_of_a_cpu(mode: str, resident: int, wanted: list[int]) -> None:
    assert text(Group(device=torch.device("cuda", 0)), mode, resident_layers=resident) == wanted


@pytest.mark.parametrize("mode", MODES[1:])
def test_recorded_passes_write_the_same(mode: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(device=torch.device("cuda", 0))
    assert group.records()
    monkeypatch.setattr(parallel.replay, "USES", 2)
    choices: dict[str, Any] = {"resident_layers": 2, "draft_length": 7, "inner_length": 3}
    seen = []
    for graphs in (True, False):
        engine = opened(group, mode, graphs=graphs, **choices)
        for _ in range(2):  # the second text records anew
            assert list(engine.generate(prompt("argparse"), NEW)) == wanted
            if graphs:
                assert engine.stats.fixed_shapes is not None
                assert engine.stats.fixed_shapes["replayed"] > 0
                assert (engine.stats.fixed_shapes["refused"], engine.stats.fixed_shapes["why"]) == (0, None)
            seen.append([(level.stats.proposed, level.stats.accepted) for level in engine.stats.levels])
        engine.close()
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_a_capture_that_fails_leaves_the_stream_as_it_was() -> None:
    group = Group(device=torch.device("cuda", 0))
    recorder, before = Recorder(group.device), torch.cuda.current_stream()
    x = torch.ones(4, device=group.device)
    with pytest.raises(RuntimeError):
        recorder.record(lambda: x * x.sum().item())  # which waits for the device
    assert recorder.broken
    assert torch.cuda.current_stream() == before
    assert (x + 1).sum().item() == 8


def test_a_recording_sees_what_its_inputs_hold_now() -> None:
    group = Group(device=torch.device("cuda", 0))
    x = torch.zeros(4, device=group.device)
    again = Recorder(group.device).record(lambda: x + 1)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert again().tolist() == [value + 1] * 4


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_on_one_gpu(mode: str, wanted: list[int]) -> None:
    assert run_ranks(2, on_shared_gpu, mode)[0] == wanted


def on_shared_gpu(mode: str) -> list[int]:
    dist.init_process_group("gloo")
    group = SharedGpu(dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0))
    return text(group, mode, resident_layers=1)
