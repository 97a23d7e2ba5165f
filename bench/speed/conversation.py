"""Questions about a document, one after another: how soon each is answered, once it was read.

The caches stay from turn to turn (`Engine.conversation`), and so they do in transformers, whose
`generate` is handed the cache of the turn before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache, GenerationConfig

from bench.harness.options import (
    SMOLLM2,
    Context,
    Draft,
    Dtype,
    NewTokens,
    Output,
    Target,
    Temperature,
    Text,
    Threads,
    TopP,
)
from bench.harness.record import benchmark, prepare, publish
from bench.harness.tables import say
from bench.harness.text import prompt_tokens, tokenizer_of
from bench.peers.hugging_face import generated, load_transformers
from bench.speed.texts import settings_of
from decoding import Engine, Sampling
from parallel.model.loading import resolve
from parallel.ranks.process_group import Group

WARM = 32  # tokens of a text that warms up what is measured
KEPT = "transformers: a cache that is kept"
QUESTIONS = [  # asked of any novel
    "Who is the most important person so far?",
    "Where does this happen?",
    "What do people quarrel about?",
    "How might it end?",
    "Which sentence would you remember?",
    "Is the narrator to be believed?",
]


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn, and the tokens that it wrote."""

    first_s: float  # until the first of them
    ms_per_token: float
    tokens: list[int]
    reused: int | None = None


@dataclass(frozen=True)
class Row:
    """The turns of one way: medians of all but the first, which reads the document."""

    way: str  # mode, and the link of its KV
    first_reading_s: float  # document and question, until the first token
    next_question_s: float  # likewise
    share: float  # of the first reading
    ms_per_token: float
    reused_tokens: float | None = None  # of a question's prompt


Answer = Callable[[list[int]], Turn]  # what is written behind a prompt


def turns(document: Sequence[int], questions: Sequence[list[int]], answer: Answer) -> list[Turn]:
    """Ask one question after another, each behind all that was said."""
    prompt, found = list(document), list[Turn]()
    for question in questions:
        prompt += question
        found.append(answer(prompt))
        prompt += found[-1].tokens
    return found


def of_engine(engine: Engine, new: int, law: Sampling) -> Answer:
    """Return what an engine writes, whose conversation is open."""

    def answer(prompt: list[int]) -> Turn:
        tokens, stats = list(engine.generate(prompt, new, law)), engine.stats
        per_token = stats.ms_per_token or 0.0
        return Turn(stats.first_token_s, per_token, tokens, stats.reused_tokens)

    return answer


def of_transformers(model: Any, new: int, law: Sampling) -> Answer:
    """Return what transformers' `generate` writes with a cache of its own."""
    cache = DynamicCache(config=model.config)

    def answer(prompt: list[int]) -> Turn:
        found = generated(model, prompt, new, law, model.device, past_key_values=cache)
        return Turn(found.first_s, 1e3 * found.decode_s / max(1, new - 1), found.tokens)

    return answer


def row(way: str, found: Sequence[Turn]) -> Row:
    """Return the row of one way's turns."""
    first, *later = found
    question = statistics.median(turn.first_s for turn in later)
    reused = [turn.reused for turn in later if turn.reused is not None]
    return Row(
        way,
        first.first_s,
        question,
        question / first.first_s,
        statistics.median(turn.ms_per_token for turn in found),
        statistics.median(reused) if reused else None,
    )


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return how many times as long the first reading takes as a question behind it."""
    claims = {}
    for each in rows:
        claim = f"{each.way}: the first reading, times a later question"
        claims[claim] = each.first_reading_s / each.next_question_s
    return claims


@benchmark
def main(
    target: Target = SMOLLM2,
    draft: Draft = None,
    text: Text = None,
    context: Context = 7000,
    questions: Annotated[int, typer.Option(min=2, max=len(QUESTIONS), help="Questions.")] = 4,
    ways: Annotated[
        str, typer.Option(help="Modes with their links, as mode@link, separated by commas.")
    ] = "plain@resident,retrieval@resident,retrieval@emulated:0.25",
    kept: Annotated[bool, typer.Option(help="Also transformers with a cache that stays.")] = True,
    new_tokens: NewTokens = 64,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    output: Output = Path("results/conversation.json"),
) -> None:
    """Ask questions about a document, in every way: how long until the first and a later answer."""
    prepare(threads)
    tokenizer = tokenizer_of(target)
    document = prompt_tokens(tokenizer, context, text)
    asked = [
        tokenizer(f"\n\nQuestion: {question}\n\nAnswer:", add_special_tokens=False).input_ids
        for question in QUESTIONS[:questions]
    ]
    law, rows = Sampling(temperature, top_p=top_p), list[Row]()
    for way in ways.split(","):
        mode, _, link = way.partition("@")
        engine = Engine.from_pretrained(target, draft, settings_of(mode, link, dtype))
        engine.stop_tokens = frozenset()  # all make as many tokens
        list(engine.generate(document[:WARM], WARM, law))
        with engine.conversation():
            found = turns(document, asked, of_engine(engine, new_tokens, law))
        engine.close()
        rows.append(row(f"{mode}, {link}", found))
        say(f"{rows[-1].way}: {rows[-1].first_reading_s:.1f} s, {rows[-1].next_question_s:.2f} s")
    if kept:
        scratch = output.parent / "converted"
        model = load_transformers(resolve(target, Group()), dtype, scratch, None)
        model.generation_config = GenerationConfig(pad_token_id=0)
        of_transformers(model, WARM, law)(document[:WARM])
        rows.append(row(KEPT, turns(document, asked, of_transformers(model, new_tokens, law))))
    title = (
        f"{questions} questions about {context:,} tokens, {new_tokens} new ones each, {dtype}, "
        f"T {temperature}, top-p {top_p}, {torch.get_num_threads()} threads"
    )
    publish(output, title, rows, ratios(rows))
