"""Prefill: tokens a second and peak memory, beside transformers' own prefill of the same model, in
one process and over two ranks.

The physics: prefill is arithmetic, that of the weights per token and that of attention per pair of
tokens; whatever else takes time is overhead. Layer by layer it holds the prompt's hidden states and
one layer's KV, however many layers there are; the KV goes to the host.

Every measurement has processes of its own, so that peaks of memory are its own. The host store is
touched before, so that the peak is what comes on top of it and of the weights; a link that copies
at 1 TB/s makes the one layer's KV on the device real.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console

from bench.harness.options import Dtype, Output, Target, Text
from bench.harness.ranks import run_ranks
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, prompt_tokens
from decoding import Engine, Settings
from decoding.planning.passes import attention_flops, matmul_flops, prefill_flops
from decoding.probe.rates import matmul_rate
from decoding.session import Session
from offload.errors import TierForceError
from offload.host_memory import process_peak
from parallel.config import ModelConfig
from parallel.group import Group

OURS, RANKS, PEER = "TierForce", "TierForce, 2 ranks", "transformers, sdpa"


@dataclass(frozen=True)
class Prefill:
    """One prefill on one rank."""

    seconds: float
    peak: int  # bytes of memory on top of what was there, which is weights and host store


def ours(
    model: Path, text: Path | None, context: int, dtype: str, threads: int, link: str
) -> Prefill:
    """On this rank of as many as there are."""
    group = Group.from_environment("cpu")
    prepare(threads // group.size)
    with torch.inference_mode():
        engine = Engine.from_pretrained(
            model,
            settings=Settings(mode="plain", dtype=dtype, link=link, resident_layers=0),
            device="cpu",
            group=group,
        )
        layout = engine.runtime.target.config.kv_layout(group.size, engine.runtime.dtype)
        engine.runtime.arena.take((layout.bytes(context + 1) // layout.dtype.itemsize,)).zero_()
        session = Session(engine.runtime, prompt_tokens(engine.tokenizer, context, text), 1)
        before = _settled()
        started = time.perf_counter()
        session.prefill()
        done = Prefill(time.perf_counter() - started, _told(session.peaks["prefill"]) - before)
        engine.runtime.link.close()
    return done


def peer(model: Path, text: Path | None, context: int, dtype: str, threads: int) -> Prefill:
    """transformers, whole, with its default cache, which keeps the KV: that counts as its host
    store.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepare(threads)
    prompt = torch.tensor([prompt_tokens(AutoTokenizer.from_pretrained(model), context, text)])
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    with torch.inference_mode():
        before = _settled()
        started = time.perf_counter()
        out = loaded(prompt, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - started
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)
    return Prefill(seconds, _told(process_peak()) - before - kept)


def _settled() -> int:
    """Bytes this process has in memory, and the peak forgotten."""
    gc.collect()
    process_peak()
    return psutil.Process().memory_info().rss


def _told(peak: int | None) -> int:
    if peak is None:
        raise TierForceError(
            "this system does not tell the peak of a process's memory (/proc/self/clear_refs)."
        )
    return peak


@benchmark
def main(
    model: Target = DEMO / "target",
    text: Text = None,
    contexts: Annotated[str, typer.Option(help="Prompt tokens.")] = "16384,32768",
    methods: Annotated[
        str, typer.Option(help="Of ours, ranks and transformers.")
    ] = "ours,ranks,transformers",
    dtype: Dtype = "bfloat16",
    threads: Annotated[
        int, typer.Option(help="CPU threads of all ranks together.")
    ] = torch.get_num_threads(),
    link: Annotated[str, typer.Option(help="Ours: view, or emulated:RATE.")] = "emulated:1000",
    repeats: Annotated[
        int, typer.Option(help="Prefills of each kind, interleaved; the median counts.")
    ] = 3,
    output: Output = Path("results/prefill.json"),
) -> None:
    """Time prefills on this machine's CPU, and take their peak memory."""
    prepare(threads)
    kinds: dict[str, tuple[str, int, Callable[..., Prefill], tuple[str, ...]]] = {
        "ours": (OURS, 1, ours, (link,)),
        "ranks": (RANKS, 2, ours, (link,)),
        "transformers": (PEER, 1, peer, ()),
    }
    config, progress = ModelConfig.from_pretrained(model), Console(stderr=True)
    rate = matmul_rate(torch.device("cpu"), getattr(torch, dtype))
    table = []
    for context in map(int, contexts.split(",")):
        found: dict[str, list[list[Prefill]]] = {}
        for number in range(repeats):
            for name, ranks, measure, more in (kinds[each] for each in methods.split(",")):
                done = run_ranks(ranks, measure, model, text, context, dtype, threads, *more)
                found.setdefault(name, []).append(done)
                progress.print(
                    f"{context:,} tokens, run {number + 1}, {name}: "
                    f"{max(rank.seconds for rank in done):.1f} s"
                )
        layout = config.kv_layout(1, getattr(torch, dtype))
        needed = context * config.hidden * layout.dtype.itemsize + layout.bytes(context, 1)
        for name, runs in found.items():
            seconds = statistics.median(max(rank.seconds for rank in run) for run in runs)
            row: dict[str, Any] = {
                "tokens": context,
                "method": name,
                "seconds": seconds,
                "tokens/s": context / seconds,
            }
            flops = sum(prefill_flops(config, context))
            if name == PEER:  # which computes its last layer whole
                flops = (
                    matmul_flops(config) * context
                    + attention_flops(config) * context * (context + 1) / 2
                )
            row["share of the matmul rate"] = flops / seconds / rate
            row["peak MB a rank"] = max(rank.peak for run in runs for rank in run) / 1e6
            table.append({**row, "hidden states + a layer's KV, MB": needed / 1e6})
    show(f"Prefill, {dtype}, {threads} threads, matmul rate {rate / 1e9:.0f} GFLOP/s", table)
    speeds = {(row["tokens"], row["method"]): row["tokens/s"] for row in table}
    ratios = {}
    for (context, name), speed in speeds.items():
        against = {OURS: PEER, RANKS: OURS}.get(name)
        if against and (base := speeds.get((context, against))):
            ratios[f"{context:,} tokens: {name}, times as fast as {against}"] = speed / base
    for claim, value in ratios.items():
        print(f"{claim}: {value:.2f}")
    settings = {
        "dtype": dtype,
        "threads": threads,
        "link": link,
        "repeats": repeats,
    }
    save(
        output, {"settings": settings, "rows": table, "matmul_gflops": rate / 1e9, "ratios": ratios}
    )
