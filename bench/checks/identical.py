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
from bench.harness.options import SMOLLM2, Draft, Output, Target, integers
from bench.harness.ranks import run_ranks
from bench.harness.record import benchmark, prepare
from bench.harness.summarizing import conclude
from bench.harness.tables import say
from bench.harness.text import tokenizer_of
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.speculation.sequence import common_prefix
from offload.errors import TierForceError
from parallel.ranks.process_group import Group

_SKIPPED = 30_000  # characters of a book: a title, a list of chapters
_LETTERS = 8  # of a token, more than any book has


@dataclass(frozen=True)
class Way:
    """A way of decoding: its settings, and whether it has a draft model."""

    name: str
    settings: Mapping[str, Any]
    has_draft: bool = False

    def exists(self, dtype: str, draft: str | None) -> bool:
        """Return whether these models can be decoded so."""
        in_16_bits = dtype != "float32" or self.settings["mode"] != "sliced"
        return in_16_bits and (draft is not None or not self.has_draft)


# what the others are held to: all on the device, a token a pass
PLAIN = Way("plain", {"mode": "plain", "link": "view"})
_FEW = {"resident_layers": 1, "link": "emulated:4"}
WAYS = (
    Way("plain, all layers on the host", {**_FEW, "mode": "plain", "resident_layers": 0}),
    Way("retrieval, one layer resident", {**_FEW, "mode": "retrieval", "budget": 512}),
    Way("sliced, one layer resident", {**_FEW, "mode": "sliced"}),
    Way("prompt lookup, drafts of 12", {"mode": "speculative", "lookup": 3, "draft_length": 12}),
    Way(
        "hierarchical, one layer resident",
        {**_FEW, "mode": "hierarchical", "budget": 1024, "refresh": 8},
        has_draft=True,
    ),
)


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
    """The texts of a way, with the passes of the target and the time that they took."""

    texts: list[list[int]]
    verifications: int
    seconds: float

    def per_token(self, amount: float) -> float:
        """Return so much by the tokens that were decoded: the first of a text is prefill's."""
        return amount / sum(len(text) - 1 for text in self.texts)


@dataclass(frozen=True)
class Row:
    """How much of a way's texts is plain decoding's; None for plain decoding's own."""

    ranks: int
    way: str
    texts: int
    tokens: int
    equal: int | None
    identical_texts: int | None
    tokens_per_verification: float
    ms_per_token: float

    @property
    def is_held(self) -> bool:
        return self.equal in (None, self.tokens) and self.identical_texts in (None, self.texts)


def write(way: Way, job: Job) -> Written:
    """Write all texts in a way; on each rank of a group, as the environment says."""
    settings = Settings(dtype=job.dtype, identical=True, **way.settings)
    engine = Engine.from_pretrained(
        job.target,
        job.draft if way.has_draft else None,
        settings,
        "cpu",
        Group.from_environment("cpu"),
    )
    engine.stop_tokens = frozenset()
    texts, verifications, seconds = [], 0, 0.0
    for prompt, law in job.asked:
        texts.append(list(engine.generate(prompt, job.new, law)))
        if engine.stats.levels:  # on rank 0
            verifications += engine.stats.levels[0].stats.passes
            seconds += engine.stats.decode_s
    engine.runtime.link.close()  # no rank waits for another text
    return Written(texts, verifications, seconds)


def prompts_of(books: Mapping[str, str], tokenizer: Any, context: int) -> list[list[int]]:
    """Return so many tokens of each book, behind its title.

    Raises TierForceError for a book that has fewer.
    """
    prompts = []
    for name, book in books.items():
        tokens = tokenizer(book[_SKIPPED : _SKIPPED + _LETTERS * context]).input_ids[:context]
        if len(tokens) < context:
            raise TierForceError(
                f"{name} has {len(tokens)} tokens behind its first {_SKIPPED} characters, fewer "
                f"than {context}: choose longer books, or a shorter --context."
            )
        prompts.append(tokens)
    return prompts


def row_of(ranks: int, way: str, found: Written, plain: Sequence[Sequence[int]] | None) -> Row:
    """Return how much of the texts is plain decoding's: tokens count up to the first other one.

    plain: None for plain decoding itself, of which a row says what it took.
    """
    equal = identical = None
    if plain is not None:
        pairs = list(zip(found.texts, plain, strict=True))
        equal = sum(common_prefix(one, other) for one, other in pairs)
        identical = sum(one == list(other) for one, other in pairs)
    tokens = sum(map(len, plain if plain is not None else found.texts))
    return Row(
        ranks,
        way,
        len(found.texts),
        tokens,
        equal,
        identical,
        1 / found.per_token(found.verifications),
        found.per_token(1e3 * found.seconds),
    )


def complaints(rows: Sequence[Row]) -> list[str]:
    """Return what is wrong, in words."""
    return [
        f"{row.ranks} ranks, {row.way}: {row.equal} of {row.tokens} tokens stand before the first "
        f"difference, and {row.identical_texts} of {row.texts} texts are the same"
        for row in rows
        if not row.is_held
    ]


@benchmark
def main(
    target: Target = SMOLLM2,
    draft: Draft = None,
    data: Annotated[
        str | None, typer.Option(help="pg19, narrativeqa, a folder or a file; Python's reference.")
    ] = None,
    books: Annotated[int, typer.Option(min=1, help="Books, or places of one text, at most.")] = 6,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 2500,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 250,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    output: Output = Path("results/identical.json"),
) -> None:
    """Continue books in every way, and compare each token with plain decoding's."""
    prepare(0)
    texts = documents(data, books, _SKIPPED + _LETTERS * context)
    asked = [
        (prompt, law)
        for seed, prompt in enumerate(prompts_of(texts, tokenizer_of(target), context))
        for law in (GREEDY, Sampling(0.7, top_p=0.9, seed=seed))
    ]
    job = Job(target, draft, dtype, new_tokens, tuple(asked))
    ways = [way for way in WAYS if way.exists(dtype, draft)]
    for way in WAYS:
        if way not in ways:
            say(f"left out, for want of a draft or of 16 bits: {way.name}")
    rows = list[Row]()
    for size in integers(ranks):
        plain = _written(size, PLAIN, job)
        rows.append(row_of(size, PLAIN.name, plain, None))
        for way in ways:
            rows.append(row_of(size, way.name, _written(size, way, job), plain.texts))
            say(f"{size} ranks, {way.name}: {rows[-1].equal} of {rows[-1].tokens} tokens")
    compared = sum(row.tokens for row in rows if row.equal is not None)
    title = f"{compared} tokens, identical in {dtype}, beside plain decoding"
    conclude(output, title, rows, complaints(rows), compared=compared)


def _written(ranks: int, way: Way, job: Job) -> Written:
    """Return the texts of a way on so many ranks."""
    gc.collect()
    return write(way, job) if ranks == 1 else run_ranks(ranks, write, way, job)[0]
