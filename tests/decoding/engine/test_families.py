"""Greedy text of every family is that of transformers: in all modes, and on two ranks.

What a level below the target computes is verified, so that text cannot tell whether it is right.
There the draft is the target itself, and whatever it proposes must stand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding import GREEDY
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import MODES, Pair, lead
from support.families import OTHERS
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

PROMPT, NEW = random_tokens(70).tolist(), 24
RANKS_NEW = 12  # tokens on two ranks
Checkpoints = Callable[..., Path]


@cache
def wanted(folder: Path) -> list[int]:
    """Return what transformers writes."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    text = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    return text[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", slow_except(OTHERS, 2, 3, 6))
def test_every_mode_writes_what_transformers_writes(checkpoint: Checkpoints, name: str) -> None:
    folder = checkpoint(**OTHERS[name])
    text, pair = wanted(folder), Pair(folder, folder)
    assert len(set(text)) > 3  # not one word again and again
    for mode in MODES:
        tight = {"retrieval_budget": 24, "chunk_size": 4, "window": 32, "sinks": 2}
        written = pair.generate(mode, PROMPT, NEW, **tight, link="emulated:50", gpu_kv_layers=1)
        assert written == text, mode


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_target_would_write_stands(checkpoint: Checkpoints, name: str) -> None:
    folder = checkpoint(**OTHERS[name])
    pair = Pair(folder, folder)
    whole = {
        "retrieval_budget": 4096,
        "window": 256,
        "num_draft_tokens": 6,
        "num_inner_draft_tokens": 3,
    }
    with pair.engine("hierarchical", **whole) as engine:
        list(engine.generate(PROMPT, NEW, GREEDY))
        assert engine.stats.acceptance == {"target": 1.0, "retrieval": 1.0}


def on_a_rank(folders: list[Path]) -> list[list[int]]:
    group = TensorParallelGroup.from_environment("cpu")
    texts = []
    for folder in folders:
        with Pair(folder, folder, group).engine(
            "hierarchical", retrieval_budget=24, chunk_size=4
        ) as engine:
            texts += lead(engine, lambda first: list(first.generate(PROMPT, RANKS_NEW, GREEDY)))
    return texts


FEW = ["olmo2", "mixtral"]  # sums of squares over ranks, and experts on each


@pytest.mark.parametrize(
    "names", slow_except([FEW, sorted(OTHERS.keys() - FEW)]), ids=["two", "the others"]
)
def test_two_ranks_write_what_transformers_writes(
    names: list[str], checkpoint: Checkpoints
) -> None:
    folders = [checkpoint(**OTHERS[name]) for name in names]
    texts, followed = run_ranks(2, on_a_rank, folders)
    assert dict(zip(names, texts, strict=True)) == {
        name: wanted(folder)[:RANKS_NEW] for name, folder in zip(names, folders, strict=True)
    }
    assert followed == []
