"""With --deterministic, every decoding strategy produces exactly plain decoding's tokens.

Each book is continued greedily and with sampling, on one rank and on two, by strategies that share
only the model, the prompt and the seed. Two ranks are compared with plain decoding on two ranks,
since all-reduces round differently. In full: SmolLM2, 20,000 tokens, some 40 minutes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.harness.text import documents, tokenizer_of
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.speculation.sequence import common_prefix
from parallel.ranks.process_group import TensorParallelGroup
from support.commands import DRAFT, TARGET
from support.ranks import run_ranks

SKIPPED = 30_000  # leading characters of a book: its title, a list of chapters
OFFLOADED = {"gpu_kv_layers": 1, "link": "emulated:4"}
PLAIN = {"mode": "plain", "link": "view"}  # all on the device, one token per forward
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain, all layers on the host": {**OFFLOADED, "mode": "plain", "gpu_kv_layers": 0},
    "retrieval, one layer resident": {**OFFLOADED, "mode": "retrieval", "retrieval_budget": 512},
    "split, one layer resident": {**OFFLOADED, "mode": "split"},
    "prompt lookup, drafts of 12": {
        "mode": "speculative",
        "prompt_lookup_ngram": 3,
        "num_draft_tokens": 12,
    },
}
# only with a draft model
HIERARCHICAL = {
    "hierarchical, one layer resident": {
        **OFFLOADED,
        "mode": "hierarchical",
        "retrieval_budget": 1024,
        "selection_interval": 8,
    }
}


@dataclass(frozen=True)
class Job:
    """The models, and the prompts, each with its sampling parameters."""

    target: str
    draft: str | None
    max_new_tokens: int
    prompts: list[tuple[list[int], Sampling]]


@dataclass(frozen=True)
class Outputs:
    """The outputs of one strategy, with the target's verifications and the decoding time."""

    sequences: list[list[int]]
    verifications: int
    seconds: float


def generate(strategies: Sequence[dict[str, Any]], job: Job) -> list[Outputs]:
    """Return each strategy's outputs; runs on each rank of the group set in the environment."""
    group = TensorParallelGroup.from_environment("cpu")
    outputs = []
    for settings in strategies:
        gc.collect()
        outputs.append(generate_with(settings, job, group))
    return outputs


def generate_with(settings: dict[str, Any], job: Job, group: TensorParallelGroup) -> Outputs:
    """Return one strategy's outputs for all prompts."""
    engine = Engine.from_pretrained(
        job.target,
        job.draft if settings["mode"] == "hierarchical" else None,
        Settings(dtype="bfloat16", deterministic=True, **settings),
        "cpu",
        group,
    )
    engine.scheduler.stop_tokens = frozenset()
    sequences, verifications, seconds = [], 0, 0.0
    for prompt, sampling in job.prompts:
        sequences.append(list(engine.generate(prompt, job.max_new_tokens, sampling)))
        if engine.stats.levels:  # only on rank 0
            verifications += engine.stats.levels[0].stats.forwards
            seconds += engine.stats.decode_s
    engine.runtime.link.close()
    return Outputs(sequences, verifications, seconds)


def generate_on_ranks(ranks: int, strategies: Sequence[dict[str, Any]], job: Job) -> list[Outputs]:
    """Return each strategy's outputs on rank 0 of so many."""
    if ranks == 1:
        return generate(strategies, job)
    return run_ranks(ranks, generate, strategies, job)[0]


def row_of(
    ranks: int, strategy: str, outputs: Outputs, plain: Sequence[Sequence[int]] | None
) -> dict[str, Any]:
    """Return a strategy's row, with the tokens that equal plain decoding's up to the first
    difference; `plain` is None in plain decoding's own row.
    """
    # the first token of each output is prefill's
    decoded = sum(len(sequence) - 1 for sequence in outputs.sequences)
    row: dict[str, Any] = {
        "ranks": ranks,
        "way": strategy,
        "texts": len(outputs.sequences),
        "tokens": sum(map(len, outputs.sequences)),
        "tokens_per_verification": decoded / outputs.verifications,
        "ms_per_token": 1e3 * outputs.seconds / decoded,
    }
    if plain is not None:
        pairs = list(zip(outputs.sequences, plain, strict=True))
        row["equal"] = sum(common_prefix(*pair) for pair in pairs)
        row["identical_texts"] = sum(one == list(other) for one, other in pairs)
    return row


@pytest.mark.slow
def test_every_strategy_produces_the_tokens_of_plain_decoding(
    full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    models = ("smollm2", None) if full else (str(TARGET), str(DRAFT))
    books, context, max_new_tokens = (5, 2500, 250) if full else (1, 120, 16)
    strategies = STRATEGIES if full else STRATEGIES | HIERARCHICAL
    tokenizer, prompts = tokenizer_of(models[0]), list[tuple[list[int], Sampling]]()
    characters = SKIPPED + 8 * context  # 8 per token: more than in any book
    source = None if text is None else str(text)
    for seed, book in enumerate(documents(source, books, characters).values()):
        prompt = tokenizer(book[SKIPPED:characters]).input_ids[:context]
        assert len(prompt) == context
        prompts += [(prompt, GREEDY), (prompt, Sampling(0.7, top_p=0.9, seed=seed))]
    job = Job(*models, max_new_tokens, prompts)
    rows: list[dict[str, Any]] = []
    for ranks in (1, 2):
        plain, *others = generate_on_ranks(ranks, [PLAIN, *strategies.values()], job)
        rows.append(row_of(ranks, "plain", plain, None))
        for strategy, outputs in zip(strategies, others, strict=True):
            rows.append(row_of(ranks, strategy, outputs, plain.sequences))
    record("deterministic", "Tokens compared with plain decoding's", rows)

    compared = [row for row in rows if "equal" in row]
    assert len(compared) == 2 * len(strategies)
    for row in compared:
        assert row["equal"] == row["tokens"] == 2 * books * max_new_tokens, row
        assert row["identical_texts"] == row["texts"], row
    assert max(row["tokens_per_verification"] for row in compared) > 1.2
