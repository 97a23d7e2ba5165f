"""Concurrent requests compared with one at a time: total tokens/s, and documents per hour.

Both run as a batch job of the engine, prefill included. transformers' `generate` on one padded
batch of the same prompts is run for comparison.
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
from bench.harness.text import select_prompts, text_tokens, tokenizer_of
from bench.peers.hugging_face import Clock, load_transformers, sampling_options
from decoding import Engine, Sampling, Settings
from decoding.engine.request import Request
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

RESIDENT = "resident"  # instead of a link: all KV stays in device memory
PADDED = "transformers: a padded batch"


Run = dict[str, Any]  # times of one batch, prefill and decoding separately, and its counts


def run_batch(engine: Engine, requests: Sequence[Request], concurrency: int) -> Run:
    """Prefill and decode all requests."""
    started = time.perf_counter()
    completions = list(engine.generate_batch(requests, concurrency))
    wall = time.perf_counter() - started
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    all_stats = [completion.stats for completion in completions]
    prefill = sum(stats.first_token_s for stats in all_stats)
    per_token = [stats.ms_per_token or 0.0 for stats in all_stats]
    targets = [stats.levels[0].stats for stats in all_stats]
    forwards = sum(target.forwards for target in targets)
    produced = sum(target.produced for target in targets)
    verifications = [
        round_.verify_s for stats in all_stats for round_ in stats.rounds if round_.drafted
    ]
    tokens = sum(stats.new_tokens - 1 for stats in all_stats)  # without each request's first token
    return {
        "tokens_s": tokens / (wall - prefill),
        "ms_per_token": statistics.mean(per_token),
        "prefill_s": prefill,
        "decode_s": wall - prefill,
        "tokens_per_verification": produced / forwards if forwards else None,
        "verification_s": statistics.median(verifications) if verifications else None,
    }


def run_padded_batch(model: Any, requests: Sequence[Request]) -> Run:
    """Do the same with `generate`; prompts have equal lengths, so that nothing is padded."""
    clock, first = Clock(), requests[0]
    torch.manual_seed(first.sampling.seed)
    batch = torch.tensor([request.prompt for request in requests], device=model.device)

    def record_time(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        clock.put(None)  # a logits processor, as streamers do not support batches
        return scores

    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=first.max_new_tokens,
            logits_processor=[record_time],
            **sampling_options(first.sampling),
        )
    out = out.cpu()  # waits for a GPU
    ended = time.perf_counter()
    tokens = out.shape[1] - batch.shape[1] - 1
    decode = ended - clock.times[0]
    return {
        "tokens_s": len(requests) * tokens / decode,
        "ms_per_token": 1e3 * decode / tokens,
        "prefill_s": clock.times[0] - started,
        "decode_s": decode,
    }


def row(strategy: str, concurrency: int, requests: int, runs: Sequence[Run]) -> Row:
    """Return the row of repeated runs of one batch: medians of times."""
    times = ("tokens_s", "ms_per_token", "prefill_s", "decode_s")
    median = {name: statistics.median(run[name] for run in runs) for name in times}
    say(f"{strategy}, {concurrency} concurrent: {median['tokens_s']:.1f} tokens/s")
    return {
        "way": strategy,  # mode and link
        "concurrency": concurrency,
        **median,  # tokens/s of all requests; ms/token of one request, as its client sees it
        "documents_hour": 3600 * requests / (median["prefill_s"] + median["decode_s"]),
        "tokens_per_verification": runs[-1].get("tokens_per_verification"),
        "verification_s": runs[-1].get("verification_s"),  # median
    }


def settings_of(mode: str, link: str, dtype: str) -> Settings:
    """Return the settings of a mode with a link."""
    if link == RESIDENT:
        local_link = "auto" if torch.cuda.is_available() else "view"
        return Settings(mode=mode, dtype=dtype, link=local_link)
    return Settings(mode=mode, dtype=dtype, link=link, gpu_kv_layers=0)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return the throughput gains of concurrency over one at a time, and over transformers."""
    claims = {}
    by_kind = {(row["way"], row["concurrency"]): row for row in rows}
    baselines: dict[str, Row] = {}
    for (strategy, count), concurrent in by_kind.items():
        if strategy == PADDED or baselines.setdefault(strategy, concurrent) is concurrent:
            continue
        baseline = baselines[strategy]
        claim = f"{strategy}: tokens/s of {count} concurrent requests, times"
        claims[f"{claim} those one at a time"] = concurrent["tokens_s"] / baseline["tokens_s"]
        if padded := by_kind.get((PADDED, count)):
            claims[f"{claim} {PADDED}'s"] = concurrent["tokens_s"] / padded["tokens_s"]
    return claims


@benchmark(
    "{prompts} prompts of {context:,} tokens, {new_tokens} new tokens each, {dtype}, "
    "T {temperature}, top-p {top_p}, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 4096,
    prompts: Annotated[int, typer.Option(help="Prompts, spread evenly over the text.")] = 6,
    concurrency: Annotated[
        str,
        typer.Option(
            help="Numbers of concurrent requests, separated by commas; the first is the baseline."
        ),
    ] = "1,6",
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.")] = "plain,retrieval",
    links: Annotated[
        str, typer.Option(help=f"{RESIDENT}, or links of offloaded KV, separated by commas.")
    ] = f"{RESIDENT},emulated:0.25",
    padded: Annotated[bool, typer.Option(help="Also run transformers' generate.")] = True,
    new_tokens: opt.NewTokens = 128,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    repeats: opt.Repeats = 1,
    output: opt.Output = Path("results/concurrency.json"),
) -> Measurement:
    """Decode requests one at a time and concurrently, in every mode and over every link."""
    tokens, sampling = text_tokens(tokenizer_of(target), text), Sampling(temperature, top_p=top_p)
    counts, rows = opt.integers(concurrency), list[Row]()
    requests = [
        Request(prompt, new_tokens, sampling)
        for prompt in select_prompts(tokens, context, prompts, new_tokens)
    ]
    for mode, link in ((mode, link) for mode in modes.split(",") for link in links.split(",")):
        runs: dict[int, list[Run]] = {count: [] for count in counts}
        with endless(target, draft, settings_of(mode, link, dtype)) as engine:
            for _ in range(repeats):
                for count in counts:
                    runs[count].append(run_batch(engine, requests, count))
        for count, repeated in runs.items():
            rows.append(row(f"{mode}, {link}", count, prompts, repeated))
        yield {"rows": rows, "ratios": ratios(rows)}
    if padded:
        model = load_transformers(
            resolve(target, TensorParallelGroup()), dtype, output.parent / "converted"
        ).to("cuda" if torch.cuda.is_available() else "cpu")
        repeated = [run_padded_batch(model, requests) for _ in range(repeats)]
        rows.append(row(PADDED, prompts, prompts, repeated))
        yield {"rows": rows, "ratios": ratios(rows)}
