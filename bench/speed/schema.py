"""Answers in JSON under a schema: the cost per token, and how well drafts follow."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import jsonschema
import typer

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompt_tokens, tokenizer_of
from bench.speed.concurrency import settings_of
from decoding import Engine, Sampling
from decoding.engine.request import Request
from decoding.grammars.grammar import Grammar
from decoding.text.tools.channels import answer_text

SCHEMA = {  # suitable for any novel
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "people": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8},
        "places": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8},
        "year": {"type": "integer", "minimum": 1500, "maximum": 2030},
        "mood": {"enum": ["cheerful", "sad", "tense", "calm"]},
    },
    "required": ["title", "people", "places", "year", "mood"],
    "additionalProperties": False,
}
QUESTION = "\n\nThe title, people, places, year and mood of the text above in JSON:\n"
WARMUP = 32  # new tokens of a warm-up request
SHORT, CONCURRENCY = 100, 24  # prompt tokens of answers that are checked; concurrent ones


def counts(
    engine: Engine, prompt: list[int], new_tokens: int, sampling: Sampling, grammar: Grammar | None
) -> tuple[float, float]:
    """Return the milliseconds per token, and the tokens per verification, of an answer."""
    list(engine.generate(prompt, new_tokens, sampling, grammar=grammar))
    stats = engine.stats.as_dict()
    return stats["ms_per_token"] or 0.0, stats["tokens_per_verification"] or 1.0


def validity(
    engine: Engine, prompts: Sequence[list[int]], answers: int, new_tokens: int
) -> dict[str, int]:
    """Return how many of several sampled answers are valid, invalid, and cut."""
    grammar = engine.grammars.compile(Grammar.json_schema(SCHEMA))
    requests = [
        Request(
            prompts[seed % len(prompts)],
            new_tokens,
            Sampling(1.0, top_p=1, seed=seed),
            grammar=grammar,
        )
        for seed in range(answers)
    ]
    found = {"answers": answers, "valid": 0, "invalid": 0, "cut": 0}
    for state in engine.generate_batch(requests, CONCURRENCY):
        text = answer_text(engine.tokenizer, state.tokens)
        try:
            jsonschema.validate(json.loads(text), SCHEMA)
            kind = "valid"
        except (ValueError, jsonschema.ValidationError):
            kind = "cut" if state.stats.finish_reason == "length" else "invalid"
        found[kind] += 1
    say(f"{found}")
    return found


def row(name: str, free: list[tuple[float, float]], under: list[tuple[float, float]]) -> Row:
    """Return medians over answers without and with a schema, which alternated."""
    ratios = [own[0] / other[0] for own, other in zip(under, free, strict=True)]
    values: Row = {
        "way": name,  # mode and link
        "free_ms_per_token": statistics.median(each[0] for each in free),
        "schema_ms_per_token": statistics.median(each[0] for each in under),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
        "free_tokens_per_verification": statistics.mean(each[1] for each in free),
        "schema_tokens_per_verification": statistics.mean(each[1] for each in under),
    }
    say(f"{name}: {values['free_ms_per_token']:.1f} ms/token, with a schema {values['ratio']:.2f}x")
    return values


@benchmark(
    "{repeats} pairs of answers about {context:,} tokens, with and without a schema, at most "
    "{new_tokens} new tokens each, {dtype}, T {temperature}, top-p {top_p}, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of answers for each variant.")] = 9,
    variants: opt.Variants = "plain@resident,retrieval@resident",
    new_tokens: opt.NewTokens = 128,
    dtype: opt.Dtype = "bfloat16",
    answers: Annotated[
        int, typer.Option(min=0, help="Further answers, at T 1, that are checked for validity.")
    ] = 0,
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/schema.json"),
) -> Measurement:
    """Measure time per token of answers with and without a JSON schema, for every variant."""
    tokenizer, rows = tokenizer_of(target), list[Row]()
    question = tokenizer(QUESTION, add_special_tokens=False).input_ids
    prompt = [*prompt_tokens(tokenizer, context, text), *question]
    sampling, grammar = Sampling(temperature, top_p=top_p), Grammar.json_schema(SCHEMA)
    for variant in variants.split(","):
        mode, _, link = variant.partition("@")
        engine = Engine.from_pretrained(target, draft, settings_of(mode, link, dtype))
        pairs: tuple[list[tuple[float, float]], ...] = [], []
        counts(engine, prompt, WARMUP, sampling, grammar)
        with engine.conversation():
            for seed in range(repeats):
                own = replace(sampling, seed=seed)
                pair = [counts(engine, prompt, new_tokens, own, each) for each in (None, grammar)]
                if all(ms for ms, _ in pair):  # both have more than one token
                    for kind, each in zip(pairs, pair, strict=True):
                        kind.append(each)
        engine.close()
        rows.append(row(f"{mode}, {link}", *pairs))
        yield {"rows": rows}
    if answers:
        engine = Engine.from_pretrained(target, draft, settings_of("plain", "resident", dtype))
        parts = [prompt[at : at + SHORT] + question for at in range(0, context - SHORT, SHORT)]
        yield {"rows": rows, "validity": validity(engine, parts, answers, new_tokens)}
        engine.close()
