"""Thousands of tokens of books with --identical: whether they are plain decoding's, one by one.

Each book is continued greedily and sampled, on one rank and on two, in ways that share nothing but
the model, the prompt and the seed. On two ranks plain decoding is that of two ranks, for sums over
ranks are rounded otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.harness.data import documents
from bench.harness.options import SMOLLM2, Draft, NewTokens, Output, Target, integers
from bench.harness.ranks import run_ranks
from bench.harness.record import benchmark, prepare
from bench.harness.summarizing import conclude
from bench.harness.tables import say
from bench.harness.text import tokenizer_of
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.settings import LEVELS
from decoding.speculation.text import common_prefix
from parallel.group import Group

_SKIPPED = 30_000  # characters of a book: a title, a list of chapters
_LETTERS = 8  # of a token, more than any book has
PLAIN = "plain"
# each way of decoding, by its settings
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"mode": "plain", "link": "view"},
    "retrieval, over a link": {
        "mode": "retrieval",
        "resident_layers": 1,
        "link": "emulated:2",
        "budget": 512,
    },
    "sliced, over a link": {
        "mode": "sliced",
        "resident_layers": 1,
        "link": "emulated:4",
    },
    "looked up, drafts of 12": {"mode": "speculative", "lookup": 3, "draft_length": 12},
    "hierarchical, over a link": {
        "mode": "hierarchical",
        "resident_layers": 1,
        "link": "emulated:2",
        "budget": 1024,
        "refresh": 8,
    },
}


@dataclass(frozen=True)
class Job:
    """What is written: the models, and the prompts with the law of each."""

    target: str
    draft: str | None
    dtype: str
    new: int
    asked: tuple[tuple[list[int], Sampling], ...]


@dataclass(frozen=True)
class Written:
    """The texts of a way, and how many tokens a verification brought on average."""

    texts: list[list[int]]
    tokens_per_verification: float | None
    ms_per_token: float


@dataclass(frozen=True)
class Row:
    """How much of a way's texts is plain decoding's."""

    ranks: int
    way: str
    texts: int
    tokens: int
    equal: int
    identical_texts: int
    tokens_per_verification: float | None
    ms_per_token: float

    @property
    def held(self) -> bool:
        return self.equal == self.tokens and self.identical_texts == self.texts


def write(way: str, job: Job) -> Written:
    """Write all texts in a way; on each rank of a group, as the environment says."""
    settings = Settings(dtype=job.dtype, identical=True, **WAYS[way])
    draft = job.draft if "draft" in LEVELS[settings.mode] else None
    engine = Engine.from_pretrained(
        job.target, draft, settings, "cpu", Group.from_environment("cpu")
    )
    engine.stop_tokens = frozenset()
    texts, verified, ms = [], list[float](), list[float]()
    for prompt, law in job.asked:
        texts.append(list(engine.generate(prompt, job.new, law)))
        if engine.stats.tokens_per_verification is not None:
            verified.append(engine.stats.tokens_per_verification)
        ms.append(engine.stats.ms_per_token or 0.0)
    engine.runtime.link.close()  # no rank waits for another text
    mean = sum(verified) / len(verified) if verified else None
    return Written(texts, mean, sum(ms) / len(ms))


def ways_of(dtype: str, has_draft: bool) -> list[str]:
    """Return the ways that there are, plain decoding first."""
    there = {"sliced": dtype != "float32", "hierarchical": has_draft}
    return [way for way, settings in WAYS.items() if there.get(settings["mode"], True)]


def prompts_of(books: Mapping[str, str], tokenizer: Any, context: int) -> list[list[int]]:
    """Return so many tokens of each book, behind its title."""
    pieces = [
        book[_SKIPPED : _SKIPPED + _LETTERS * context] or book[: _LETTERS * context]
        for book in books.values()
    ]
    return [tokenizer(piece).input_ids[:context] for piece in pieces]


def row_of(ranks: int, way: str, found: Written, plain: Sequence[Sequence[int]]) -> Row:
    """Return how much of the texts is plain decoding's: tokens count up to the first other one."""
    same = [common_prefix(one, other) for one, other in zip(found.texts, plain, strict=True)]
    whole = [one == list(other) for one, other in zip(found.texts, plain, strict=True)]
    return Row(
        ranks,
        way,
        len(plain),
        sum(map(len, plain)),
        sum(same),
        sum(whole),
        found.tokens_per_verification,
        found.ms_per_token,
    )


@benchmark
def main(
    target: Target = SMOLLM2,
    draft: Draft = None,
    data: Annotated[
        str | None, typer.Option(help="pg19, narrativeqa, a folder or a file; Python's reference.")
    ] = None,
    books: Annotated[int, typer.Option(help="Books, or places of one text, at most.")] = 10,
    context: Annotated[int, typer.Option(help="Prompt tokens.")] = 2500,
    new_tokens: NewTokens = 250,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    output: Output = Path("results/identical.json"),
) -> None:
    """Continue books in every way, and compare each token with plain decoding's."""
    prepare(0)
    found = documents(data, books, _LETTERS * context)
    prompts = prompts_of(found, tokenizer_of(target), context)
    asked = [
        (prompt, law)
        for seed, prompt in enumerate(prompts)
        for law in (GREEDY, Sampling(0.7, top_p=0.9, seed=seed))
    ]
    job = Job(target, draft, dtype, new_tokens, tuple(asked))
    rows = list[Row]()
    for size in integers(ranks):
        plain: list[list[int]] = []
        for way in ways_of(dtype, draft is not None):
            done = write(way, job) if size == 1 else run_ranks(size, write, way, job)[0]
            gc.collect()
            if way == PLAIN:
                plain = done.texts
            rows.append(row_of(size, way, done, plain))
            say(f"{size} ranks, {way}: {rows[-1].equal} of {rows[-1].tokens} tokens")
    wrong = [
        f"{row.ranks} ranks, {row.way}: {row.tokens - row.equal} of {row.tokens} tokens lie behind "
        "a difference"
        for row in rows
        if not row.held
    ]
    compared = sum(row.tokens for row in rows if row.way != PLAIN)
    title = f"{compared} tokens of {len(found)} books, identical in {dtype}, beside plain decoding"
    conclude(output, title, rows, wrong, compared=compared)
