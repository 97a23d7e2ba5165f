"""With --deterministic, every way of decoding writes plain decoding's tokens, one by one.

Each book is continued greedily and sampled, on one rank and on two, in ways that share nothing but
the model, the prompt and the seed. On two ranks plain decoding is that of two ranks, since sums
over ranks round differently. In full: SmolLM2, 20,000 tokens, some 40 minutes.
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

SKIPPED = 30_000  # characters of a book: its title, a list of chapters
FEW = {"gpu_kv_layers": 1, "link": "emulated:4"}
PLAIN = {"mode": "plain", "link": "view"}  # all on the device, a token per pass
WAYS: dict[str, dict[str, Any]] = {
    "plain, all layers on the host": {**FEW, "mode": "plain", "gpu_kv_layers": 0},
    "retrieval, one layer resident": {**FEW, "mode": "retrieval", "retrieval_budget": 512},
    "split, one layer resident": {**FEW, "mode": "split"},
    "prompt lookup, drafts of 12": {
        "mode": "speculative",
        "prompt_lookup_ngram": 3,
        "num_draft_tokens": 12,
    },
}
HIERARCHICAL = {  # for models with a draft
    "hierarchical, one layer resident": {
        **FEW,
        "mode": "hierarchical",
        "retrieval_budget": 1024,
        "selection_interval": 8,
    }
}


@dataclass(frozen=True)
class Job:
    """The models, and the prompts with how to sample after each."""

    target: str
    draft: str | None
    new: int
    prompts: list[tuple[list[int], Sampling]]


@dataclass(frozen=True)
class Written:
    """The texts of one way, with the target's passes and the seconds that they took."""

    texts: list[list[int]]
    verifications: int
    seconds: float


def write(ways: Sequence[dict[str, Any]], job: Job) -> list[Written]:
    """Write all texts in each way, on each rank of the group that the environment describes."""
    group, written = TensorParallelGroup.from_environment("cpu"), list[Written]()
    for settings in ways:
        gc.collect()
        written.append(write_once(settings, job, group))
    return written


def write_once(settings: dict[str, Any], job: Job, group: TensorParallelGroup) -> Written:
    """Write all texts in one way."""
    engine = Engine.from_pretrained(
        job.target,
        job.draft if settings["mode"] == "hierarchical" else None,
        Settings(dtype="bfloat16", deterministic=True, **settings),
        "cpu",
        group,
    )
    engine.stop_tokens = frozenset()
    texts, verifications, seconds = [], 0, 0.0
    for prompt, sampling in job.prompts:
        texts.append(list(engine.generate(prompt, job.new, sampling)))
        if engine.stats.levels:  # on rank 0
            verifications += engine.stats.levels[0].stats.forwards
            seconds += engine.stats.decode_s
    engine.runtime.link.close()
    return Written(texts, verifications, seconds)


def on_ranks(ranks: int, ways: Sequence[dict[str, Any]], job: Job) -> list[Written]:
    """Return what rank 0 of so many has written in each way."""
    return write(ways, job) if ranks == 1 else run_ranks(ranks, write, ways, job)[0]


def row_of(
    ranks: int, way: str, found: Written, plain: Sequence[Sequence[int]] | None
) -> dict[str, Any]:
    """Return how much of the texts is plain decoding's: tokens count up to the first difference.

    `plain` None: these are plain decoding's own.
    """
    decoded = sum(len(text) - 1 for text in found.texts)  # the first of each is prefill's
    row: dict[str, Any] = {
        "ranks": ranks,
        "way": way,
        "texts": len(found.texts),
        "tokens": sum(map(len, found.texts)),
        "tokens_per_verification": decoded / found.verifications,
        "ms_per_token": 1e3 * found.seconds / decoded,
    }
    if plain is not None:
        pairs = list(zip(found.texts, plain, strict=True))
        row["equal"] = sum(common_prefix(*pair) for pair in pairs)
        row["identical_texts"] = sum(one == list(other) for one, other in pairs)
    return row


@pytest.mark.slow
def test_every_way_writes_what_plain_decoding_does(
    full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    models = ("smollm2", None) if full else (str(TARGET), str(DRAFT))
    books, context, new = (5, 2500, 250) if full else (1, 120, 16)
    ways = WAYS if full else WAYS | HIERARCHICAL
    tokenizer, prompts = tokenizer_of(models[0]), list[tuple[list[int], Sampling]]()
    letters = SKIPPED + 8 * context  # more than any book has in a token
    source = None if text is None else str(text)
    for seed, book in enumerate(documents(source, books, letters).values()):
        prompt = tokenizer(book[SKIPPED:letters]).input_ids[:context]
        assert len(prompt) == context
        prompts += [(prompt, GREEDY), (prompt, Sampling(0.7, top_p=0.9, seed=seed))]
    job, rows = Job(*models, new, prompts), list[dict[str, Any]]()
    for ranks in (1, 2):
        plain, *others = on_ranks(ranks, [PLAIN, *ways.values()], job)
        rows.append(row_of(ranks, "plain", plain, None))
        for way, found in zip(ways, others, strict=True):
            rows.append(row_of(ranks, way, found, plain.texts))
    record("deterministic", "Tokens beside plain decoding's", rows)

    compared = [row for row in rows if "equal" in row]
    assert len(compared) == 2 * len(ways)
    for row in compared:
        assert row["equal"] == row["tokens"] == 2 * books * new, row
        assert row["identical_texts"] == row["texts"], row
    assert max(row["tokens_per_verification"] for row in compared) > 1.2
