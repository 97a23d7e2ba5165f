"""Greedy output of every family equals transformers', in all modes and on two ranks.

Drafts are verified, so that the output does not show whether the levels below the target are
correct. To test these, the draft is the target itself, and every draft token must be accepted.
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
from support.internlm2 import as_internlm2
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

PROMPT, NEW = random_tokens(70).tolist(), 24
RANKS_NEW = 12  # tokens on two ranks
Checkpoints = Callable[..., Path]


@cache
def reference(folder: Path) -> list[int]:
    """Return what transformers generates."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    return tokens[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", slow_except(OTHERS, 2, 3, 6))
def test_every_mode_equals_transformers(checkpoint: Checkpoints, name: str) -> None:
    folder = checkpoint(**OTHERS[name])
    expected, pair = reference(folder), Pair(folder, folder)
    assert len(set(expected)) > 3  # not one token repeated
    for mode in MODES:
        tight = {"retrieval_budget": 24, "chunk_size": 4, "window": 32, "sinks": 2}
        layers = min(1, pair.target.config.full_layers)
        output = pair.generate(mode, PROMPT, NEW, **tight, link="emulated:50", gpu_kv_layers=layers)
        assert output == expected, mode


@pytest.mark.parametrize("mode", MODES)
def test_internlm2_equals_the_llama_that_it_is(
    mode: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    llama = checkpoint()
    folder = as_internlm2(llama, tmp_path / "internlm2")
    tight = {"retrieval_budget": 24, "chunk_size": 4, "window": 32, "sinks": 2}
    output = Pair(folder, folder).generate(mode, PROMPT, NEW, **tight, link="emulated:50")
    assert output == reference(llama)


@pytest.mark.parametrize("name", slow_except(OTHERS, 2, 3, 6))
def test_drafts_by_the_target_are_accepted(checkpoint: Checkpoints, name: str) -> None:
    folder = checkpoint(**OTHERS[name])
    pair = Pair(folder, folder)
    options = {
        "retrieval_budget": 4096,
        "window": 256,
        "num_draft_tokens": 6,
        "num_inner_draft_tokens": 3,
    }
    with pair.engine("hierarchical", **options) as engine:
        list(engine.generate(PROMPT, NEW, GREEDY))
        assert engine.stats.acceptance == {"target": 1.0, "retrieval": 1.0}


def generate_on_rank(folders: list[Path]) -> list[list[int]]:
    group = TensorParallelGroup.from_environment("cpu")
    outputs = []
    for folder in folders:
        with Pair(folder, folder, group).engine(
            "hierarchical", retrieval_budget=24, chunk_size=4
        ) as engine:
            outputs += lead(engine, lambda first: list(first.generate(PROMPT, RANKS_NEW, GREEDY)))
    return outputs


FEW = ["olmo2", "mixtral"]  # a norm over all ranks' features, and experts on each rank


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, sorted(OTHERS.keys() - FEW)], ids=["two", "the others"])
def test_two_ranks_equal_transformers(names: list[str], checkpoint: Checkpoints) -> None:
    folders = [checkpoint(**OTHERS[name]) for name in names]
    outputs, worker_outputs = run_ranks(2, generate_on_rank, folders)
    assert dict(zip(names, outputs, strict=True)) == {
        name: reference(folder)[:RANKS_NEW] for name, folder in zip(names, folders, strict=True)
    }
    assert worker_outputs == []


@pytest.mark.slow
def test_internlm2_on_two_ranks(checkpoint: Checkpoints, tmp_path: Path) -> None:
    llama = checkpoint()
    folder = as_internlm2(llama, tmp_path / "internlm2")
    outputs, worker_outputs = run_ranks(2, generate_on_rank, [folder])
    assert outputs == [reference(llama)[:RANKS_NEW]]
    assert worker_outputs == []
