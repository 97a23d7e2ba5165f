"""Decoding speed on this machine, in one run: transformers, plain decoding, hierarchical decoding,
with and without a link.

The physics: a plain step reads all KV once (attention) or moves it over the link once (offloading),
per token. Hierarchical decoding does so once per verification, so it gains by tokens per
verification as long as verifying and drafting cost less than that. On a CPU a verification is not
flat in draft length, and shorter drafts win; on a link it is, and longer ones win.

Methods are interleaved and repeated; the median of the repeats counts. Prefill is done once per
method and not timed here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from bench.harness.decode_loop import continued
from bench.harness.options import (
    Context,
    Draft,
    Dtype,
    Output,
    Target,
    Temperature,
    Text,
    Threads,
    TopP,
)
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, prompt_tokens
from bench.peers.hugging_face import warped
from decoding import Engine, Sampling, Settings
from decoding.session import Session, draft_lengths
from decoding.speculation.decoders import Speculative


@dataclass(frozen=True)
class Run:
    """One timed decoding: seconds, and what was counted."""

    seconds: float
    tokens: int
    tokens_per_verification: float | None = None
    acceptance: dict[str, float | None] | None = None
    link_bytes: int = 0


class Ours:
    """One of our modes over one link, prefilled; every run starts from the prompt's end, with a
    draft length of its own.
    """

    def __init__(self, engine: Engine, settings: Settings, prompt: list[int], new: int):
        self.session = Session(engine.runtime.with_settings(settings), prompt, new)
        self.first = int(self.session.prefill().argmax())
        self.start = self.session.snapshot()

    def run(self, length: int, sampling: Sampling) -> Run:
        session = self.session
        session.rewind(self.start)
        before = session.target.traffic.link_in
        lengths = draft_lengths(replace(session.runtime.settings, draft_length=length))
        decoder, seconds = continued(session, self.first, sampling, lengths)
        levels = decoder.levels()
        acceptance = {
            level.name: level.stats.acceptance_rate
            for level in levels
            if isinstance(level, Speculative)
        }
        return Run(
            seconds,
            decoder.stats.produced,
            decoder.stats.tokens_per_pass,
            acceptance,
            session.target.traffic.link_in - before,
        )


class Transformers:
    """transformers' generate with its default (dynamic) cache or its static one, continuing from a
    prefilled one.
    """

    def __init__(self, model: Any, prompt: list[int], new: int, static: bool):
        self.model, self.prompt, self.new = model, torch.tensor([prompt]), new
        self.cache = (
            StaticCache(model.config, len(prompt) + new)
            if static
            else DynamicCache(config=model.config)
        )
        with torch.inference_mode():
            # a static cache's mask is as long as the cache, for every row
            for part in self.prompt[:, :-1].split(2048, dim=1):
                self.model(part, past_key_values=self.cache, logits_to_keep=1)

    def run(self, sampling: Sampling) -> Run:
        torch.manual_seed(sampling.seed)
        self._rewind()
        started = time.perf_counter()
        with torch.inference_mode():
            tokens = {"max_new_tokens": self.new, "min_new_tokens": self.new}
            out = self.model.generate(
                self.prompt, past_key_values=self.cache, **tokens, **warped(sampling)
            )
        return Run(time.perf_counter() - started, out.shape[1] - self.prompt.shape[1])

    def _rewind(self) -> None:
        read = self.prompt.shape[1] - 1
        if isinstance(self.cache, DynamicCache):
            self.cache.crop(read - self.cache.get_seq_length())
        else:
            layer: Any
            # a static cache cannot be cropped, but what lies behind its length is masked
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(read)


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    context: Context = 32_768,
    new_tokens: Annotated[int, typer.Option(help="Tokens per run.")] = 96,
    link_tokens: Annotated[
        int, typer.Option(help="Tokens per run of plain decoding over the link, which is slow.")
    ] = 12,
    rate: Annotated[float, typer.Option(help="Emulated link, GB/s.")] = 0.25,
    budget: Annotated[int, typer.Option(help="Retrieval budget, tokens.")] = 4096,
    lengths: Annotated[str, typer.Option(help="Draft lengths without a link.")] = "4,6",
    link_lengths: Annotated[str, typer.Option(help="Draft lengths over the link.")] = "16,24",
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(help="Runs of each method.")] = 3,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    output: Output = Path("results/decode.json"),
) -> None:
    """Decode the same text in every way, interleaved, and compare ms/token."""
    prepare(threads)
    engine = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    prompt = prompt_tokens(engine.tokenizer, context, text)
    resident = Settings(dtype=dtype, budget=budget, link="view", mode="plain")
    offload = replace(resident, link=f"emulated:{rate}", resident_layers=0)
    methods: dict[str, Callable[[Sampling], Run]] = {}
    over_link = f", link {rate:g} GB/s"

    def ours(mode: str, settings: Settings, new: int, lengths: str, where: str) -> None:
        progress.print(f"prefill: {mode}{where}")
        sizes = [int(length) for length in lengths.split(",")]
        method = Ours(
            engine, replace(settings, mode=mode, draft_length=max(sizes)), prompt, new + 1
        )
        for size in sizes:
            name = mode + where if mode == "plain" else f"{mode}, draft {size}{where}"
            methods[name] = partial(method.run, size)

    progress = Console(stderr=True)
    progress.print("prefill: transformers")
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=engine.runtime.dtype)
    for kind in ("default", "static"):
        methods[f"transformers, {kind} cache"] = Transformers(
            peer, prompt, min(new_tokens, 32), kind == "static"
        ).run
    ours("plain", resident, new_tokens, "1", "")
    ours("retrieval", resident, new_tokens, lengths, "")
    ours("hierarchical", resident, new_tokens, lengths, "")
    ours("plain", offload, link_tokens, "1", over_link)
    ours("retrieval", offload, new_tokens, link_lengths, over_link)
    ours("hierarchical", offload, new_tokens, link_lengths, over_link)
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for repeat in range(repeats):
        for name, method in methods.items():
            runs[name].append(method(Sampling(temperature, top_p=top_p, seed=repeat)))
            progress.print(
                f"run {repeat + 1}: {name}: "
                f"{1e3 * runs[name][-1].seconds / runs[name][-1].tokens:.1f} ms/token"
            )
    rows = [_row(name, results) for name, results in runs.items()]
    law = f"T {temperature}, top-p {top_p}"
    show(
        f"Decoding behind {context:,} tokens, {dtype}, {law}, budget {budget}, "
        f"{torch.get_num_threads()} threads",
        rows,
    )
    ratios = _ratios(rows)
    for claim, value in ratios.items():
        print(f"{claim}: {value:.2f}")
    settings = {
        "context": context,
        "budget": budget,
        "dtype": dtype,
        "temperature": temperature,
        "top_p": top_p,
        "rate_gbps": rate,
    }
    save(output, {"settings": settings, "rows": rows, "ratios": ratios})


def _row(name: str, runs: list[Run]) -> dict[str, Any]:
    """Medians over the repeats; the spread is of ms/token."""
    times = sorted(1e3 * run.seconds / run.tokens for run in runs)
    verified = [
        run.tokens_per_verification for run in runs if run.tokens_per_verification is not None
    ]
    rates = [run.acceptance.get("target") for run in runs if run.acceptance]
    known = [rate for rate in rates if rate is not None]
    return {
        "method": name,
        "ms/token": statistics.median(times),
        "least": times[0],
        "most": times[-1],
        "tokens per verification": statistics.fmean(verified) if verified else None,
        "acceptance": statistics.fmean(known) if known else None,
        "link MB/token": statistics.fmean(run.link_bytes / run.tokens for run in runs) / 1e6,
    }


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the issue asks: speed against transformers, and of the best hierarchical setting against
    plain, on each link.
    """
    times = {row["method"]: row["ms/token"] for row in rows}
    offload = next(name for name in times if name.startswith("plain, link"))

    def best(mode: str, linked: bool) -> float:
        return min(
            time
            for name, time in times.items()
            if name.startswith(mode) and ("link" in name) == linked
        )

    kinds = [name for name in times if name.startswith("transformers")]
    found = {f"plain, times as fast as {name}": times[name] / times["plain"] for name in kinds}
    for mode in ("hierarchical", "retrieval"):
        found[f"{mode} at its best length, times as fast as plain"] = times["plain"] / best(
            mode, False
        )
        found[f"{mode} at its best length, times as fast as plain over the link"] = times[
            offload
        ] / best(mode, True)
    return found
