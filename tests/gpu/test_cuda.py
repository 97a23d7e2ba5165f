"""The engine generates the same on a GPU as on a CPU: in all modes, over tiers and two ranks.

Without a GPU a stand-in replaces it (tests/standin), which also detects races and counts host
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
import support.ranks
from bench.harness.dimensions import TINY, config_of
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.app.options import Common
from decoding.app.terminal.messages import say_what_fits
from decoding.engine.request import Request
from decoding.engine.session import SequenceState
from decoding.grammars.grammar import Grammar
from decoding.probe.kernels import _Kernels
from offload.cache.static_shape import StaticCache
from offload.errors import InsufficientMemoryError, TierForceError
from offload.kernels.selection import (
    batch_invariant_kernels,
    retrieval_kernels,
    slot_kernels,
    split_kernels,
)
from offload.layout import OBSERVED_ROWS
from parallel.execution.cuda_graphs import GraphRunner, cuda_graphs_supported
from parallel.model.transformer import Attention
from parallel.ranks.cuda_shared_sum import _StreamLane
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.partition import LARGE_SUM_BYTES
from parallel.ranks.process_group import TensorParallelGroup, open_shared_sum
from parallel.ranks.shared_sum import PIECE_BYTES, SLOTS
from standin import Machine, Race, gpu_or_standin, standin
from support.batches import run_alone, run_batch, tokens
from support.captures import count_replays
from support.engines import DEMO, MODES
from support.prompts import prompt
from support.ranks import run_ranks, share_all_sums
from support.slow import slow_except

pytestmark = pytest.mark.cuda
# many more tokens than the retrieval budget, and enough new tokens for a few rounds
PROMPT, NEW = prompt("argparse")[:300], 7


class SharedGpu(TensorParallelGroup):
    """Ranks that share the first GPU, over gloo, which can all-gather in host memory only."""

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(x.device)


def open_engine(group: TensorParallelGroup, mode: str, **choices: Any) -> Engine:
    choices = {"dtype": "float32", "retrieval_budget": 128, **choices}
    settings = Settings(mode=mode, **choices)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.scheduler.stop_tokens = frozenset()
    return engine


class InlineThread(Thread):
    """A thread that runs in its caller: the stand-in supports a single thread."""

    def start(self) -> None:
        self.run()

    def join(self, timeout: float | None = None) -> None:
        pass


def generate(group: TensorParallelGroup, mode: str, **choices: Any) -> list[int]:
    """Return greedy float32 output of the demo pair; the prompt exceeds the retrieval budget."""
    engine = open_engine(group, mode, **choices)
    if group.rank:
        engine.run_worker()
        return []
    tokens = list(engine.generate(PROMPT, NEW, GREEDY))
    engine.close()
    return tokens


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return generate(TensorParallelGroup(), "plain")


# two layers are covered by the tests of captured graphs, waits and failures
@pytest.mark.parametrize("resident", slow_except([0, 6]))
@pytest.mark.parametrize("mode", ["plain", "hierarchical"])
def test_greedy_output_matches_the_cpu(mode: str, resident: int, expected: list[int]) -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    assert generate(group, mode, gpu_kv_layers=resident) == expected


def constrained(group: TensorParallelGroup, mode: str, **choices: Any) -> list[int]:
    """Return greedy float32 output under a grammar, penalties and a bias."""
    engine = open_engine(group, mode, **choices)
    sampling = Sampling(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.3, logit_bias={300: 2.0}
    )
    grammar = Grammar.regex("[a-z ,]{200,}")
    tokens = list(engine.generate(PROMPT[:200], NEW, sampling, grammar=grammar))
    engine.close()
    return tokens


@pytest.mark.parametrize("mode", slow_except(["plain", "hierarchical"]))
def test_rules_on_logits_are_those_on_the_cpu(mode: str) -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    assert constrained(group, mode, gpu_kv_layers=2) == constrained(TensorParallelGroup(), "plain")


@pytest.mark.slow
def test_deterministic_output_matches_plain_decoding() -> None:
    """With 16 bits and sampling, wherever the KV is."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    variants: list[dict[str, Any]] = [
        {"mode": "plain", "gpu_kv_layers": 6},
        {"mode": "hierarchical", "gpu_kv_layers": 2, "num_draft_tokens": 9},
        {"mode": "split-retrieval", "gpu_kv_layers": 0, "split_kv_layers": 3},
    ]
    outputs = []
    for variant in variants:
        engine = open_engine(group, deterministic=True, dtype="bfloat16", **variant)
        outputs.append(list(engine.generate(PROMPT[:200], NEW, Sampling(0.8, top_p=1, seed=2))))
        engine.close()
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "resident"), [("retrieval", 6), ("hierarchical", 2)])
def test_concurrent_requests_match_sequential_ones(
    mode: str, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With captured short forwards, batched or not; the last request ends alone."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = open_engine(
        group, mode, gpu_kv_layers=resident, num_draft_tokens=5, num_inner_draft_tokens=2
    )
    assert engine.runtime.settings.graphs
    sizes = ((200, 16), (130, 26))
    requests = [Request(PROMPT[-length:], new_tokens, GREEDY) for length, new_tokens in sizes]
    expected = run_alone(engine, requests)
    replays = count_replays(monkeypatch)
    completions = run_batch(engine, requests, 2)
    assert tokens(completions) == expected
    assert (2, 1) in replays
    counts = [completion.stats.cuda_graphs for completion in completions]
    assert all(graphs is not None and graphs["why"] is None for graphs in counts)
    assert sum(graphs["replayed"] for graphs in counts if graphs is not None) > 0
    engine.close()


@pytest.mark.parametrize(
    ("mode", "int8"),
    slow_except([("retrieval", False), ("retrieval", True), ("hierarchical", True)], 2),
)
def test_captured_graphs_do_not_change_output(mode: str, int8: bool, expected: list[int]) -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    assert cuda_graphs_supported(group)
    choices: dict[str, Any] = {
        "gpu_kv_layers": 2,
        "num_draft_tokens": 7,
        "num_inner_draft_tokens": 3,
    }
    choices["int8_retrieval"] = int8
    counts = []
    for graphs in (True, False):
        engine = open_engine(group, mode, graphs=graphs, **choices)
        for _ in range(2 if graphs else 1):  # the second request replays the same graphs
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
            if graphs:
                assert engine.stats.cuda_graphs is not None
                assert engine.stats.cuda_graphs["replayed"] > 0
                assert (engine.stats.cuda_graphs["refused"], engine.stats.cuda_graphs["why"]) == (
                    0,
                    None,
                )
            levels = [level.stats for level in engine.stats.levels]
            counts.append([(stats.proposed, stats.accepted) for stats in levels])
        engine.close()
    assert counts[0] == counts[1] == counts[2]


def test_caches_that_a_request_leaves_are_free_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their memory counts as available, and is freed if the next request cannot reuse them."""

    def own_memory(device: object = None) -> tuple[int, int]:  # without tests beside this one
        total = torch.cuda.get_device_properties(0).total_memory
        return total - torch.cuda.memory_reserved(0), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", own_memory)
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = open_engine(group, "auto", retrieval_budget=None, gpu_kv_layers=2)
    available = []
    for part in (PROMPT, PROMPT[40:], PROMPT[-60:]):
        assert list(engine.generate(part, NEW, GREEDY))
        (slot,) = engine.sessions.slots._slots
        assert slot.retrieval is not None
        assert slot.draft is not None
        available.append(engine.sessions.memory.now().device)
        assert slot.device_bytes > 2 << 20
    assert max(available) - min(available) < 1 << 20  # inputs of graphs
    engine.close()
    assert slot.device_bytes == 0


@pytest.mark.parametrize(
    ("mode", "dtype"),
    slow_except([("hierarchical", "float32"), ("split-retrieval", "bfloat16")], 1),
)
@pytest.mark.slow
def test_conversation_with_tiers_and_captured_graphs(mode: str, dtype: str) -> None:
    """Also from a shorter common prefix, with a chunked prefill, and with larger caches."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    choices: dict[str, Any] = {
        "gpu_kv_layers": 2,
        "num_draft_tokens": 7,
        "num_inner_draft_tokens": 3,
    }
    engine = open_engine(group, mode, dtype=dtype, graphs=True, **choices)
    turns = []
    with engine.conversation(room=60):
        for tokens in (PROMPT, PROMPT[:280] + PROMPT[:90], PROMPT[:280] + PROMPT[90:100]):
            turns.append((tokens, list(engine.generate(tokens, NEW, GREEDY))))
        assert engine.stats.reused_tokens == 280
        (session,) = engine.sessions.executor.sequences
        session.extend_chunk = 70
        longer = PROMPT + PROMPT[:150]
        (kept,) = engine.scheduler.caches.kept
        kept.token_s = 1e9  # reuse pays
        turns.append((longer, list(engine.generate(longer, NEW, GREEDY))))
        assert engine.stats.reused_tokens == 280
        assert session.capacity > 400
    if dtype == "float32":
        assert [output for _, output in turns] == [
            list(engine.generate(tokens, NEW, GREEDY)) for tokens, _ in turns
        ]
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "resident"), [("hierarchical", 2), ("plain", 6)])
def test_several_sequences_share_a_prefix(mode: str, resident: int) -> None:
    """Copied from layers of all kinds, while other requests are prefilled and run."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = open_engine(group, mode, gpu_kv_layers=resident, prefill_chunk=64)
    prompts = [PROMPT, PROMPT[:280] + PROMPT[:40], PROMPT[100:], PROMPT[:280] + PROMPT[40:90]]
    requests = [Request(prompt, NEW, GREEDY) for prompt in prompts]
    with engine.conversation(room=60, concurrency=4):
        states = [engine.scheduler.add(request) for request in requests]
        while engine.scheduler.is_busy:
            engine.scheduler.step()
    assert [state.stats.reused_tokens for state in states] == [0, 280, 0, 280]
    assert [state.tokens for state in states] == [
        list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts
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
    ),
)
def test_a_cached_prompt_gives_the_same_output(
    mode: str,
    dtype: str,
    resident: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: Machine | None,
) -> None:
    """The KV is copied on its own stream, while forwards run and are captured."""
    if gpu is not None:
        monkeypatch.setattr(decoding.prefix_cache.writer, "Thread", InlineThread)
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    fixed: dict[str, Any] = {
        "num_draft_tokens": 7,
        "num_inner_draft_tokens": 3,
        "gpu_kv_layers": resident,
    }
    if resident == 6:
        mode = mode.removeprefix("split-")
    outputs = []
    for _ in range(2):
        engine = open_engine(
            group, mode, dtype=dtype, graphs=True, prompt_cache=str(tmp_path), **fixed
        )
        assert engine.sessions.prefix_cache is not None
        engine.sessions.prefix_cache.warn = pytest.fail
        outputs.append(list(engine.generate(PROMPT, NEW, GREEDY)))
        loaded = engine.stats.loaded_tokens
        engine.close()
    assert loaded == len(PROMPT) - OBSERVED_ROWS
    assert outputs[0] == outputs[1]


def test_a_failing_capture_restores_the_stream() -> None:
    run_ranks(1, fail_capture)  # in its own process: torch may not be able to capture afterwards


def fail_capture() -> None:
    with gpu_or_standin():
        group = TensorParallelGroup(device=torch.device("cuda", 0))
        stream, x = torch.cuda.current_stream(), torch.ones(4, device=group.device)
        with pytest.raises(RuntimeError):
            # item() waits for the device
            group.graph_capturer.capture(lambda: x * x.sum().item())
        assert group.graph_capturer.broken
        assert torch.cuda.current_stream() == stream
        assert (x + 1).sum().item() == 8
        torch.cuda.empty_cache()  # raises if the allocator still considers a capture open


def test_a_replay_reads_the_current_inputs() -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    x = torch.zeros(4, device=group.device)
    capturer = GraphCapturer(group.device)
    replay = capturer.capture(lambda: x + 1)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert replay().tolist() == [value + 1] * 4


def test_graphs_captured_after_others_are_freed_have_their_own_memory() -> None:
    """The remaining graphs stay valid, whatever the order of capture."""
    capturer = GraphCapturer(torch.device("cuda", 0))
    x = torch.zeros(4, device=capturer.device)
    for _ in range(2):
        first = capturer.capture(lambda: x + 1)
        second = capturer.capture(lambda: x + 2)
        assert (first().tolist(), second().tolist()) == ([1] * 4, [2] * 4)
        del first
        third = capturer.capture(lambda: x + 3)
        assert (second().tolist(), third().tolist()) == ([2] * 4, [3] * 4)
        assert len(capturer._graphs) == 2
        del second, third
        assert len(capturer._graphs) == 0


@pytest.mark.parametrize("distinct", slow_except([True, False]))
def test_ranks_that_see_one_gpu_each(distinct: bool, gpu: Machine | None) -> None:
    """Some launchers set CUDA_VISIBLE_DEVICES for each process."""
    if gpu is None:
        pytest.skip("needs two stand-ins")
    run_ranks(2, see_one_gpu, distinct)


def see_one_gpu(distinct: bool) -> None:
    rank = int(os.environ["RANK"])
    with standin(1) as machine, patch.dict(os.environ):
        raises_error = pytest.raises(TierForceError, match="2 ranks, but only 1 GPUs")
        with raises_error:
            TensorParallelGroup.from_environment("cuda")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        if distinct:
            machine.bus = rank + 1
            group = TensorParallelGroup.from_environment("cuda")
            assert (group.rank, group.device) == (rank, torch.device("cuda", 0))
        else:
            raises_error = pytest.raises(TierForceError, match="ranks 0 and 1 have the same GPU")
            with raises_error:
                TensorParallelGroup.from_environment("cuda")


@pytest.mark.slow
def test_graphs_are_reset_before_the_process_group_is_destroyed() -> None:
    """NCCL would wait forever for graphs that hold its collectives."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    for close in (True, False):
        run_ranks(2, leave_group, close)


def leave_group(close: bool) -> None:
    with gpu_or_standin():
        group = TensorParallelGroup.from_environment("cuda")
        x = torch.ones(4, device=group.device)
        group.all_reduce(x)
        replay = group.graph_capturer.capture(lambda: group.all_reduce(x * 2))
        check_reset(group, close)
    assert callable(replay)


def check_reset(group: TensorParallelGroup, close: bool) -> None:
    events, destroy = [], dist.destroy_process_group
    graph_type = type(next(iter(group.graph_capturer._graphs)))
    reset = graph_type.reset

    def record_reset(graph: Any) -> None:
        events.append("reset")
        reset(graph)

    def check_and_destroy() -> None:
        assert events == ["reset"]  # although `replay` still holds the graph
        destroy()

    with (
        patch.object(graph_type, "reset", record_reset),
        patch.object(dist, "destroy_process_group", check_and_destroy),
    ):
        if close:
            group.close()
        else:
            support.ranks.leave_group()


@pytest.mark.parametrize(
    ("mode", "resident"),
    slow_except([*((mode, 2) for mode in MODES), ("hierarchical", 6)], 0, 1, 3),
)
def test_the_host_waits_once_per_draft_and_once_per_verification(
    mode: str, resident: int, expected: list[int], gpu: Machine | None
) -> None:
    if gpu is None:
        pytest.skip("only a stand-in counts waits")
    engine = open_engine(
        TensorParallelGroup(device=torch.device("cuda", 0)),
        mode,
        gpu_kv_layers=resident,
        graphs=False,
    )
    with engine.conversation():  # freeing the caches waits, too
        stream = engine.generate(PROMPT, NEW, GREEDY)
        tokens = [next(stream)]
        gpu.waits.clear()
        tokens += stream
        waits = len(gpu.waits)
    stats = engine.stats
    rounds = [level.stats.forwards for level in stats.levels if level.name in stats.acceptance]
    if mode == "plain":
        assert waits == stats.levels[0].stats.forwards
    elif mode == "retrieval":  # prompt lookup drafts on the host
        assert waits == sum(rounds)
    else:
        assert sum(rounds) < waits <= sum(rounds) + rounds[-1]
    assert tokens == expected
    engine.close()


@pytest.mark.parametrize("split", slow_except([None, 2], 1))
def test_split_layers_on_a_gpu(split: int | None) -> None:
    """Most drafts from the high bytes are accepted; a verification transfers each byte once."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    choices: dict[str, Any] = {
        "gpu_kv_layers": 1,
        "num_draft_tokens": 5,
        "num_inner_draft_tokens": 2,
    }
    engine = open_engine(
        group, "split-hierarchical", dtype="bfloat16", split_kv_layers=split, **choices
    )
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
    [
        ("split KV", "split", False),
        ("merging attention", "split", False),
        ("retrieval", "retrieval", False),
        ("captured forwards", "retrieval", False),
        ("captured forwards", "speculative", False),
        ("--deterministic", "plain", True),
    ],
)
def test_missing_kernels_give_a_warning(
    purpose: str,
    mode: str,
    deterministic: bool,
    capsys: pytest.CaptureFixture[str],
    gpu: Machine | None,
) -> None:
    if gpu is None:
        pytest.skip("only a stand-in lacks the kernels")
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = open_engine(group, mode, dtype="bfloat16", deterministic=deterministic)
    common = Common(model="m", draft=None, settings=Settings(), sampling=Sampling())
    say_what_fits(engine, None, common)
    engine.close()
    output = capsys.readouterr().err
    why = "cannot be used here (RuntimeError: a stand-in compiles nothing): plain"
    assert f"the kernels for {purpose} {why}" in output


@pytest.mark.parametrize(("mode", "graphs"), [("retrieval", False), ("split", True)])
def test_kernels_of_captured_forwards_are_tested_where_forwards_are_captured(
    mode: str, graphs: bool
) -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = open_engine(group, mode, dtype="bfloat16", graphs=graphs)
    assert engine.runtime.slot_kernels == []
    engine.close()


@pytest.mark.slow
def test_probe_times_8_bit_attention_in_a_graph() -> None:
    rates = _Kernels(config_of(TINY), torch.device("cuda", 0), torch.bfloat16).retrieval_rates()
    assert rates.keys() <= {"score_rate", "int8_rate"}
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize("int8", slow_except([False, True], 1))
def test_captured_forwards_in_16_bits_equal_launched_ones(int8: bool) -> None:
    """On a GPU their kernels are fused, and those of launched forwards are torch's."""
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    engine = open_engine(
        group, "hierarchical", dtype="bfloat16", int8_retrieval=int8, gpu_kv_layers=2
    )
    assert list(engine.generate(PROMPT, NEW, GREEDY))
    assert engine.stats.cuda_graphs is not None
    assert (engine.stats.cuda_graphs["refused"], engine.stats.cuda_graphs["why"]) == (0, None)
    session = SequenceState(engine.runtime, PROMPT, NEW)
    session.prefill()
    for level in session.levels[1:]:
        assert isinstance(level.cache, StaticCache)
        for rows in (1, 3):
            tokens = session.prompt[:rows]
            captured = session.slot.graphs(level.model, tokens, level.cache, rows)
            launched = level.model(tokens, level.cache, rows)
            error = (captured - launched).abs().max() / launched.abs().max()
            assert error < 0.05
    assert session.slot.graphs.counts["replayed"] > 0
    session.close()
    engine.close()


@pytest.mark.cuda(standin=False)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "groups"), [(64, 1), (80, 4), (128, 1), (128, 4), (128, 7), (256, 4)]
)
def test_split_kernels_pass_their_self_test(dtype: torch.dtype, dim: int, groups: int) -> None:
    kernels, why = split_kernels("cuda", dtype, dim, groups)
    assert kernels is not None, why


@pytest.mark.cuda(standin=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "groups"), [(64, 3), (80, 1), (128, 1), (128, 4), (128, 16), (256, 4)]
)
def test_batch_invariant_kernels_pass_their_self_test(
    dtype: torch.dtype, dim: int, groups: int
) -> None:
    kernels, why = batch_invariant_kernels("cuda", dtype, dim, groups)
    assert kernels is not None, why


@pytest.mark.cuda(standin=False)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "groups"), [(64, 1), (80, 4), (128, 1), (128, 4), (128, 7), (128, 16), (256, 8)]
)
def test_retrieval_kernels_pass_their_self_test(dtype: torch.dtype, dim: int, groups: int) -> None:
    kernels, why = retrieval_kernels("cuda", dtype, dim, groups)
    assert kernels is not None, why


@pytest.mark.cuda(standin=False)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "groups"), [(64, 3), (80, 1), (128, 1), (128, 4), (128, 7), (128, 16), (256, 8)]
)
def test_slot_kernels_pass_their_self_test(dtype: torch.dtype, dim: int, groups: int) -> None:
    kernels, why = slot_kernels("cuda", dtype, dim, groups)
    assert kernels is not None, why


def fail_once(layer: int, error: Callable[[], BaseException]) -> Callable[..., Any]:
    """Return a replacement for `Attention.forward` whose call number `layer` raises."""
    calls, forward = count(), Attention.forward

    def attend(self: Attention, *arguments: Any) -> Any:
        if next(calls) == layer:
            raise error()
        return forward(self, *arguments)

    return attend


# during prefill, and during a forward with streamed layers
@pytest.mark.parametrize("layer", slow_except([4, 30], 1))
def test_an_interrupted_request_leaves_no_copies_and_no_memory(
    layer: int, monkeypatch: pytest.MonkeyPatch, gpu: Machine | None
) -> None:
    engine = open_engine(
        TensorParallelGroup(device=torch.device("cuda", 0)), "plain", gpu_kv_layers=2
    )
    gc.disable()  # memory in reference cycles would stay in use for the next plan
    try:
        outputs = [list(engine.generate(PROMPT, NEW, GREEDY))]
        peaks = [engine.stats.peak_bytes]
        monkeypatch.setattr(Attention, "forward", fail_once(layer, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(PROMPT, NEW, GREEDY))
        outputs.append(list(engine.generate(PROMPT, NEW, GREEDY)))
        peaks.append(engine.stats.peak_bytes)
    finally:
        gc.enable()
    assert outputs[0] == outputs[1]
    for phase, peak in peaks[0].items():  # on a GPU fragmentation varies
        assert peaks[1][phase] == (pytest.approx(peak, abs=64 << 20) if gpu is None else peak)
    engine.close()


@pytest.mark.parametrize("layer", slow_except([4, 30]))
def test_out_of_memory_fails_a_single_request(
    layer: int, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    engine = open_engine(
        TensorParallelGroup(device=torch.device("cuda", 0)), "plain", gpu_kv_layers=2
    )
    monkeypatch.setattr(
        Attention,
        "forward",
        fail_once(layer, partial(torch.OutOfMemoryError, "CUDA out of memory.")),
    )
    with pytest.raises(InsufficientMemoryError, match="out of memory"):
        list(engine.generate(PROMPT, NEW, GREEDY))
    assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
    engine.close()


def test_plans_use_only_free_device_memory() -> None:
    device = torch.device("cuda", 0)
    engine = open_engine(TensorParallelGroup(device=device), "plain", device_memory=1 << 50)
    free = engine.runtime.link.device_available()
    next(engine.generate(PROMPT, NEW, GREEDY))
    assert engine.stats.plan is not None
    assert engine.stats.plan.memory.device_bytes <= 0.9 * free
    engine.close()


@pytest.mark.parametrize("shares", [False, True], ids=["gloo", "shared sums"])
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_share_one_gpu(
    mode: str, shares: bool, expected: list[int], gpu: Machine | None
) -> None:
    if gpu is not None:
        pytest.skip("a stand-in has a GPU per rank")
    assert run_ranks(2, generate_on_shared_gpu, mode, shares)[0] == expected


def generate_on_shared_gpu(mode: str, shares: bool) -> list[int]:
    dist.init_process_group("gloo")
    group = SharedGpu(dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0))
    if shares:
        TensorParallelGroup.shared_sum = open_shared_sum(group)
        share_all_sums(group)
    return generate(group, mode, gpu_kv_layers=1)


@pytest.mark.parametrize("shares", slow_except([False, True], 1), ids=["NCCL", "shared sums"])
@pytest.mark.parametrize("mode", slow_except(["plain", "hierarchical"], 1))
def test_two_gpus_match_the_cpu(mode: str, shares: bool, expected: list[int]) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    (tokens, counts), (_, others) = run_ranks(2, generate_on_own_gpu, mode, shares)
    assert tokens == expected
    assert counts["refused"] == others["refused"] == 0
    assert (counts["replayed"] > 0) == (mode != "plain")


@pytest.mark.slow
def test_sums_in_shared_memory_are_right_and_ordered(gpu: Machine | None) -> None:
    """Several are in flight; the stand-in finds accesses that nothing orders."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    run_ranks(2, sum_on_own_gpu, gpu is not None)


def sum_on_own_gpu(is_standin: bool) -> None:
    with gpu_or_standin():
        group = TensorParallelGroup.from_environment("cuda")
        share_all_sums(group)
        counts = [2 * SLOTS * PIECE_BYTES // 4 + 1, 300, PIECE_BYTES]
        tensors = [torch.arange(count, device=group.device) % 1000 for count in counts]
        pending = [group.start_all_reduce(x.float() + group.rank) for x in tensors]
        for x, finish in zip(tensors, pending, strict=True):
            assert torch.equal(finish(), 2 * x.float() + 1)
        if not is_standin:
            return
        x = torch.ones(300, device=group.device)
        finish = group.start_all_reduce(x)
        with pytest.raises(Race, match="writes"):
            x.add_(1)
        finish()
        # a cancelled prefill drops sums that are in progress
        group.start_all_reduce(torch.ones(300, device=group.device))
        group.all_reduce(x)
        with (
            patch.object(_StreamLane, "follow", lambda *_: None),
            pytest.raises(Race, match=r"writes .* that .* reads"),
        ):
            group.all_reduce(x)


@pytest.mark.slow
def test_where_memory_cannot_be_pinned_nccl_sums(gpu: Machine | None) -> None:
    if gpu is None:
        pytest.skip("a driver's refusal is that of the stand-in")
    lines, _ = run_ranks(2, sum_without_pinning)
    error = "the driver refused to pin shared memory (cudaHostRegister: error 2)"
    assert lines == [f"large all-reduces go through NCCL: {error}."]


def sum_without_pinning() -> list[str]:
    lines: list[str] = []
    with gpu_or_standin() as machine:
        assert machine is not None
        machine.pins = int(os.environ["RANK"]) == 1
        group = TensorParallelGroup.from_environment("cuda", lines.append)
        assert group.shared_sum is None
        x = group.all_reduce(torch.ones(LARGE_SUM_BYTES, device=group.device))
        assert bool((x == 2).all())
    return lines


@pytest.mark.slow
def test_nccl_that_fails_to_start_is_an_error() -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    run_ranks(2, start_without_nccl)


def start_without_nccl() -> None:
    raises_error = pytest.raises(
        TierForceError, match=r"NCCL does not start on these GPUs \(unhandled system error\)"
    )
    with (
        gpu_or_standin(),
        patch.object(dist, "all_reduce", side_effect=RuntimeError("unhandled system error")),
        raises_error,
    ):
        TensorParallelGroup.from_environment("cuda")


def test_wrong_nccl_sums_are_an_error() -> None:
    """Drivers patched for peer access may sum wrongly: small tensors too, or only large ones.

    The sum is wrong on a single rank, and every rank raises.
    """
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    for numbers in (1, 1 << 21):
        run_ranks(2, start_with_wrong_sums, numbers)


def start_with_wrong_sums(numbers: int) -> None:
    all_reduce = dist.all_reduce

    def wrong_all_reduce(x: Tensor) -> None:
        all_reduce(x)
        if len(x) == numbers and dist.get_rank() == 1:
            x[-1] += 1

    raises_error = pytest.raises(
        TierForceError, match=f"NCCL sums {numbers} numbers wrongly on these"
    )
    with gpu_or_standin(), patch.object(dist, "all_reduce", wrong_all_reduce), raises_error:
        TensorParallelGroup.from_environment("cuda")


def generate_on_own_gpu(mode: str, shares: bool) -> tuple[list[int], dict[str, Any]]:
    with gpu_or_standin():
        runners, initialize = [], GraphRunner.__init__

        def record_runner(self: GraphRunner, *arguments: Any) -> None:
            initialize(self, *arguments)
            runners.append(self)

        GraphRunner.__init__ = record_runner  # type: ignore[method-assign]
        group = TensorParallelGroup.from_environment("cuda")
        assert cuda_graphs_supported(group)
        if shares:
            share_all_sums(group)
        lengths = {"num_draft_tokens": 5, "num_inner_draft_tokens": 2}
        tokens = generate(group, mode, gpu_kv_layers=1, **lengths)
        return tokens, runners[-1].counts
