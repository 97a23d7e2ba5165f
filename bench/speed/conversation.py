"""Questions about a document, one after another: time to first token with and without its prefill.

The caches are kept from turn to turn (`Engine.conversation`); transformers' `generate` gets the
cache of the previous turn, too.
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
from bench.peers.base import Result, generate_with_engine
from bench.peers.hugging_face import load_transformers, timed_generate
from bench.speed.concurrency import settings_of
from decoding import Sampling
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

WARMUP = 32  # prompt tokens and new tokens of a warm-up request
TRANSFORMERS = "transformers: a reused cache"
QUESTIONS = [  # suitable for any novel
    "Who is the most important person so far?",
    "Where does this happen?",
    "What do people quarrel about?",
    "How might it end?",
    "Which sentence would you remember?",
    "Is the narrator to be believed?",
]


Answer = Callable[[list[int]], Result]  # generates the answer to a prompt


def turns(document: Sequence[int], questions: Sequence[list[int]], answer: Answer) -> list[Result]:
    """Ask one question after another; each prompt has all previous questions and answers."""
    prompt, results = list(document), list[Result]()
    for question in questions:
        prompt += question
        results.append(answer(prompt))
        prompt += results[-1].tokens
    return results


def transformers_answer(model: Any, max_new_tokens: int, sampling: Sampling) -> Answer:
    """Return a function that answers by transformers' `generate` with one cache for all turns."""
    cache = DynamicCache(config=model.config)
    return lambda prompt: timed_generate(
        model, prompt, max_new_tokens, sampling, model.device, past_key_values=cache
    )


def row(variant: str, results: Sequence[Result]) -> Row:
    """Return the row of one variant: medians over all turns except the first, with the prefill."""
    first, *later = results
    question = statistics.median(turn.first_s for turn in later)
    reused = [turn.reused_tokens for turn in later if turn.reused_tokens is not None]
    say(f"{variant}: {first.first_s:.1f} s, {question:.2f} s")
    return {
        "way": variant,  # mode and link
        "first_reading_s": first.first_s,  # time to the first token after document and question
        "next_question_s": question,
        "share": question / first.first_s,
        "ms_per_token": statistics.median(turn.ms_per_token for turn in results),
        "reused_tokens": statistics.median(reused) if reused else None,  # tokens of a later prompt
    }


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return the time of the first question, with the prefill, over that of a later question."""
    return {
        f"{row['way']}: the first question, times a later question": 1 / row["share"]
        for row in rows
    }


@benchmark(
    "{questions} questions about {context:,} tokens, {new_tokens} new tokens each, {dtype}, "
    "T {temperature}, top-p {top_p}, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 7000,
    questions: Annotated[
        int, typer.Option(min=2, max=len(QUESTIONS), help="Number of questions.")
    ] = 4,
    variants: opt.Variants = "plain@resident,retrieval@resident,retrieval@emulated:0.25",
    transformers: Annotated[
        bool, typer.Option(help="Also run transformers, with a reused cache.")
    ] = True,
    new_tokens: opt.NewTokens = 64,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/conversation.json"),
) -> Measurement:
    """Measure time to first token of the first and of later questions, for every variant."""
    tokenizer = tokenizer_of(target)
    document = prompt_tokens(tokenizer, context, text)
    prompts = [
        tokenizer(f"\n\nQuestion: {question}\n\nAnswer:", add_special_tokens=False).input_ids
        for question in QUESTIONS[:questions]
    ]
    sampling, rows = Sampling(temperature, top_p=top_p), list[Row]()
    for variant in variants.split(","):
        mode, _, link = variant.partition("@")
        with endless(target, draft, settings_of(mode, link, dtype)) as engine:
            list(engine.generate(document[:WARMUP], WARMUP, sampling))
            with engine.conversation():
                generate = partial(
                    generate_with_engine, engine, max_new_tokens=new_tokens, sampling=sampling
                )
                results = turns(document, prompts, generate)
        rows.append(row(f"{mode}, {link}", results))
        yield {"rows": rows, "ratios": ratios(rows)}
    if transformers:
        model = load_transformers(
            resolve(target, TensorParallelGroup()), dtype, output.parent / "converted"
        )
        transformers_answer(model, WARMUP, sampling)(document[:WARMUP])
        answer = transformers_answer(model, new_tokens, sampling)
        rows.append(row(TRANSFORMERS, turns(document, prompts, answer)))
        yield {"rows": rows, "ratios": ratios(rows)}
