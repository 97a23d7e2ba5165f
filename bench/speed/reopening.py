"""A document that was read before, opened again from disk: how soon its text goes on, and what
saving costs a text that is written meanwhile.

Each way reads the document with one model and opens it with another, just loaded; what is on disk
is in the system's page cache. Beside ours stand transformers, whose cache is pickled, and
llama.cpp, whose state is.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from bench.peers.base import Job, Result, Unavailable, continued
from bench.peers.hugging_face import generated, load_transformers
from bench.peers.llamacpp import Dequantised
from bench.speed.concurrency import settings_of
from bench.speed.conversation import WARM
from decoding import Sampling, Settings
from decoding.prefix_cache.store import PromptCache
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

# what a sampled text depends on beside its seed: with these fixed, it is the same text
STEADY: dict[str, Any] = {
    "num_draft_tokens": 16,
    "num_inner_draft_tokens": 4,
    "retrieval_budget": 2048,
}


@dataclass
class Runs:
    """What was measured of one way."""

    read: list[Result] = field(default_factory=list)
    saved: list[Result] = field(default_factory=list)  # read likewise, and kept
    reopened: list[Result] = field(default_factory=list)
    nbytes: int = 0

    def row(self, way: str) -> Row:
        """Return the row of one way, with medians of times."""
        first, again = (
            statistics.median(run.first_s for run in runs) for runs in (self.read, self.reopened)
        )
        wanted, *others = [run.tokens for run in (*self.read, *self.saved, *self.reopened)]
        row = {
            "way": way,  # mode, and the link of its KV
            "first_reading_s": first,  # until the first new token
            "reopened_s": again,  # likewise
            "share": again / first,
            # the share of later runs whose text is that of the first
            "same_text": statistics.fmean(tokens == wanted for tokens in others),
            "gigabytes": self.nbytes / 1e9,  # on disk
            "ms_per_token": _median_ms(self.read) if self.saved else None,
            "ms_while_saving": _median_ms(self.saved) if self.saved else None,
        }
        say(f"{way}: {first:.1f} s, {again:.2f} s")
        return row


def of_engine(job: Job, settings: Settings, repeats: int) -> Runs:
    """Measure texts of ours that are kept and others, in turns, and then reopened."""
    runs, kept = Runs(), job.scratch / f"{settings.mode}-{settings.link}"
    keeping, cache = replace(settings, prompt_cache=str(kept)), PromptCache(kept)
    cache.create()

    @contextmanager
    def writer(settings: Settings) -> Iterator[Callable[[], Result]]:
        with endless(job.target, job.draft, settings) as engine:
            list(engine.generate(job.prompt[:WARM], WARM, job.sampling))
            yield lambda: continued(engine, job.prompt, job.new, job.sampling)

    with writer(settings) as read, writer(keeping) as save:
        for _ in range(repeats):
            for each in cache.prompts():
                cache.drop(each)
            runs.read.append(read())
            runs.saved.append(save())
    runs.nbytes = sum(each.manifest.nbytes for each in cache.prompts())
    for _ in range(repeats):
        with writer(keeping) as reopen:
            runs.reopened.append(reopen())
    return runs


def of_transformers(job: Job, repeats: int) -> Runs:
    """Measure transformers with a cache that is pickled."""
    runs, path = Runs(), job.scratch / "cache.pt"
    for number in range(repeats):
        model = load_transformers(job.target, job.dtype, job.scratch, job.rope)
        law, device = job.sampling, model.device
        generated(model, job.prompt[:WARM], WARM, law, device)
        if not number:
            cache = DynamicCache(config=model.config)
            written = generated(model, job.prompt, job.new, law, device, past_key_values=cache)
            runs.read.append(written)
            cache.crop(len(job.prompt) - 1 - cache.get_seq_length())  # all but the last
            torch.save(cache, path)
            runs.nbytes = path.stat().st_size
        started = time.perf_counter()
        cache = torch.load(path, weights_only=False)
        loading_s = time.perf_counter() - started
        written = generated(model, job.prompt, job.new, law, device, past_key_values=cache)
        runs.reopened.append(replace(written, first_s=written.first_s + loading_s))
    return runs


def of_llama_cpp(job: Job, repeats: int) -> Runs:
    """Measure llama.cpp on the same weights, with its state pickled. Raises Unavailable."""
    Dequantised.convert(job)
    runs, path = Runs(), job.scratch / "state"
    for number in range(repeats):
        peer = Dequantised(job)
        if not number:
            runs.read.append(peer.run())
            path.write_bytes(pickle.dumps(peer.model.save_state()))
            runs.nbytes = path.stat().st_size
            peer = Dequantised(job)
        started = time.perf_counter()
        peer.model.load_state(pickle.loads(path.read_bytes()))
        loading_s = time.perf_counter() - started
        written = peer.run()
        runs.reopened.append(replace(written, first_s=written.first_s + loading_s))
    return runs


# by the names of their rows
PEERS = {
    "transformers: a pickled cache": of_transformers,
    "llama.cpp, dequantised: a pickled state": of_llama_cpp,
}


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return what reopening saves, and what saving costs."""
    claims = {}
    for row in rows:
        claims[f"{row['way']}: the first reading, times reopening it"] = 1 / row["share"]
        if row["ms_while_saving"] is not None:
            claim = f"{row['way']}: a token while the text is saved, times one of another text"
            claims[claim] = row["ms_while_saving"] / row["ms_per_token"]
    return claims


@benchmark(
    "{context:,} tokens reopened, {new_tokens} new ones, {dtype}, T {temperature}, top-p {top_p}, "
    "{threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 7000,
    ways: opt.Variants = "plain@resident,retrieval@resident,retrieval@emulated:0.25",
    peers: Annotated[bool, typer.Option(help="Also transformers and llama.cpp.")] = True,
    new_tokens: opt.NewTokens = 128,
    repeats: opt.Repeats = 3,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/reopening.json"),
) -> Measurement:
    """Read a document, keep it, and open it again from disk: how long until the first token."""
    law, rows = Sampling(temperature, top_p=top_p), list[Row]()
    prompt = prompt_tokens(tokenizer_of(target), context, text)
    model = resolve(target, TensorParallelGroup())
    small = None if draft is None else resolve(draft, TensorParallelGroup())
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(model, small, None, prompt, new_tokens, law, dtype, None, "", Path(scratch))
        for way in ways.split(","):
            mode, _, link = way.partition("@")
            settings = replace(settings_of(mode, link, dtype), **STEADY)
            rows.append(of_engine(job, settings, repeats).row(f"{mode}, {link}"))
            yield {"rows": rows, "ratios": ratios(rows)}
        for name, measure in PEERS.items() if peers else ():
            try:
                rows.append(measure(job, repeats).row(name))
                yield {"rows": rows, "ratios": ratios(rows)}
            except Unavailable as reason:
                say(f"{name}: {reason}")


def _median_ms(runs: Sequence[Result]) -> float:
    return statistics.median(run.ms_per_token for run in runs)
