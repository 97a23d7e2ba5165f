"""Whatever rank 0 does with its caches between passes, its logits are those of one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.harness.ranks import run_ranks
from offload.retrieval import RetrievalCache
from offload.retrieval_shape import RetrievalShape
from offload.selection import POLICIES
from offload.store import HostArena
from offload.tiered import TieredCache
from offload.tiered_shape import TieredShape
from parallel.group import Group
from parallel.loading import load_model
from parallel.lockstep import Announced, PassLeader, follow_passes
from parallel.model import Llama
from support.links import CPU, make_test_link
from support.models import random_tokens

PROMPT, NEW, MAX_TOKENS = 60, 40, 10


def caches_of(model: Llama) -> list[Announced]:
    """A target's cache over two tiers, and the retrieval cache that follows it and is chosen anew
    at every verification.
    """
    layout, link = (
        model.config.kv_layout(model.group.size, torch.float32, model.group.rank),
        make_test_link("emulated"),
    )
    rotary = model.config.rotary(PROMPT, PROMPT + NEW, torch.float32, CPU)
    shape = RetrievalShape.of(24, 4, PROMPT + NEW, MAX_TOKENS, NEW)
    tiers = TieredShape(
        layout, PROMPT + NEW, 1, recent=shape.window, block=shape.block, rows=MAX_TOKENS
    )
    target = TieredCache(tiers, link, rotary, HostArena(link, torch.float32))
    retrieval = RetrievalCache(layout, shape, POLICIES["attention"](), rotary, CPU)
    target.followers.append(retrieval)
    return [(model, target), (model, retrieval)]


def lead(announced: list[Announced]) -> list[Tensor]:
    """Rounds as a decoder makes them: short drafts on the retrieval cache, a verification, a
    verdict; then one given up.
    """
    (_, target), (_, retrieval) = announced
    leader, logits = PassLeader(announced, MAX_TOKENS), []
    for seed, stand in enumerate([4, 0, 2, 3, 1]):
        tokens = random_tokens(6, seed=seed)
        for token in tokens[:2].split(1):
            logits.append(leader(token, retrieval, 1))
            retrieval.advance(1)
        logits.append(leader(tokens, target, 5))
        target.advance(1 + stand)
        if seed == 3:
            target.crop(target.length - 2)
        retrieval.crop(target.length)
        logits.append(leader(tokens[:2], retrieval, 2))  # never counted
    leader.close()
    return logits


def on_a_rank(folder: Path) -> tuple[list[Tensor], list[int]]:
    group = Group.from_environment("cpu")
    model = load_model(folder, group)
    texts = []
    for seed in (7, 8):  # two texts, one after the other
        announced = caches_of(model)
        target = announced[0][1]
        assert isinstance(target, TieredCache)
        with target.prefill(PROMPT) as reading:
            first = model.prefill(random_tokens(PROMPT, seed=seed), reading, 25)
        if group.rank == 0:
            texts += [first, *lead(announced)]
        else:
            follow_passes(announced, MAX_TOKENS)
    return texts, [cache.traffic.link_in for _, cache in announced]


def test_followers_keep_step(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(num_hidden_layers=2)
    alone, bytes_alone = on_a_rank(folder)
    (led, bytes_led), (nothing, bytes_followed) = run_ranks(2, on_a_rank, folder)
    assert nothing == []
    assert len(led) == len(alone) == 2 * (1 + 5 * 4)
    for logits, wanted in zip(led, alone, strict=True):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    # each rank its own heads over its own link
    assert bytes_led == bytes_followed == [count // 2 for count in bytes_alone]
    assert bytes_alone[0] > 0
