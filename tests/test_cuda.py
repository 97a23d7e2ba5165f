"""The engine on a GPU writes what it writes on a CPU: wherever the KV lives, whatever the mode, and over two ranks.

Where there is no GPU a stand-in takes its place (tests/standin), which also sees races and counts waits.
"""

from __future__ import annotations

import gc
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import DEMO
from standin import Machine, gpu_or_standin
from test_greedy import prompt
from torch import Tensor

import parallel.replay
from bench.ranks import run_ranks
from decoding import Engine, Settings
from decoding.decoders import Speculative
from parallel import Group, Recorder, Replay
from parallel.llama import Layer

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


@pytest.mark.parametrize("resident", [2, 6])
@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_once_for_what_is_drawn_and_once_for_a_verdict(mode: str, resident: int, gpu: Machine | None) -> None:
    if gpu is None:
        pytest.skip("only a stand-in counts waits")
    engine = opened(Group(device=torch.device("cuda", 0)), mode, resident_layers=resident, graphs=False)
    text = engine.generate(prompt("argparse"), NEW)
    next(text)
    gpu.waits.clear()
    while engine.stats.new_tokens < NEW:
        next(text)
    rounds = [level.stats.passes for level in engine.stats.levels if isinstance(level, Speculative)]
    drafts = rounds[-1] if rounds else engine.stats.levels[0].stats.passes  # at most: a lookup draws nothing
    assert max(1, sum(rounds)) <= len(gpu.waits) <= sum(rounds) + drafts
    text.close()
    engine.close()


@pytest.mark.parametrize("layer", [4, 60])  # in prefill, and in a pass that streams
def test_a_text_given_up_leaves_no_copy_and_no_memory(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls, steps = opened(Group(device=torch.device("cuda", 0)), "plain", resident_layers=2), count(), Layer.steps

    def interrupted(self: Layer, *arguments: Any) -> Any:
        if next(calls) == layer:
            raise KeyboardInterrupt
        return steps(self, *arguments)

    gc.disable()  # what only a collection frees is still there when the next text is planned
    try:
        found = [list(engine.generate(prompt("argparse"), NEW))]
        peaks = [engine.stats.peaks]
        monkeypatch.setattr(Layer, "steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(prompt("argparse"), NEW))
        found.append(list(engine.generate(prompt("argparse"), NEW)))
        peaks.append(engine.stats.peaks)
    finally:
        gc.enable()
    assert found[0] == found[1]
    assert peaks[0] == peaks[1]
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_on_one_gpu(mode: str, wanted: list[int]) -> None:
    assert run_ranks(2, on_shared_gpu, mode)[0] == wanted


def on_shared_gpu(mode: str) -> list[int]:
    with gpu_or_standin():
        dist.init_process_group("gloo")
        group = SharedGpu(dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0))
        return text(group, mode, resident_layers=1)


@pytest.mark.parametrize("mode", MODES)
def test_two_gpus(mode: str, wanted: list[int]) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU here")
    (found, counts), (_, others) = run_ranks(2, on_its_gpu, mode)
    assert found == wanted
    assert counts["refused"] == others["refused"] == 0
    assert (counts["replayed"] > 0) == (mode != "plain")


def on_its_gpu(mode: str) -> tuple[list[int], dict[str, Any]]:
    with gpu_or_standin():
        parallel.replay.USES = 2
        made, build = [], Replay.__init__

        def noted(self: Replay, *arguments: Any) -> None:
            build(self, *arguments)
            made.append(self)

        Replay.__init__ = noted  # type: ignore[method-assign]
        group = Group.from_environment("cuda")
        assert group.records()
        found = text(group, mode, resident_layers=1)
        return found, made[-1].counts
