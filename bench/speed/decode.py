"""Decoding speed of every mode and of transformers, with and without a link.

The physics: a plain step reads all KV once (attention) or moves it over the link once (offloading),
per token. Hierarchical decoding does so once per verification, so it gains by tokens per
verification as long as verifying and drafting cost less than that. On a CPU a verification is not
flat in draft length, and shorter drafts win; on a link it is, and longer ones win.

The median of the repeats counts. Prefill is done once per method and not timed here.
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
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from bench.harness.decode_loop import PrefilledText, Run
from bench.harness.options import (
    Budget,
    Context,
    Draft,
    Dtype,
    NewTokens,
    Output,
    Repeats,
    Target,
    Temperature,
    Text,
    Threads,
    TopP,
    integers,
)
from bench.harness.record import benchmark, prepare, publish
from bench.harness.text import DEMO, prompt_tokens
from bench.peers.hugging_face import warped
from bench.speed.grid import Series, say, time_text
from decoding import Engine, Sampling, Settings
from decoding.session import draft_lengths

Method = Callable[[Sampling], Run]
PEER_TOKENS = 32  # transformers' runs are no longer than this


@dataclass(frozen=True)
class Row:
    """Medians and means over the runs of one method."""

    method: str
    ms_per_token: float
    min_ms_per_token: float
    max_ms_per_token: float
    tokens_per_verification: float | None
    acceptance: float | None
    link_mb_per_token: float

    @classmethod
    def of(cls, method: str, series: Series) -> Row:
        runs = series.runs
        verified = [run.tokens_per_verification for run in runs if run.tokens_per_verification]
        rates = [run.acceptance for run in runs if run.acceptance is not None]
        return cls(
            method,
            statistics.median(series.times),
            min(series.times),
            max(series.times),
            statistics.fmean(verified) if verified else None,
            statistics.fmean(rates) if rates else None,
            statistics.fmean(run.link_bytes / run.tokens for run in runs) / 1e6,
        )


class Transformers:
    """transformers' generate with its default cache or its static one, on a prefilled prompt."""

    def __init__(self, model: Any, prompt: list[int], new: int, static: bool):
        self.model, self.prompt, self.new = model, torch.tensor([prompt]), new
        self.cache: Any = (
            StaticCache(model.config, len(prompt) + new)
            if static
            else DynamicCache(config=model.config)
        )
        with torch.inference_mode():
            # a static cache's mask is as long as the cache, for every row
            for part in self.prompt[:, :-1].split(2048, dim=1):
                self.model(part, past_key_values=self.cache, logits_to_keep=1)

    def run(self, sampling: Sampling) -> Run:
        """Continue the prompt by as many tokens as it was made for."""
        torch.manual_seed(sampling.seed)
        self._rewind()
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                self.prompt,
                past_key_values=self.cache,
                max_new_tokens=self.new,
                min_new_tokens=self.new,
                **warped(sampling),
            )
        return Run(time.perf_counter() - started, self.new)

    def _rewind(self) -> None:
        length = self.prompt.shape[1] - 1
        if isinstance(self.cache, DynamicCache):
            self.cache.crop(length - self.cache.get_seq_length())
        else:
            # a static cache cannot be cropped, but what lies behind its length is masked
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(length)


def ours(
    engine: Engine, settings: Settings, prompt: list[int], new: int, lengths: list[int]
) -> dict[str, Method]:
    """Read the prompt in one mode; return a method for every draft length, by name."""
    where = f", link {settings.link.partition(':')[2]} GB/s" if "emulated" in settings.link else ""
    say(f"prefill: {settings.mode}{where}")
    longest = replace(settings, draft_length=max(lengths))
    text = PrefilledText(engine.runtime.with_settings(longest), prompt, new)
    methods: dict[str, Method] = {}
    for length in lengths:
        drafting = "" if settings.mode == "plain" else f", draft {length}"
        each = draft_lengths(replace(settings, draft_length=length))
        methods[settings.mode + drafting + where] = partial(text.run, lengths=each)
    return methods


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    context: Context = 32_768,
    new_tokens: NewTokens = 96,
    link_tokens: Annotated[
        int, typer.Option(help="Tokens per run of plain decoding over the link, which is slow.")
    ] = 12,
    rate: Annotated[float, typer.Option(help="Emulated link, GB/s.")] = 0.25,
    budget: Budget = 4096,
    lengths: Annotated[str, typer.Option(help="Draft lengths without a link.")] = "4,6",
    link_lengths: Annotated[str, typer.Option(help="Draft lengths over the link.")] = "16,24",
    threads: Threads = 0,
    repeats: Repeats = 3,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    output: Output = Path("results/decode.json"),
) -> None:
    """Decode the same text in every way, interleaved, and compare ms/token."""
    prepare(threads)
    engine = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    prompt = prompt_tokens(engine.tokenizer, context, text)
    say("prefill: transformers")
    peer = AutoModelForCausalLM.from_pretrained(
        model, dtype=engine.runtime.dtype, trust_remote_code=False
    )
    methods: dict[str, Method] = {
        f"transformers, {kind} cache": Transformers(
            peer, prompt, min(new_tokens, PEER_TOKENS), kind == "static"
        ).run
        for kind in ("default", "static")
    }
    resident = Settings(dtype=dtype, budget=budget, link="view", mode="plain")
    offloaded = replace(resident, link=f"emulated:{rate:g}", resident_layers=0)
    for settings, drafts, plain_tokens in (
        (resident, integers(lengths), new_tokens),
        (offloaded, integers(link_lengths), link_tokens),
    ):
        methods |= ours(engine, settings, prompt, plain_tokens, [1])
        for mode in ("retrieval", "hierarchical"):
            methods |= ours(engine, replace(settings, mode=mode), prompt, new_tokens, drafts)
    series: dict[str, Series] = {}
    for repeat in range(repeats):
        law = Sampling(temperature, top_p=top_p, seed=repeat)
        seeded = {name: partial(method, law) for name, method in methods.items()}
        time_text(seeded, series, repeat, f"run {repeat + 1}")
    rows = [Row.of(name, series[name]) for name in methods]
    title = (
        f"Decoding behind {context:,} tokens, {dtype}, T {temperature}, top-p {top_p}, "
        f"budget {budget}, {torch.get_num_threads()} threads"
    )
    publish(output, title, rows, ratios(rows))


def ratios(rows: list[Row]) -> dict[str, float]:
    """Return the speed against transformers, and of the best drafting against plain decoding."""
    times = {row.method: row.ms_per_token for row in rows}
    plain_over_link = next(name for name in times if name.startswith("plain, link"))

    def best(mode: str, linked: bool) -> float:
        return min(
            ms for name, ms in times.items() if name.startswith(mode) and ("link" in name) == linked
        )

    gains = {
        f"plain, times as fast as {name}": ms / times["plain"]
        for name, ms in times.items()
        if name.startswith("transformers")
    }
    for mode in ("hierarchical", "retrieval"):
        claim = f"{mode} at its best length, times as fast as plain"
        gains[claim] = times["plain"] / best(mode, False)
        gains[f"{claim} over the link"] = times[plain_over_link] / best(mode, True)
    return gains
