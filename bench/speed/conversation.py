"""Questions about a document, one after another: how soon each is answered, once it was read.

The caches stay from turn to turn (`Engine.conversation`), and so they do in transformers, whose
`generate` is handed the cache of the turn before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import DynamicCache

from bench.harness import options as opt
from bench.harness.decode_loop import endless
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompt_tokens, tokenizer_of
from bench.peers.base import Result, continued
from bench.peers.hugging_face import generated, load_transformers
from bench.speed.concurrency import settings_of
from decoding import Sampling
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

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


Answer = Callable[[list[int]], Result]  # what is written behind a prompt


def turns(document: Sequence[int], questions: Sequence[list[int]], answer: Answer) -> list[Result]:
    """Ask one question after another, each behind all that was said."""
    prompt, found = list(document), list[Result]()
    for question in questions:
        prompt += question
        found.append(answer(prompt))
        prompt += found[-1].tokens
    return found


def of_transformers(model: Any, new: int, law: Sampling) -> Answer:
    """Return what transformers' `generate` writes with a cache of its own."""
    cache = DynamicCache(config=model.config)
    return lambda prompt: generated(model, prompt, new, law, model.device, past_key_values=cache)


def row(way: str, found: Sequence[Result]) -> Row:
    """Return the row of one way: medians of all turns but the first, which reads the document."""
    first, *later = found
    question = statistics.median(turn.first_s for turn in later)
    reused = [turn.reused_tokens for turn in later if turn.reused_tokens is not None]
    say(f"{way}: {first.first_s:.1f} s, {question:.2f} s")
    return {
        "way": way,  # mode, and the link of its KV
        "first_reading_s": first.first_s,  # document and question, until the first token
        "next_question_s": question,
        "share": question / first.first_s,
        "ms_per_token": statistics.median(turn.ms_per_token for turn in found),
        "reused_tokens": statistics.median(reused) if reused else None,  # of a question's prompt
    }


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return how many times as long the first reading takes as a question behind it."""
    return {
        f"{row['way']}: the first reading, times a later question": 1 / row["share"] for row in rows
    }


@benchmark(
    "{questions} questions about {context:,} tokens, {new_tokens} new ones each, {dtype}, "
    "T {temperature}, top-p {top_p}, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 7000,
    questions: Annotated[int, typer.Option(min=2, max=len(QUESTIONS), help="Questions.")] = 4,
    ways: opt.Variants = "plain@resident,retrieval@resident,retrieval@emulated:0.25",
    kept: Annotated[bool, typer.Option(help="Also transformers with a cache that stays.")] = True,
    new_tokens: opt.NewTokens = 64,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/conversation.json"),
) -> Measurement:
    """Ask questions about a document, in every way: how long until the first and a later answer."""
    tokenizer = tokenizer_of(target)
    document = prompt_tokens(tokenizer, context, text)
    asked = [
        tokenizer(f"\n\nQuestion: {question}\n\nAnswer:", add_special_tokens=False).input_ids
        for question in QUESTIONS[:questions]
    ]
    law, rows = Sampling(temperature, top_p=top_p), list[Row]()
    for way in ways.split(","):
        mode, _, link = way.partition("@")
        with endless(target, draft, settings_of(mode, link, dtype)) as engine:
            list(engine.generate(document[:WARM], WARM, law))
            with engine.conversation():
                answer = partial(continued, engine, new=new_tokens, law=law)
                found = turns(document, asked, answer)
        rows.append(row(f"{mode}, {link}", found))
        yield {"rows": rows, "ratios": ratios(rows)}
    if kept:
        model = load_transformers(
            resolve(target, TensorParallelGroup()), dtype, output.parent / "converted"
        )
        of_transformers(model, WARM, law)(document[:WARM])
        rows.append(row(KEPT, turns(document, asked, of_transformers(model, new_tokens, law))))
        yield {"rows": rows, "ratios": ratios(rows)}
