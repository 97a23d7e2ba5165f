"""Ranks that follow: whatever rank 0 does with its caches between passes, its logits are those of one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from links import CPU, make_test_link
from models import random_tokens
from ranks import run_ranks
from torch import Tensor

from offload import Cache, HostArena, MeanKey, RetrievalCache, TieredCache
from parallel import Group, PassLeader, follow_passes, load_model
from parallel.llama import Llama

PROMPT, NEW, MOST = 60, 40, 10


def caches_of(model: Llama) -> list[Cache]:
    """A target's cache over two tiers, and the retrieval cache that follows it."""
    layout, link = model.config.kv_layout(model.group.size, torch.float32), make_test_link("emulated")
    rotary = model.config.rotary(PROMPT, PROMPT + NEW, torch.float32, CPU)
    target = TieredCache(layout, PROMPT + NEW, 1, link, rotary, HostArena(link, torch.float32), tail=12)
    retrieval = RetrievalCache(layout, 24, 8, 8 + NEW, MeanKey(), rotary, CPU)
    target.followers.append(retrieval)
    return [target, retrieval]


def lead(model: Llama, caches: list[Cache]) -> list[Tensor]:
    """Rounds as a decoder makes them: short drafts on the retrieval cache, a verification, a verdict; then one given up."""
    target, retrieval = caches
    leader, logits = PassLeader(model, caches, MOST), []
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
    leader.end()
    return logits


def on_a_rank(folder: Path) -> tuple[list[Tensor], list[int]]:
    group = Group.from_environment("cpu")
    model = load_model(folder, group)
    texts = []
    for seed in (7, 8):  # two texts, one after the other
        caches = caches_of(model)
        with caches[0].prefill(PROMPT):
            first = model.prefill(random_tokens(PROMPT, seed=seed), caches[0], 25)
        if group.rank == 0:
            texts += [first, *lead(model, caches)]
        else:
            follow_passes(model, caches, MOST)
    return texts, [cache.traffic.link_in for cache in caches]


def test_followers_keep_step(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(num_hidden_layers=2)
    alone, bytes_alone = on_a_rank(folder)
    (led, bytes_led), (nothing, bytes_followed) = run_ranks(2, on_a_rank, folder)
    assert nothing == []
    assert len(led) == len(alone) == 2 * (1 + 5 * 4)
    for found, wanted in zip(led, alone, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert bytes_led == bytes_followed == [count // 2 for count in bytes_alone]  # each rank its own heads over its own link
    assert bytes_alone[0] > 0
