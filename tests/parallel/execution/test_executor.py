"""Whatever rank 0 does with its caches between forwards, its logits are those of a single rank, and
of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from offload.memory.host_arena import HostArena
from offload.prefill.layer_major import Prefill
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.shape import TieredCacheSpec
from parallel.execution.batched_forward import ForwardRequest
from parallel.execution.cuda_graphs import GraphRunner
from parallel.execution.executor import (
    Close,
    Idle,
    Level,
    Open,
    Stop,
    TensorParallelExecutor,
)
from parallel.model.loading import load_model
from parallel.model.pipeline import PrefillSteps
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.links import CPU, make_test_link
from support.models import random_tokens
from support.ranks import run_ranks

NEW, MAX_TOKENS = 40, 10
PROMPTS = {7: 60, 8: 33, 9: 71}  # prompt tokens of each sequence, by its seed


class PrefilledSequence:
    """A prefilled sequence: the target's cache over two tiers, and the retrieval cache that
    observes it and is reselected at every verification.
    """

    copied = None

    def __init__(self, model: Transformer, seed: int):
        prompt = PROMPTS[seed]
        layout = model.config.kv_layout(model.group.size, torch.float32, model.group.rank)
        link = make_test_link("emulated")
        rotary = model.rotary(prompt, prompt + NEW)
        shape = RetrievalCacheSpec.of(24, 4, prompt + NEW, MAX_TOKENS, NEW)
        tiers = TieredCacheSpec(
            layout, prompt + NEW, 1, recent=shape.window, block=shape.block, rows=MAX_TOKENS
        )
        self.target = TieredCache(tiers, link, rotary, HostArena(link, torch.float32))
        self.retrieval = RetrievalCache(layout, shape, POLICIES["attention"](), rotary, CPU)
        self.target.observers.append(self.retrieval)
        self.levels = [
            Level("target", model, self.target),
            Level("retrieval", model, self.retrieval),
        ]
        self.is_closed = False
        self.seed = seed
        self.size = 4 + seed % 3  # query tokens of a verification
        self.turns = [4, 0, 1, 2, 3] if seed == 9 else [0, 1, 2, 3, 4]  # order of its rounds

    def prefill_steps(self) -> PrefillSteps:
        tokens = random_tokens(PROMPTS[self.seed], seed=self.seed)
        with Prefill(self.target, len(tokens)) as prefill:
            return (yield from self.levels[0].model.prefill_steps(tokens, prefill, 25))

    def close(self) -> None:
        self.is_closed = True

    def tokens(self, turn: int) -> Tensor:
        return random_tokens(self.size, seed=100 * self.seed + turn)

    def draft(self, turn: int, index: int) -> ForwardRequest:
        token = self.tokens(turn)[index : index + 1]
        return ForwardRequest(self.levels[1].model, self.retrieval, token, 1)

    def verify(self, turn: int) -> ForwardRequest:
        return ForwardRequest(self.levels[0].model, self.target, self.tokens(turn), self.size - 1)

    def commit(self, turn: int) -> None:
        self.target.advance(1 + [2, 0, 1, 3, 1][turn])
        if turn == 3:
            self.target.crop(self.target.length - 2)
        self.retrieval.crop(self.target.length)

    def discarded(self, turn: int) -> ForwardRequest:
        """Return a request whose tokens are never committed."""
        return ForwardRequest(self.levels[1].model, self.retrieval, self.tokens(turn)[:2], 2)


def eager_executor(group: TensorParallelGroup) -> TensorParallelExecutor:
    return TensorParallelExecutor(group, GraphRunner(False, group.graph_capturer), MAX_TOKENS)


def run_round(
    executor: TensorParallelExecutor, sequences: list[PrefilledSequence], turn: int
) -> dict[int, list[Tensor]]:
    """Run a round of each sequence like a decoder: a short draft on the retrieval cache, a
    verification, a commit, and a discarded forward. Forwards of several sequences are batched.
    """
    logits: dict[int, list[Tensor]] = {sequence.seed: [] for sequence in sequences}

    def run(requests: list[ForwardRequest]) -> None:
        for sequence, result in zip(sequences, executor.forward(requests), strict=True):
            logits[sequence.seed].append(result)

    for index in (0, 1):
        run([sequence.draft(turn, index) for sequence in sequences])
        for sequence in sequences:
            sequence.retrieval.advance(1)
    run([sequence.verify(turn) for sequence in sequences])
    for sequence in sequences:
        sequence.commit(turn)
    run([sequence.discarded(turn) for sequence in sequences])
    return logits


def prefill_all(executor: TensorParallelExecutor, sequence: PrefilledSequence) -> Tensor:
    while (logits := executor.prefill(sequence, whole_layer=bool(sequence.seed % 2))) is None:
        pass
    return logits


def run_alone(folder: Path, seed: int) -> tuple[list[Tensor], int]:
    """Return a sequence's logits if it is the only one, and the bytes it moved over the link."""
    executor = eager_executor(TensorParallelGroup())
    sequence = PrefilledSequence(load_model(folder, TensorParallelGroup()), seed)
    executor.add(sequence)
    logits = [prefill_all(executor, sequence)]
    for turn in sequence.turns:
        logits += run_round(executor, [sequence], turn)[seed]
    return logits, sequence.target.traffic.link_in


class Worker:
    """A rank on which sequences are opened and closed."""

    def __init__(self, folder: Path):
        self.group = TensorParallelGroup.from_environment("cpu")
        self.model = load_model(folder, self.group)
        self.executor = eager_executor(self.group)
        self.opened: list[PrefilledSequence] = []
        self.logits: dict[int, list[Tensor]] = {}

    def open(self, seed: int) -> PrefilledSequence:
        sequence = PrefilledSequence(self.model, seed)
        self.opened.append(sequence)
        self.executor.add(sequence)
        return sequence

    def send_open(self, seed: int, beside: PrefilledSequence | None = None) -> PrefilledSequence:
        """Open a sequence and prefill it; after two steps another one runs its first turn."""
        self.executor.send(Open([seed], NEW, 1, ""))
        sequence = self.open(seed)
        if beside is not None:
            for _ in range(2):
                assert self.executor.prefill(sequence, whole_layer=False) is None
            self.run([beside], 0)
        self.logits[seed] = [prefill_all(self.executor, sequence)]
        return sequence

    def close(self, sequence: PrefilledSequence) -> None:
        self.executor.send(Close(self.executor.sequences.index(sequence)))
        self.executor.remove(sequence)

    def run(self, sequences: list[PrefilledSequence], turn: int) -> None:
        for seed, results in run_round(self.executor, sequences, turn).items():
            self.logits[seed] += results

    def worker_loop(self) -> None:
        def open_sequence(command: Open) -> None:
            self.open(command.prompt[0])

        assert self.executor.worker_loop(open_sequence)  # until the last sequence is closed
        assert not self.executor.worker_loop(open_sequence)  # stopped
        assert all(sequence.is_closed for sequence in self.opened)


def run_concurrently(folder: Path) -> tuple[dict[int, list[Tensor]], dict[int, int]]:
    """Run a sequence alone, then a second one beside it, then a third in the first one's place."""
    worker = Worker(folder)
    if worker.group.rank:
        worker.worker_loop()
    else:
        worker.executor.send(Idle())
        first = worker.send_open(7)
        second = worker.send_open(8, beside=first)
        worker.executor.send(Idle())
        worker.run([second], 0)
        for turn in range(1, 4):
            worker.run([first, second], turn)
        worker.run([first], 4)
        worker.close(first)
        third = worker.send_open(9)
        worker.run([third, second], 4)
        worker.close(second)
        for turn in range(4):
            worker.run([third], turn)
        worker.close(third)
        worker.executor.send(Stop())
    logits = {} if worker.group.rank else worker.logits
    return logits, {sequence.seed: sequence.target.traffic.link_in for sequence in worker.opened}


def test_concurrent_sequences_match_sequences_alone(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(num_hidden_layers=2)
    expected = {seed: run_alone(folder, seed) for seed in PROMPTS}
    one, one_bytes = run_concurrently(folder)
    (rank_0, rank_0_bytes), (rank_1, rank_1_bytes) = run_ranks(2, run_concurrently, folder)
    assert rank_1 == {}
    for seed, (logits, moved) in expected.items():
        assert len(logits) == 1 + 5 * 4
        for results in (one[seed], rank_0[seed]):
            assert len(results) == len(logits)
            for result, reference in zip(results, logits, strict=True):
                torch.testing.assert_close(result, reference, atol=1e-4, rtol=1e-4)
        assert one_bytes[seed] == moved > 0
        # each rank moves its own heads over its own link
        assert rank_0_bytes[seed] == rank_1_bytes[seed] == moved // 2
