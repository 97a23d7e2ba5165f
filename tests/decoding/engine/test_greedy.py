"""Greedy output of the demo pair equals plain decoding in every mode, and that transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding import GREEDY
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO, Pair, lead
from support.prompts import LENGTHS, prompt
from support.ranks import run_ranks, share_all_sums
from support.slow import slow_except

NEW = 80  # enough to offload a block during decoding, even of the largest size


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.fixture(scope="module")
def plain(pair: Pair) -> dict[str, list[int]]:
    """The target's own greedy output after each prompt, one token per forward."""
    return {name: pair.generate("plain", prompt(name), NEW) for name in LENGTHS}


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    slow_except(
        [
            ("documentation", "hierarchical", {"retrieval_budget": 256}),
            (
                "documentation",
                "retrieval",
                {
                    "retrieval_budget": 64,
                    "chunk_size": 16,
                    "link": "emulated:50",
                    "gpu_kv_layers": 5,
                },
            ),
            ("documentation", "speculative", {"num_draft_tokens": 1, "link": "emulated:50"}),
            (
                "argparse",
                "hierarchical",
                {
                    "retrieval_budget": 512,
                    "link": "emulated:50",
                    "gpu_kv_layers": 2,
                    "num_inner_draft_tokens": 1,
                },
            ),
            (
                "argparse",
                "retrieval",
                {
                    "retrieval_budget": 40,
                    "chunk_size": 5,
                    "num_draft_tokens": 32,
                    "gpu_kv_layers": 0,
                },
            ),
            # the draft's window slides within a draft
            ("argparse", "speculative", {"num_draft_tokens": 12, "window": 8, "sinks": 1}),
            (
                "typing",
                "hierarchical",
                {
                    "retrieval_budget": 100,
                    "num_draft_tokens": 9,
                    "num_inner_draft_tokens": 5,
                    "link": "emulated:50",
                    "gpu_kv_layers": 0,
                },
            ),
            (
                "argparse",
                "hierarchical",
                {
                    "retrieval_budget": 128,
                    "int8_retrieval": True,
                    "link": "emulated:50",
                    "gpu_kv_layers": 2,
                },
            ),
            (
                "typing",
                "retrieval",
                {"retrieval_budget": 4096, "int8_retrieval": True, "graphs": True},
            ),
            # the budget holds the whole sequence
            (
                "typing",
                "retrieval",
                {
                    "retrieval_budget": 4096,
                    "num_draft_tokens": 40,
                    "prefill_chunk": 333,
                    "gpu_kv_layers": 3,
                },
            ),
        ],
        0,
    ),
)
def test_every_mode_equals_plain_decoding(
    name: str, mode: str, options: dict[str, Any], pair: Pair, plain: dict[str, list[int]]
) -> None:
    assert pair.generate(mode, prompt(name), NEW, **options) == plain[name]


def test_plain_decoding_equals_transformers(plain: dict[str, list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([prompt("typing")]), max_new_tokens=NEW, do_sample=False)
    assert tokens[0, LENGTHS["typing"] :].tolist() == plain["typing"]


def generate_on_rank(target: Path, draft: Path, tokens: list[int], new: int) -> list[list[int]]:
    group = TensorParallelGroup.from_environment("cpu")
    pair = Pair(target, draft, group)
    modes = [
        ("hierarchical", {"retrieval_budget": 200, "link": "emulated:50", "gpu_kv_layers": 4}),
        ("retrieval", {"retrieval_budget": 200, "int8_retrieval": True}),
    ]
    outputs = []
    for mode, options in modes:
        with pair.engine(mode, **options) as engine:
            outputs += lead(engine, lambda first: list(first.generate(tokens, new, GREEDY)))
    before = share_all_sums(group).written_bytes
    with pair.engine(mode, **options) as engine:
        outputs += lead(engine, lambda first: list(first.generate(tokens, new, GREEDY)))
    assert group.shared_sum.written_bytes > before
    return outputs


@pytest.mark.slow
def test_two_ranks_equal_one(pair: Pair) -> None:
    tokens = prompt("documentation")[:400]
    target, draft = DEMO / "target", DEMO / "draft"
    outputs, worker_outputs = run_ranks(2, generate_on_rank, target, draft, tokens, 24)
    assert outputs == [pair.generate("plain", tokens, 24)] * 3
    assert worker_outputs == []
