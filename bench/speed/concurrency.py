"""Texts at once beside one by one: tokens a second of all of them, and documents an hour.

Both go through the engine as a batch job does, prefill included. Beside them stands transformers'
`generate` on one padded batch of the same prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.harness import options as opt
from bench.harness.decode_loop import endless
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompts, text_tokens, tokenizer_of
from bench.peers.hugging_face import Clock, load_transformers, warped
from decoding import Engine, Sampling, Settings
from decoding.engine.request import Request
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

RESIDENT = "resident"  # in place of a link: all KV stays in device memory
PADDED = "transformers: a padded batch"


Run = dict[str, Any]  # seconds of one batch, reading and decoding apart, and what was counted


def write(engine: Engine, asked: Sequence[Request], concurrency: int) -> Run:
    """Read and continue all texts."""
    started = time.perf_counter()
    texts = list(engine.generate_batch(asked, concurrency))
    wall = time.perf_counter() - started
    for text in texts:
        if text.error is not None:
            raise text.error
    stats = [text.stats for text in texts]
    prefill = sum(each.first_token_s for each in stats)
    per_token = [each.ms_per_token or 0.0 for each in stats]
    tops = [each.levels[0].stats for each in stats]
    passes = sum(top.forwards for top in tops)
    verifications = [each.verify_s for text in stats for each in text.rounds if each.drafted]
    tokens = sum(each.new_tokens - 1 for each in stats)  # but for the first of each text
    return {
        "tokens_s": tokens / (wall - prefill),
        "ms_per_token": statistics.mean(per_token),
        "prefill_s": prefill,
        "decode_s": wall - prefill,
        "tokens_per_verification": sum(top.produced for top in tops) / passes if passes else None,
        "verification_s": statistics.median(verifications) if verifications else None,
    }


def write_padded(model: Any, asked: Sequence[Request]) -> Run:
    """Do the same by `generate`: all prompts are as long, so there is nothing to pad."""
    clock, first = Clock(), asked[0]
    torch.manual_seed(first.sampling.seed)
    batch = torch.tensor([request.prompt for request in asked])

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        clock.put(None)  # as a processor of logits: streamers take no batches
        return scores

    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=first.max_new_tokens,
            logits_processor=[note],
            **warped(first.sampling),
        )
    ended = time.perf_counter()
    made = out.shape[1] - batch.shape[1] - 1
    decode = ended - clock.times[0]
    return {
        "tokens_s": len(asked) * made / decode,
        "ms_per_token": 1e3 * decode / made,
        "prefill_s": clock.times[0] - started,
        "decode_s": decode,
    }


def row(way: str, concurrency: int, texts: int, runs: Sequence[Run]) -> Row:
    """Return the row of some runs of the same batch of texts: medians of times."""
    times = ("tokens_s", "ms_per_token", "prefill_s", "decode_s")
    median = {name: statistics.median(run[name] for run in runs) for name in times}
    say(f"{way}, {concurrency} at once: {median['tokens_s']:.1f} tokens/s")
    return {
        "way": way,  # mode, and the link of its KV
        "concurrency": concurrency,
        **median,  # tokens/s of all texts together; ms/token of one, as its reader sees it
        "documents_hour": 3600 * texts / (median["prefill_s"] + median["decode_s"]),
        "tokens_per_verification": runs[-1].get("tokens_per_verification"),
        "verification_s": runs[-1].get("verification_s"),  # the median of all
    }


def settings_of(mode: str, link: str, dtype: str) -> Settings:
    """Return the settings of one way to decode."""
    if link == RESIDENT:
        near = "auto" if torch.cuda.is_available() else "view"
        return Settings(mode=mode, dtype=dtype, link=near)
    return Settings(mode=mode, dtype=dtype, link=link, gpu_kv_layers=0)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return how much faster texts are that share passes, or time, by what they are beside."""
    claims = {}
    by_kind = {(row["way"], row["concurrency"]): row for row in rows}
    alone: dict[str, Row] = {}
    for (way, count), shared in by_kind.items():
        if way == PADDED or alone.setdefault(way, shared) is shared:
            continue
        claim = f"{way}: tokens a second of {count} at once, times"
        claims[f"{claim} those one by one"] = shared["tokens_s"] / alone[way]["tokens_s"]
        if other := by_kind.get((PADDED, count)):
            claims[f"{claim} {PADDED}'s"] = shared["tokens_s"] / other["tokens_s"]
    return claims


@benchmark(
    "{texts} texts of {context:,} tokens, {new_tokens} new ones each, {dtype}, T {temperature}, "
    "top-p {top_p}, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 4096,
    texts: Annotated[int, typer.Option(help="Texts, taken from all over the text.")] = 6,
    concurrency: Annotated[
        str, typer.Option(help="Texts at once, separated by commas; 1 comes first.")
    ] = "1,6",
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.")] = "plain,retrieval",
    links: Annotated[
        str, typer.Option(help=f"{RESIDENT}, or links that all KV comes over, separated by commas.")
    ] = f"{RESIDENT},emulated:0.25",
    padded: Annotated[bool, typer.Option(help="Also transformers' generate.")] = True,
    new_tokens: opt.NewTokens = 128,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    repeats: opt.Repeats = 1,
    output: opt.Output = Path("results/texts.json"),
) -> Measurement:
    """Decode some texts one by one and at once, in every mode and over every link."""
    every = text_tokens(tokenizer_of(target), text)
    law, rows, counts = Sampling(temperature, top_p=top_p), list[Row](), opt.integers(concurrency)
    asked = [
        Request(prompt, new_tokens, law) for prompt in prompts(every, context, texts, new_tokens)
    ]
    for mode, link in ((mode, link) for mode in modes.split(",") for link in links.split(",")):
        runs: dict[int, list[Run]] = {count: [] for count in counts}
        with endless(target, draft, settings_of(mode, link, dtype)) as engine:
            for _ in range(repeats):
                for count in counts:
                    runs[count].append(write(engine, asked, count))
        for count, found in runs.items():
            rows.append(row(f"{mode}, {link}", count, texts, found))
        yield {"rows": rows, "ratios": ratios(rows)}
    if padded:
        model = load_transformers(
            resolve(target, TensorParallelGroup()), dtype, output.parent / "converted"
        )
        rows.append(row(PADDED, texts, texts, [write_padded(model, asked) for _ in range(repeats)]))
        yield {"rows": rows, "ratios": ratios(rows)}
