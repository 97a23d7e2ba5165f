"""The engine on a GPU writes what it writes on a CPU: in all modes, over tiers and two ranks.

Where there is no GPU a stand-in takes its place (tests/standin), which also sees races and counts
waits.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import decoding.prefix_cache.writer
import parallel.execution.cuda_graphs
import support.ranks
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.app.options import Common
from decoding.app.terminal.messages import say_what_fits
from decoding.engine.request import Request
from decoding.speculation.decoders import Speculative
from offload.errors import InsufficientMemoryError, TierForceError
from offload.kernels.selection import batch_invariant_kernels, split_kernels
from offload.tiered.prefill import OBSERVED_ROWS
from parallel.execution.cuda_graphs import GraphRunner, cuda_graphs_supported
from parallel.model.transformer import Attention
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.process_group import TensorParallelGroup
from standin import Machine, gpu_or_standin, standin
from support.batches import run_alone, run_batch, tokens
from support.engines import DEMO, MODES
from support.ranks import run_ranks
from support.recording import count_replays
from support.slow import slow_except
from support.texts import prompt

pytestmark = pytest.mark.cuda
# far more than the retrieval budget, and enough for a few rounds
PROMPT, NEW = prompt("argparse")[:300], 7


class SharedGpu(TensorParallelGroup):
    """Ranks that share the first GPU, over gloo, which gathers in host memory only."""

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(x.device)


def opened(group: TensorParallelGroup, mode: str, **choices: Any) -> Engine:
    choices = {"dtype": "float32", "retrieval_budget": 128, **choices}
    settings = Settings(mode=mode, **choices)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.stop_tokens = frozenset()
    return engine


class AtOnce(Thread):
    """A thread that is none: the stand-in sees a single one."""

    def start(self) -> None:
        self.run()

    def join(self, timeout: float | None = None) -> None:
        pass


def text(group: TensorParallelGroup, mode: str, **choices: Any) -> list[int]:
    """Greedy, in float32: the demo pair behind a text that outgrows the retrieval budget."""
    engine = opened(group, mode, **choices)
    if group.rank:
        engine.run_worker()
        return []
    tokens = list(engine.generate(PROMPT, NEW, GREEDY))
    engine.close()
    return tokens


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return text(TensorParallelGroup(), "plain")


# with two layers the tests of recordings, of waits and of failures tell
@pytest.mark.parametrize("resident", slow_except([0, 6]))
@pytest.mark.parametrize("mode", ["plain", "hierarchical"])
def test_greedy_text_is_that_of_a_cpu(mode: str, resident: int, wanted: list[int]) -> None:
    assert (
        text(TensorParallelGroup(device=torch.device("cuda", 0)), mode, gpu_kv_layers=resident)
        == wanted
    )


def test_identical_texts_are_those_of_plain_decoding() -> None:
    """In 16 bits, and sampled, wherever the KV lives."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    ways: list[dict[str, Any]] = [
        {"mode": "plain", "gpu_kv_layers": 6},
        {"mode": "hierarchical", "gpu_kv_layers": 2, "num_draft_tokens": 9},
        {"mode": "split-retrieval", "gpu_kv_layers": 0, "split_kv_layers": 3},
    ]
    found = []
    for way in ways:
        engine = opened(group, deterministic=True, dtype="bfloat16", **way)
        found.append(list(engine.generate(PROMPT[:200], NEW, Sampling(0.8, top_p=1, seed=2))))
        engine.close()
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(("mode", "resident"), slow_except([("retrieval", 6), ("hierarchical", 2)]))
def test_texts_at_once_write_what_each_writes_alone(
    mode: str, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where their short passes are recorded, shared or not, and the last text is alone."""
    monkeypatch.setattr(parallel.execution.cuda_graphs, "USES", 2)
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = opened(
        group, mode, gpu_kv_layers=resident, num_draft_tokens=5, num_inner_draft_tokens=2
    )
    assert engine.runtime.settings.graphs
    asked = [Request(PROMPT[-length:], new, GREEDY) for length, new in ((200, 16), (130, 26))]
    want = run_alone(engine, asked)
    replays = count_replays(monkeypatch)
    texts = run_batch(engine, asked, 2)
    assert tokens(texts) == want
    assert (2, 1) in replays
    counts = [text.stats.cuda_graphs for text in texts]
    assert all(each is not None and each["why"] is None for each in counts)
    assert sum(each["replayed"] for each in counts if each is not None) > 0
    engine.close()


@pytest.mark.parametrize(
    ("mode", "int8"),
    slow_except([("retrieval", False), ("retrieval", True), ("hierarchical", True)], 2),
)
def test_recorded_passes_write_the_same(
    mode: str, int8: bool, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    assert cuda_graphs_supported(group)
    monkeypatch.setattr(parallel.execution.cuda_graphs, "USES", 2)
    choices: dict[str, Any] = {
        "gpu_kv_layers": 2,
        "num_draft_tokens": 7,
        "num_inner_draft_tokens": 3,
    }
    choices["int8_retrieval"] = int8
    seen = []
    for graphs in (True, False):
        engine = opened(group, mode, graphs=graphs, **choices)
        for _ in range(2 if graphs else 1):  # the second text records anew
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
            if graphs:
                assert engine.stats.cuda_graphs is not None
                assert engine.stats.cuda_graphs["replayed"] > 0
                assert (engine.stats.cuda_graphs["refused"], engine.stats.cuda_graphs["why"]) == (
                    0,
                    None,
                )
            seen.append(
                [(level.stats.proposed, level.stats.accepted) for level in engine.stats.levels]
            )
        engine.close()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    slow_except([("hierarchical", "float32"), ("split-retrieval", "bfloat16")], 1),
)
@pytest.mark.slow
def test_a_conversation_goes_on_over_tiers_and_recordings(
    mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From inside the text too, in parts, and in larger caches."""
    monkeypatch.setattr(parallel.execution.cuda_graphs, "USES", 2)
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    choices: dict[str, Any] = {
        "gpu_kv_layers": 2,
        "num_draft_tokens": 7,
        "num_inner_draft_tokens": 3,
    }
    engine = opened(group, mode, dtype=dtype, graphs=True, **choices)
    asked = []
    with engine.conversation(room=60):
        for tokens in (PROMPT, PROMPT[:250] + PROMPT[:90], PROMPT[:250] + PROMPT[90:100]):
            asked.append((tokens, list(engine.generate(tokens, NEW, GREEDY))))
        assert engine.stats.reused_tokens == 250
        (session,) = engine.sessions.executor.sequences
        session.extend_chunk = 70
        longer = PROMPT + PROMPT[:150]
        monkeypatch.setattr(engine._conversation, "_token_s", 1e9)
        asked.append((longer, list(engine.generate(longer, NEW, GREEDY))))
        assert engine.stats.reused_tokens == 250
        assert session.capacity > 400
    if dtype == "float32":
        assert [text for _, text in asked] == [
            list(engine.generate(tokens, NEW, GREEDY)) for tokens, _ in asked
        ]
    engine.close()


@pytest.mark.parametrize(
    ("mode", "dtype", "resident"),
    slow_except(
        [
            *(("hierarchical", "float32", resident) for resident in (0, 2, 6)),
            *(("split-retrieval", "bfloat16", resident) for resident in (0, 2, 6)),
        ],
        1,
        3,
    ),
)
def test_what_is_kept_is_what_was_computed(
    mode: str,
    dtype: str,
    resident: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: Machine | None,
) -> None:
    """It is copied beside passes and their recording, on a stream of its own."""
    if gpu is not None:
        monkeypatch.setattr(decoding.prefix_cache.writer, "Thread", AtOnce)
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    fixed: dict[str, Any] = {
        "num_draft_tokens": 7,
        "num_inner_draft_tokens": 3,
        "gpu_kv_layers": resident,
    }
    if resident == 6:
        mode = mode.removeprefix("split-")
    texts = []
    for _ in range(2):
        engine = opened(group, mode, dtype=dtype, graphs=True, prompt_cache=str(tmp_path), **fixed)
        assert engine.sessions.prefix_cache is not None
        engine.sessions.prefix_cache.warn = pytest.fail
        texts.append(list(engine.generate(PROMPT, NEW, GREEDY)))
        loaded = engine.stats.loaded_tokens
        engine.close()
    assert loaded == len(PROMPT) - OBSERVED_ROWS
    assert texts[0] == texts[1]


def test_a_capture_that_fails_leaves_the_stream_as_it_was() -> None:
    run_ranks(1, failing_capture)  # a process of its own: torch may not record again behind it


def failing_capture() -> None:
    with gpu_or_standin():
        group = TensorParallelGroup(device=torch.device("cuda", 0))
        before, x = torch.cuda.current_stream(), torch.ones(4, device=group.device)
        with pytest.raises(RuntimeError):
            # which waits for the device
            group.graph_capturer.capture(lambda: x * x.sum().item())
        assert group.graph_capturer.broken
        assert torch.cuda.current_stream() == before
        assert (x + 1).sum().item() == 8
        torch.cuda.empty_cache()  # the allocator takes no capture to be under way


def test_a_recording_sees_what_its_inputs_hold_now() -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    x = torch.zeros(4, device=group.device)
    recorder = GraphCapturer(group.device)
    again = recorder.capture(lambda: x + 1)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert again().tolist() == [value + 1] * 4


def test_recordings_that_are_gone_leave_the_next_ones_memory_of_their_own() -> None:
    """And those that are there go on, whichever of them came first."""
    recorder = GraphCapturer(torch.device("cuda", 0))
    x = torch.zeros(4, device=recorder.device)
    for _ in range(2):
        first = recorder.capture(lambda: x + 1)
        second = recorder.capture(lambda: x + 2)
        assert (first().tolist(), second().tolist()) == ([1] * 4, [2] * 4)
        del first
        third = recorder.capture(lambda: x + 3)
        assert (second().tolist(), third().tolist()) == ([2] * 4, [3] * 4)
        assert recorder.count == 2
        del second, third
        assert recorder.count == 0


@pytest.mark.parametrize("distinct", [True, False])
def test_ranks_that_see_one_gpu_each(distinct: bool, gpu: Machine | None) -> None:
    """As under launchers that set CUDA_VISIBLE_DEVICES for each process."""
    if gpu is None:
        pytest.skip("it takes two stand-ins")
    run_ranks(2, with_one_gpu, distinct)


def with_one_gpu(distinct: bool) -> None:
    rank = int(os.environ["RANK"])
    with standin(1) as machine, patch.dict(os.environ):
        refused = pytest.raises(TierForceError, match="2 ranks, but only 1 GPUs")
        with refused:
            TensorParallelGroup.from_environment("cuda")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        if distinct:
            machine.bus = rank + 1
            group = TensorParallelGroup.from_environment("cuda")
            assert (group.rank, group.device) == (rank, torch.device("cuda", 0))
        else:
            refused = pytest.raises(TierForceError, match="ranks 0 and 1 have the same GPU")
            with refused:
                TensorParallelGroup.from_environment("cuda")


def test_recordings_are_reset_before_a_group_is_left() -> None:
    """NCCL would wait for ever for graphs that hold its collectives."""
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU here")
    for close in (True, False):
        run_ranks(2, leaving, close)


def leaving(close: bool) -> None:
    with gpu_or_standin():
        group = TensorParallelGroup.from_environment("cuda")
        x = torch.ones(4, device=group.device)
        group.all_reduce(x)
        again = group.graph_capturer.capture(lambda: group.all_reduce(x * 2))
    counts, destroy = [], dist.destroy_process_group
    reset = type(next(iter(group.graph_capturer._graphs))).reset

    def counted(graph: Any) -> None:
        counts.append("reset")
        reset(graph)

    def destroyed() -> None:
        assert counts == ["reset"]  # while `again` still holds the graph
        destroy()

    with (
        patch.object(type(next(iter(group.graph_capturer._graphs))), "reset", counted),
        patch.object(dist, "destroy_process_group", destroyed),
    ):
        if close:
            group.close()
        else:
            support.ranks.leave_group()
    assert callable(again)


@pytest.mark.parametrize(
    ("mode", "resident"),
    slow_except([*((mode, 2) for mode in MODES), ("hierarchical", 6)], 0, 1, 3),
)
def test_the_host_waits_once_for_what_is_drawn_and_once_for_a_verdict(
    mode: str, resident: int, wanted: list[int], gpu: Machine | None
) -> None:
    if gpu is None:
        pytest.skip("only a stand-in counts waits")
    engine = opened(
        TensorParallelGroup(device=torch.device("cuda", 0)),
        mode,
        gpu_kv_layers=resident,
        graphs=False,
    )
    text = engine.generate(PROMPT, NEW, GREEDY)
    tokens = [next(text)]
    gpu.waits.clear()
    while engine.stats.new_tokens < NEW:
        tokens.append(next(text))
    rounds = [
        level.stats.forwards for level in engine.stats.levels if isinstance(level, Speculative)
    ]
    if mode == "plain":
        assert len(gpu.waits) == engine.stats.levels[0].stats.forwards
    elif mode == "retrieval":  # a lookup drafts, on the host
        assert len(gpu.waits) == sum(rounds)
    else:
        assert sum(rounds) < len(gpu.waits) <= sum(rounds) + rounds[-1]
    assert [*tokens, *text] == wanted
    engine.close()


@pytest.mark.parametrize("split", slow_except([None, 2], 1))
def test_slices_are_cut_and_joined_on_a_gpu(split: int | None) -> None:
    """What is drafted against codes stands nearly always; each byte comes once a verification."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    choices: dict[str, Any] = {
        "gpu_kv_layers": 1,
        "num_draft_tokens": 5,
        "num_inner_draft_tokens": 2,
    }
    engine = opened(group, "split-hierarchical", dtype="bfloat16", split_kv_layers=split, **choices)
    assert len(list(engine.generate(PROMPT, NEW, GREEDY))) == NEW
    stats = engine.stats
    assert stats.acceptance["target"] is not None
    assert stats.acceptance["target"] > 0.6
    streamed = stats.traffic["target"].link_in - stats.prefill_link_in
    bits = 5 * 4 if split is None else 2 * 4 + 3 * 12
    layer = engine.runtime.requirements.layout.bytes(len(PROMPT) + NEW, 1)
    assert 0 < streamed <= stats.levels[0].stats.forwards * layer * bits / 16
    engine.close()


@pytest.mark.parametrize(
    ("purpose", "mode", "deterministic"),
    [("slices", "split", False), ("--deterministic", "plain", True)],
)
def test_what_lacks_its_kernels_is_warned_of(
    purpose: str,
    mode: str,
    deterministic: bool,
    capsys: pytest.CaptureFixture[str],
    gpu: Machine | None,
) -> None:
    if gpu is None:
        pytest.skip("only a stand-in lacks them")
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = opened(group, mode, dtype="bfloat16", deterministic=deterministic)
    common = Common(model="m", draft=None, settings=Settings(), sampling=Sampling())
    say_what_fits(engine, None, common)
    engine.close()
    said = capsys.readouterr().err
    why = "cannot be used here (RuntimeError: a stand-in compiles nothing): plain"
    assert f"the kernels for {purpose} {why}" in said


@pytest.mark.cuda(standin=False)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "groups"), [(64, 1), (80, 4), (128, 1), (128, 4), (128, 7), (256, 4)]
)
def test_fused_kernels_are_right(dtype: torch.dtype, dim: int, groups: int) -> None:
    kernels, why = split_kernels("cuda", dtype, dim, groups)
    assert kernels is not None, why


@pytest.mark.cuda(standin=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "groups"), [(64, 3), (80, 1), (128, 1), (128, 4), (128, 16), (256, 4)]
)
def test_steady_kernels_are_right(dtype: torch.dtype, dim: int, groups: int) -> None:
    kernels, why = batch_invariant_kernels("cuda", dtype, dim, groups)
    assert kernels is not None, why


def failing(layer: int, error: Callable[[], BaseException]) -> Callable[..., Any]:
    """`Attention.forward`, of which one call raises."""
    calls, forward = count(), Attention.forward

    def once(self: Attention, *arguments: Any) -> Any:
        if next(calls) == layer:
            raise error()
        return forward(self, *arguments)

    return once


# in prefill, and in a pass that streams
@pytest.mark.parametrize("layer", slow_except([4, 30], 1))
def test_a_text_given_up_leaves_no_copy_and_no_memory(
    layer: int, monkeypatch: pytest.MonkeyPatch, gpu: Machine | None
) -> None:
    engine = opened(TensorParallelGroup(device=torch.device("cuda", 0)), "plain", gpu_kv_layers=2)
    gc.disable()  # what only a collection frees is still there when the next text is planned
    try:
        texts = [list(engine.generate(PROMPT, NEW, GREEDY))]
        peaks = [engine.stats.peak_bytes]
        monkeypatch.setattr(Attention, "forward", failing(layer, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(PROMPT, NEW, GREEDY))
        texts.append(list(engine.generate(PROMPT, NEW, GREEDY)))
        peaks.append(engine.stats.peak_bytes)
    finally:
        gc.enable()
    assert texts[0] == texts[1]
    for phase, peak in peaks[0].items():  # on a GPU blocks are cut as it comes
        assert peaks[1][phase] == (pytest.approx(peak, abs=64 << 20) if gpu is None else peak)
    engine.close()


@pytest.mark.parametrize("layer", slow_except([4, 30]))
def test_a_gpu_that_is_full_fails_one_text(
    layer: int, monkeypatch: pytest.MonkeyPatch, wanted: list[int]
) -> None:
    engine = opened(TensorParallelGroup(device=torch.device("cuda", 0)), "plain", gpu_kv_layers=2)
    monkeypatch.setattr(
        Attention, "forward", failing(layer, partial(torch.OutOfMemoryError, "CUDA out of memory."))
    )
    with pytest.raises(InsufficientMemoryError, match="out of memory"):
        list(engine.generate(PROMPT, NEW, GREEDY))
    assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
    engine.close()


def test_what_others_have_is_not_planned_with() -> None:
    device = torch.device("cuda", 0)
    engine = opened(TensorParallelGroup(device=device), "plain", device_memory=1 << 50)
    free = engine.runtime.link.device_available()
    next(engine.generate(PROMPT, NEW, GREEDY))
    assert engine.stats.plan is not None
    assert engine.stats.plan.device_bytes <= 0.9 * free
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_on_one_gpu(mode: str, wanted: list[int], gpu: Machine | None) -> None:
    if gpu is not None:
        pytest.skip("there are two stand-ins")
    assert run_ranks(2, on_shared_gpu, mode)[0] == wanted


def on_shared_gpu(mode: str) -> list[int]:
    dist.init_process_group("gloo")
    group = SharedGpu(dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0))
    return text(group, mode, gpu_kv_layers=1)


@pytest.mark.parametrize("mode", slow_except(["plain", "hierarchical"], 1))
def test_two_gpus(mode: str, wanted: list[int]) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU here")
    (tokens, counts), (_, others) = run_ranks(2, on_its_gpu, mode)
    assert tokens == wanted
    assert counts["refused"] == others["refused"] == 0
    assert (counts["replayed"] > 0) == (mode != "plain")


def test_nccl_that_does_not_start_is_one_line() -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU here")
    run_ranks(2, without_nccl)


def without_nccl() -> None:
    refused = pytest.raises(
        TierForceError, match=r"NCCL does not start on these GPUs \(unhandled system error\)"
    )
    with (
        gpu_or_standin(),
        patch.object(dist, "all_reduce", side_effect=RuntimeError("unhandled system error")),
        refused,
    ):
        TensorParallelGroup.from_environment("cuda")


def test_nccl_that_sums_wrongly_is_refused() -> None:
    """As with drivers that are patched for peer access: of small sums, or of large ones alone.

    A sum is wrong on one rank alone, and every rank says so.
    """
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU here")
    for numbers in (1, 1 << 21):
        run_ranks(2, with_sums_that_fail, numbers)


def with_sums_that_fail(numbers: int) -> None:
    right = dist.all_reduce

    def wrong(x: Tensor) -> None:
        right(x)
        if len(x) == numbers and dist.get_rank() == 1:
            x[-1] += 1

    refused = pytest.raises(TierForceError, match=f"NCCL sums {numbers} numbers wrongly on these")
    with gpu_or_standin(), patch.object(dist, "all_reduce", wrong), refused:
        TensorParallelGroup.from_environment("cuda")


def on_its_gpu(mode: str) -> tuple[list[int], dict[str, Any]]:
    with gpu_or_standin():
        parallel.execution.cuda_graphs.USES = 2
        made, build = [], GraphRunner.__init__

        def noted(self: GraphRunner, *arguments: Any) -> None:
            build(self, *arguments)
            made.append(self)

        GraphRunner.__init__ = noted  # type: ignore[method-assign]
        group = TensorParallelGroup.from_environment("cuda")
        assert cuda_graphs_supported(group)
        tokens = text(group, mode, gpu_kv_layers=1, num_draft_tokens=5, num_inner_draft_tokens=2)
        return tokens, made[-1].counts
