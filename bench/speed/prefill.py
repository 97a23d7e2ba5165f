"""Prefill: tokens/s and peak memory, compared with transformers, on one rank and on two.

The physics: prefill is compute-bound, by the weights per token and by attention per pair of tokens;
all other time is overhead. A layer-wise prefill needs memory for the prompt's hidden states and one
layer's KV, for any number of layers; the KV is written to the host.

Every measurement has processes of its own, so that their peaks are independent. The host store is
prefaulted, so that the peak excludes the store and the weights; a link that copies at 1 TB/s makes
the device buffer of one layer's KV real.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from torch.distributed.launcher import LaunchConfig, elastic_launch

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark, prepare
from bench.harness.tables import say
from bench.harness.text import prompt_tokens
from bench.peers.base import Job
from bench.peers.gguf import hugging_face_folder
from bench.peers.hugging_face import load_transformers
from decoding import GREEDY, Engine, Settings
from decoding.engine.session import SequenceState
from decoding.models.loading import load_tokenizer
from decoding.planning.forward_cost import attention_flops, matmul_flops, prefill_flops
from decoding.probe.rates import matmul_rate
from offload.errors import TierForceError
from offload.memory.host import process_peak_bytes
from parallel.config.model_config import ModelConfig
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

OURS, RANKS, PEER = "TierForce", "TierForce, 2 ranks", "transformers, sdpa"
BASELINES = {OURS: PEER, RANKS: OURS}


@dataclass(frozen=True)
class Prefill:
    """One prefill on one rank."""

    seconds: float
    peak: int  # bytes of memory besides weights and host store


# (job, threads of all ranks together) -> the rank's prefill
Measure = Callable[[Job, int], Prefill]


def ours(job: Job, threads: int) -> Prefill:
    """Prefill the prompt on this rank, with its share of the threads."""
    group = TensorParallelGroup.from_environment("cpu")
    prepare(0)
    torch.set_num_threads(max(1, threads // group.size))
    settings = Settings(
        mode="plain", rope=job.rope, dtype=job.dtype, link=job.link, gpu_kv_layers=0
    )
    with torch.inference_mode():
        engine = Engine.from_pretrained(job.target, settings=settings, device="cpu", group=group)
        runtime = engine.runtime
        layout = runtime.target.config.kv_layout(group.size, runtime.dtype, group.rank)
        runtime.arena.allocate(
            (layout.bytes(len(job.prompt) + 1) // layout.dtype.itemsize,)
        ).zero_()
        session = SequenceState(runtime, job.prompt, 1)
        before = _memory_now()
        started = time.perf_counter()
        session.prefill()
        seconds = time.perf_counter() - started
        peak = session.peaks["prefill"] or 0
        runtime.link.close()
    return Prefill(seconds, peak - before)


def peer(job: Job, threads: int) -> Prefill:
    """Prefill the prompt with transformers and its default cache, which counts as host store."""
    prepare(threads)
    prompt = torch.tensor([job.prompt])
    model = load_transformers(
        job.target, job.dtype, job.scratch, job.rope, attn_implementation="sdpa"
    )
    with torch.inference_mode():
        before = _memory_now()
        started = time.perf_counter()
        out = model(prompt, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - started
    cache_bytes = sum(
        layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers
    )
    return Prefill(seconds, (process_peak_bytes() or 0) - before - cache_bytes)


METHODS: dict[str, tuple[str, int, Measure]] = {  # name, ranks, measurement
    "ours": (OURS, 1, ours),
    "ranks": (RANKS, 2, ours),
    "transformers": (PEER, 1, peer),
}


def on_ranks(size: int, measure: Measure, job: Job, threads: int) -> list[Prefill]:
    """Measure in `size` fresh processes with torchrun's environment; return a prefill per rank."""
    config = LaunchConfig(
        1, 1, size, run_id="prefill", rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    results: dict[int, Prefill] = elastic_launch(config, measure)(job, threads)
    return [results[rank] for rank in range(size)]


def _memory_now() -> int:
    """Return the resident bytes of this process, and reset its peak."""
    gc.collect()
    process_peak_bytes()
    return psutil.Process().memory_info().rss


def row_of(job: Job, name: str, runs: list[list[Prefill]], rate: float) -> Row:
    """Return the row of a method, given a prefill per run and rank: median time, maximum peak."""
    config, context = ModelConfig.from_pretrained(job.target), len(job.prompt)
    layout = config.kv_layout(1, getattr(torch, job.dtype))
    needed = context * config.hidden * layout.dtype.itemsize + layout.bytes(context, 1)
    seconds = statistics.median(max(rank.seconds for rank in run) for run in runs)
    flops = sum(prefill_flops(config, context))
    if name == PEER:  # it computes its last layer completely
        pairs = context * (context + 1) / 2
        flops = matmul_flops(config) * context + attention_flops(
            replace(config, sliding_window=None), pairs
        )
    return {
        "tokens": context,
        "method": name,
        "seconds": seconds,
        "tokens_per_s": context / seconds,
        "matmul_share": flops / seconds / rate,  # share of the rate of large matrix products
        "peak_mb_per_rank": max(rank.peak for run in runs for rank in run) / 1e6,
        "needed_mb": needed / 1e6,  # the prompt's hidden states and one layer's KV
    }


@benchmark("Prefill, {dtype}, {threads} threads")
def main(
    target: opt.Target = opt.SMOLLM2,
    rope: opt.Rope = None,
    text: opt.Text = None,
    contexts: opt.Contexts = f"{opt.NATIVE // 2},{opt.NATIVE}",
    methods: Annotated[
        str, typer.Option(help="Methods, of ours, ranks and transformers.")
    ] = "ours,ranks,transformers",
    dtype: opt.Dtype = "bfloat16",
    threads: Annotated[
        int, typer.Option(help="CPU threads of all ranks together; 0: all cores.")
    ] = 0,
    link: Annotated[str, typer.Option(help="Our link: view, or emulated:RATE.")] = "emulated:1000",
    repeats: opt.Repeats = 3,
    output: opt.Output = Path("results/prefill.json"),
) -> Measurement:
    """Measure time and peak memory of prefills on this machine's CPU."""
    if process_peak_bytes() is None:
        raise TierForceError(
            "this system does not report peak memory (/proc/self/clear_refs is missing)."
        )
    model, scratch = resolve(target, TensorParallelGroup()), output.parent / "converted"
    if "transformers" in methods:  # outside of the measured process
        hugging_face_folder(model, dtype, scratch)
    rate = matmul_rate(torch.device("cpu"), getattr(torch, dtype))
    rows, all_threads = list[Row](), torch.get_num_threads()
    for context in opt.integers(contexts):
        prompt = prompt_tokens(load_tokenizer(model), context, text)
        job = Job(model, None, rope, prompt, 1, GREEDY, dtype, None, link, scratch)
        runs: dict[str, list[list[Prefill]]] = {}
        for number in range(repeats):
            for name, ranks, measure in (METHODS[key] for key in methods.split(",")):
                runs.setdefault(name, []).append(on_ranks(ranks, measure, job, all_threads))
                seconds = max(rank.seconds for rank in runs[name][-1])
                say(f"{context:,} tokens, run {number + 1}, {name}: {seconds:.1f} s")
        rows += [row_of(job, name, method_runs, rate) for name, method_runs in runs.items()]
        yield {"rows": rows, "ratios": ratios(rows), "matmul_gflops": rate / 1e9}


def ratios(rows: list[Row]) -> dict[str, float]:
    """Return the speedups of ours over transformers, and of two ranks over one."""
    speeds = {(row["tokens"], row["method"]): row["tokens_per_s"] for row in rows}
    return {
        f"{tokens:,} tokens: {name}, times as fast as {BASELINES[name]}": (
            speed / speeds[tokens, BASELINES[name]]
        )
        for (tokens, name), speed in speeds.items()
        if (tokens, BASELINES.get(name)) in speeds
    }
