"""Whatever rank 0 does with its caches between passes, its logits are those of one rank alone, and
of each text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from offload.memory.host_arena import HostArena
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import Prefill
from offload.tiered.shape import TieredCacheSpec
from parallel.execution.batched_forward import ForwardRequest, run_forward
from parallel.execution.executor import Level, TensorParallelExecutor
from parallel.model.loading import load_model
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.links import CPU, make_test_link
from support.models import random_tokens
from support.ranks import run_ranks

NEW, MAX_TOKENS = 40, 10
PROMPTS = {7: 60, 8: 33, 9: 71}  # tokens of each text's prompt, by its seed


class OneText:
    """A target's cache over two tiers, and the retrieval cache that follows it and is chosen anew
    at every verification. Its prompt has been read.
    """

    max_tokens = MAX_TOKENS

    def __init__(self, model: Transformer, seed: int):
        prompt = PROMPTS[seed]
        layout = model.config.kv_layout(model.group.size, torch.float32, model.group.rank)
        link = make_test_link("emulated")
        rotary = model.config.rotary(prompt, prompt + NEW, torch.float32, CPU)
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
        self.forgotten: list[int] = []
        with Prefill(self.target, prompt) as reading:
            self.first = model.prefill(random_tokens(prompt, seed=seed), reading, 25)
        self.seed = seed
        self.size = 4 + seed % 3  # tokens of a verification
        self.turns = [4, 0, 1, 2, 3] if seed == 9 else [0, 1, 2, 3, 4]  # as they come

    def run_forward(self, passes: Sequence[ForwardRequest]) -> list[Tensor]:
        return run_forward(passes)

    def evict_shared_graphs(self, other: OneText) -> None:
        self.forgotten.append(other.seed)

    def close(self) -> None:
        self.is_closed = True

    def tokens(self, turn: int) -> Tensor:
        return random_tokens(self.size, seed=100 * self.seed + turn)

    def drafted(self, turn: int, at: int) -> ForwardRequest:
        return ForwardRequest(
            self.levels[1].model, self.retrieval, self.tokens(turn)[at : at + 1], 1
        )

    def verified(self, turn: int) -> ForwardRequest:
        return ForwardRequest(self.levels[0].model, self.target, self.tokens(turn), self.size - 1)

    def judge(self, turn: int) -> None:
        self.target.advance(1 + [2, 0, 1, 3, 1][turn])
        if turn == 3:
            self.target.crop(self.target.length - 2)
        self.retrieval.crop(self.target.length)

    def uncounted(self, turn: int) -> ForwardRequest:
        """Return a pass whose tokens are taken back."""
        return ForwardRequest(self.levels[1].model, self.retrieval, self.tokens(turn)[:2], 2)


def lead(make: TensorParallelExecutor, texts: list[OneText], turn: int) -> dict[int, list[Tensor]]:
    """A round of each as decoders make them: a short draft on the retrieval cache, a verification,
    a verdict, and a pass given up. Passes of several texts are made as one.
    """
    logits: dict[int, list[Tensor]] = {text.seed: [] for text in texts}

    def make_all(passes: list[ForwardRequest]) -> None:
        for text, made in zip(texts, make(passes), strict=True):
            logits[text.seed].append(made)

    for at in (0, 1):
        make_all([text.drafted(turn, at) for text in texts])
        for text in texts:
            text.retrieval.advance(1)
    make_all([text.verified(turn) for text in texts])
    for text in texts:
        text.judge(turn)
    make_all([text.uncounted(turn) for text in texts])
    return logits


def alone(folder: Path, seed: int) -> tuple[list[Tensor], int]:
    """A text's logits where it is the only one, and the bytes it took over the link."""
    lockstep = TensorParallelExecutor(TensorParallelGroup())
    text = OneText(load_model(folder, TensorParallelGroup()), seed)
    lockstep.add(text)
    logits = [text.first]
    for turn in text.turns:
        logits += lead(lockstep, [text], turn)[seed]
    return logits, text.target.traffic.link_in


class Place:
    """A rank on which texts come and go."""

    def __init__(self, folder: Path):
        self.group = TensorParallelGroup.from_environment("cpu")
        self.model, self.lockstep = (
            load_model(folder, self.group),
            TensorParallelExecutor(self.group),
        )
        self.opened: list[OneText] = []
        self.logits: dict[int, list[Tensor]] = {}

    def open(self, seed: int) -> OneText:
        text = OneText(self.model, seed)
        self.opened.append(text)
        self.lockstep.add(text)
        self.logits[seed] = [text.first]
        return text

    def broadcast_open(self, seed: int) -> OneText:
        self.lockstep.broadcast_open()
        return self.open(self.group.broadcast(seed))

    def end(self, text: OneText) -> None:
        self.lockstep.broadcast_close(text)
        self.lockstep.close(text)

    def go_on(self, texts: list[OneText], turn: int) -> None:
        for seed, made in lead(self.lockstep, texts, turn).items():
            self.logits[seed] += made

    def worker_loop(self) -> None:
        self.open(7)
        while self.lockstep.sequences:
            over = self.lockstep.worker_loop()
            if over is None:
                self.open(self.group.broadcast(0))
            else:
                self.lockstep.close(over)
        assert all(text.is_closed for text in self.opened)


def together(folder: Path) -> tuple[dict[int, list[Tensor]], dict[int, int]]:
    """One text alone; then a second that joins it, and a third in the first one's place."""
    place = Place(folder)
    if place.group.rank:
        place.worker_loop()
    else:
        first = place.open(7)
        place.go_on([first], 0)
        second = place.broadcast_open(8)
        place.go_on([second], 0)
        for turn in range(1, 4):
            place.go_on([first, second], turn)
        place.go_on([first], 4)
        place.end(first)
        third = place.broadcast_open(9)
        place.go_on([third, second], 4)
        place.end(second)
        for turn in range(4):
            place.go_on([third], turn)
        place.end(third)
    assert [text.forgotten for text in place.opened] == [[], [7], [8]]
    logits = {} if place.group.rank else place.logits
    return logits, {text.seed: text.target.traffic.link_in for text in place.opened}


def test_texts_that_come_and_go_are_what_they_are_alone(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(num_hidden_layers=2)
    wanted = {seed: alone(folder, seed) for seed in PROMPTS}
    one, one_bytes = together(folder)
    (led, led_bytes), (nothing, followed_bytes) = run_ranks(2, together, folder)
    assert nothing == {}
    for seed, (logits, moved) in wanted.items():
        assert len(logits) == 1 + 5 * 4
        for got in (one[seed], led[seed]):
            assert len(got) == len(logits)
            for found, want in zip(got, logits, strict=True):
                torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
        assert one_bytes[seed] == moved > 0
        # each rank its own heads over its own link
        assert led_bytes[seed] == followed_bytes[seed] == moved // 2
