"""A document loaded from the prompt cache: time to first token, and the cost of saving it.

Each variant prefills the document with one model and loads it with another, freshly loaded; the
files are in the system's page cache. transformers with a pickled cache and llama.cpp with a pickled
state are run for comparison.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

from bench.harness import options as opt
from bench.harness.decode_loop import endless
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompt_tokens, tokenizer_of
from bench.peers.base import Job, Result, Unavailable, generate_with_engine
from bench.peers.hugging_face import load_transformers, timed_generate
from bench.peers.llamacpp import Dequantised
from bench.speed.concurrency import settings_of
from bench.speed.conversation import WARMUP
from decoding import Sampling, Settings
from decoding.prefix_cache.store import PromptCache
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

# sampled outputs depend on these settings and the seed; with both fixed, they are the same
FIXED: dict[str, Any] = {
    "num_draft_tokens": 16,
    "num_inner_draft_tokens": 4,
    "retrieval_budget": 2048,
}


@dataclass
class Runs:
    """The measurements of one variant."""

    prefilled: list[Result] = field(default_factory=list)
    saved: list[Result] = field(default_factory=list)  # prefilled, and saved meanwhile
    reopened: list[Result] = field(default_factory=list)
    nbytes: int = 0  # on disk

    def row(self, variant: str) -> Row:
        """Return the row of one variant, with medians of times."""
        first_s, reopened_s = (
            statistics.median(run.first_s for run in runs)
            for runs in (self.prefilled, self.reopened)
        )
        expected, *others = [run.tokens for run in (*self.prefilled, *self.saved, *self.reopened)]
        row = {
            "way": variant,  # mode and link
            "first_reading_s": first_s,  # time to first token with prefill
            "reopened_s": reopened_s,  # time to first token from the prompt cache
            "share": reopened_s / first_s,
            # share of later runs with the same output as the first
            "same_text": statistics.fmean(tokens == expected for tokens in others),
            "gigabytes": self.nbytes / 1e9,  # on disk
            "ms_per_token": _median_ms(self.prefilled) if self.saved else None,
            "ms_while_saving": _median_ms(self.saved) if self.saved else None,
        }
        say(f"{variant}: {first_s:.1f} s, {reopened_s:.2f} s")
        return row


def measure_engine(job: Job, settings: Settings, repeats: int) -> Runs:
    """Measure our engine: unsaved and saved prompts, interleaved, and then reopened ones."""
    runs, folder = Runs(), job.scratch / f"{settings.mode}-{settings.link}"
    saving, cache = replace(settings, prompt_cache=str(folder)), PromptCache(folder)
    cache.create()

    @contextmanager
    def generator(settings: Settings) -> Iterator[Callable[[], Result]]:
        with endless(job.target, job.draft, settings) as engine:
            list(engine.generate(job.prompt[:WARMUP], WARMUP, job.sampling))
            yield lambda: generate_with_engine(engine, job.prompt, job.max_new_tokens, job.sampling)

    with generator(settings) as generate, generator(saving) as save:
        for _ in range(repeats):
            for prompt in cache.prompts():
                cache.drop(prompt)
            runs.prefilled.append(generate())
            runs.saved.append(save())
    runs.nbytes = sum(prompt.manifest.nbytes for prompt in cache.prompts())
    for _ in range(repeats):
        with generator(saving) as reopen:
            runs.reopened.append(reopen())
    return runs


def measure_transformers(job: Job, repeats: int) -> Runs:
    """Measure transformers with a pickled cache."""
    runs, path = Runs(), job.scratch / "cache.pt"
    for number in range(repeats):
        model = load_transformers(job.target, job.dtype, job.scratch, job.rope)
        generate = partial(timed_generate, model, sampling=job.sampling, device=model.device)
        generate(job.prompt[:WARMUP], WARMUP)
        if not number:
            cache = DynamicCache(config=model.config)
            result = generate(job.prompt, job.max_new_tokens, past_key_values=cache)
            runs.prefilled.append(result)
            # all prompt tokens except the last
            cache.crop(len(job.prompt) - 1 - cache.get_seq_length())
            torch.save(cache, path)
            runs.nbytes = path.stat().st_size
        started = time.perf_counter()
        cache = torch.load(path, weights_only=False)
        loading_s = time.perf_counter() - started
        result = generate(job.prompt, job.max_new_tokens, past_key_values=cache)
        runs.reopened.append(replace(result, first_s=result.first_s + loading_s))
    return runs


def measure_llama_cpp(job: Job, repeats: int) -> Runs:
    """Measure llama.cpp on the same weights, with its state pickled. Raises Unavailable."""
    Dequantised.convert(job)
    runs, path = Runs(), job.scratch / "state"
    for number in range(repeats):
        peer = Dequantised(job)
        if not number:
            runs.prefilled.append(peer.run())
            path.write_bytes(pickle.dumps(peer.model.save_state()))
            runs.nbytes = path.stat().st_size
            peer = Dequantised(job)
        started = time.perf_counter()
        peer.model.load_state(pickle.loads(path.read_bytes()))
        loading_s = time.perf_counter() - started
        result = peer.run()
        runs.reopened.append(replace(result, first_s=result.first_s + loading_s))
    return runs


# measurements by name of row
PEERS = {
    "transformers: a pickled cache": measure_transformers,
    "llama.cpp, dequantised: a pickled state": measure_llama_cpp,
}


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return the speedups of reopening, and the slowdowns of decoding while saving."""
    claims = {}
    for row in rows:
        claims[f"{row['way']}: prefill, times reopening"] = 1 / row["share"]
        if row["ms_while_saving"] is not None:
            claim = f"{row['way']}: ms/token while saving, times ms/token without"
            claims[claim] = row["ms_while_saving"] / row["ms_per_token"]
    return claims


@benchmark(
    "{context:,} tokens reopened, {new_tokens} new tokens, {dtype}, T {temperature}, "
    "top-p {top_p}, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 7000,
    variants: opt.Variants = "plain@resident,retrieval@resident,retrieval@emulated:0.25",
    peers: Annotated[bool, typer.Option(help="Also run transformers and llama.cpp.")] = True,
    new_tokens: opt.NewTokens = 128,
    repeats: opt.Repeats = 3,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/reopening.json"),
) -> Measurement:
    """Measure time to first token of a document with prefill and from the prompt cache."""
    sampling, rows = Sampling(temperature, top_p=top_p), list[Row]()
    prompt = prompt_tokens(tokenizer_of(target), context, text)
    model = resolve(target, TensorParallelGroup())
    small = None if draft is None else resolve(draft, TensorParallelGroup())
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(model, small, None, prompt, new_tokens, sampling, dtype, None, "", Path(scratch))
        for variant in variants.split(","):
            mode, _, link = variant.partition("@")
            settings = replace(settings_of(mode, link, dtype), **FIXED)
            rows.append(measure_engine(job, settings, repeats).row(f"{mode}, {link}"))
            yield {"rows": rows, "ratios": ratios(rows)}
        for name, measure in PEERS.items() if peers else ():
            try:
                rows.append(measure(job, repeats).row(name))
                yield {"rows": rows, "ratios": ratios(rows)}
            except Unavailable as reason:
                say(f"{name}: {reason}")


def _median_ms(runs: Sequence[Result]) -> float:
    return statistics.median(run.ms_per_token for run in runs)
