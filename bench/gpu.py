"""What only a GPU can tell, in a few minutes: the CUDA tests, the link, a 7B model's passes.

The model has Llama-2-7B's dimensions and weights that were drawn: it costs what the real one costs,
and writes nonsense. A model that is named (`--target`) reads real text. Device memory is capped at
a consumer card's, so that offloading is real on a larger card too; the text is 130,048 tokens, or
fewer where the model or the host's memory ends before. What is measured is kept after every part,
so that a lease that ends loses no more than the part under way.

The physics: copies should run at the bandwidth that one large copy from pinned memory reaches; a
verification should take the larger of its link time and its compute; prefill should be bound by
arithmetic.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.harness.decode_loop import decode_loop
from bench.harness.dimensions import LLAMA_7B, LLAMA_68M, TINY, config_of
from bench.harness.options import Draft, Rope
from bench.harness.record import benchmark, prepare, save
from bench.harness.tables import cell, heading, say, show
from bench.harness.text import prompt_tokens
from bench.speed.passes import DRAFTED, passes
from decoding import Engine, Sampling, Settings
from decoding.app.probe_view import ROWS
from decoding.planning.passes import prefill_flops
from decoding.probe.rates import matmul_rate, normal, typical
from decoding.probe.slices import slice_rates
from decoding.runtime import Runtime
from decoding.session import Session
from decoding.speculation.draft_length import Fixed
from offload.bandwidth import Copies
from offload.errors import FitError
from offload.fused import Kernels
from offload.host_memory import host_available
from offload.link import Link
from offload.steady import steady_attention
from offload.traffic import Traffic
from parallel.config import ModelConfig
from parallel.graphs import graphs_work
from parallel.group import Group
from parallel.loading import random_model

CONTEXT = 130_048
# target and draft of drawn weights
PAIRS = {"7b": (LLAMA_7B, LLAMA_68M), "tiny": (TINY, TINY | {"num_hidden_layers": 1})}


@dataclass(frozen=True)
class Row:
    """One measured value."""

    part: str
    what: str
    value: float | str
    unit: str


class Report:
    """Rows of one table, saved whenever one is added."""

    def __init__(self, output: Path):
        self.output = output
        self.rows: list[Row] = []

    def add(self, part: str, what: str, value: float | str | None, unit: str = "") -> None:
        """Add a row; a value that is None is unknown."""
        self.rows.append(Row(part, what, "unknown" if value is None else value, unit))
        say(f"{part}: {what}: {cell(self.rows[-1].value)} {unit}")
        save(self.output, {"rows": self.rows}, quiet=True)


def context_that_fits(config: ModelConfig, dtype: torch.dtype, wanted: int) -> int:
    """Return up to `wanted` tokens, whose KV leaves a tenth of the host's free memory alone."""
    fits = int(0.9 * host_available()) // config.kv_layout(1, dtype).bytes(1) // 1024 * 1024
    if not fits:
        raise FitError("there is not enough host memory for the KV of 1,024 tokens.")
    return min(wanted, fits)


def gigabytes(count: int | None) -> float | None:
    """Return a number of bytes in GB."""
    return None if count is None else count / 1e9


def run_cuda_tests(report: Report) -> None:
    """Run the tests marked `cuda`, two ranks on one GPU among them."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-x", "--timeout", "120"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    report.add("tests", "pytest -m cuda", lines[-1])
    if done.returncode not in (0, 5):  # 5: none was selected
        report.add("tests", "what failed", "\n".join(lines[-40:]))


def measure_link(report: Report, link: Link) -> float:
    """Measure both directions; return bytes a second towards the device."""
    with closing(Copies(link)) as copies:
        rate = copies.rate(out=False)
        report.add("link", "pinned host to device", rate / 1e9, "GB/s")
        report.add("link", "device to pinned host", copies.rate(out=True) / 1e9, "GB/s")
    return rate


def measure_slices(report: Report, runtime: Runtime) -> None:
    """Measure what layers in slices are made of, as this device does it."""
    _tell_kernels(report, "slices", runtime.slice_kernels)
    device = runtime.target.group.device
    rates = slice_rates(runtime.target.config, device, runtime.dtype)
    for name, rate in rates.items():
        words, unit = ROWS[name]
        report.add("slices", words, rate / 1e9, unit)


def measure_steady(report: Report, runtime: Runtime, tokens: int = 32_768) -> None:
    """Measure the attention of identical texts, in a layer, as this device does it."""
    _tell_kernels(report, "identical", runtime.steady_kernels)
    config, device, dtype = runtime.target.config, runtime.target.group.device, runtime.dtype
    layout = runtime.needs.layout
    kv = normal(*layout.shape(1, tokens), device=device, dtype=dtype)[0]
    for rows in (1, DRAFTED + 1):
        shape = rows, layout.heads * config.heads // config.kv_heads, config.head_dim
        q = normal(*shape, device=device, dtype=dtype)
        seconds = typical(partial(steady_attention, q, [kv], Traffic()))
        words = f"KV attended to, with {rows} rows of {tokens:,} tokens"
        report.add("identical", words, kv.nbytes / seconds / 1e9, "GB/s")


def _tell_kernels(report: Report, part: str, kernels: Kernels) -> None:
    """Report whether fused kernels are used, or why not."""
    used, why = kernels
    report.add(part, "fused kernels", "used" if used else f"not used: {why}")


def measure_prefill(report: Report, runtime: Runtime, prompt: list[int]) -> Session:
    """Read a prompt; return the session behind it."""
    context = len(prompt)
    config, device = runtime.target.config, runtime.target.group.device
    arithmetic = matmul_rate(device, runtime.dtype)
    report.add("prefill", "one large matrix product", arithmetic / 1e12, "TFLOP/s")
    started = time.perf_counter()
    session = Session(runtime, prompt, DRAFTED)
    report.add("prefill", "memory planned and allocated", time.perf_counter() - started, "s")
    started = time.perf_counter()
    session.prefill()[0, 0].item()
    seconds = time.perf_counter() - started
    used = sum(prefill_flops(config, context)) / seconds / arithmetic
    report.add("prefill", f"{context:,} tokens", seconds, "s")
    report.add("prefill", "speed", context / seconds, "tokens/s")
    report.add("prefill", "share of the matrix product's rate (MFU)", used)
    report.add("prefill", "peak memory", gigabytes(session.peaks["prefill"]), "GB")
    report.add("prefill", "resident layers", session.plan.resident_layers)
    report.add("prefill", "slots of heads", f"{session.plan.slots} x {session.plan.slot_heads}")
    return session


def measure_passes(report: Report, session: Session, rate: float) -> None:
    """Time passes of all levels, and say what share of the link a verification reaches."""
    before, times = session.target.traffic.link_in, passes(session, repeats=3)
    count = 4 * 4  # kinds of target passes, each once to warm up and three times timed
    moved = (session.target.traffic.link_in - before) / count
    for name, ms in times.items():
        report.add("passes", heading(name), ms, "ms")
    if not moved:
        return
    report.add("passes", "bytes a verification", moved / 1e9, "GB")
    for name, ms in times.items():
        if name.startswith("target"):
            share = moved / (ms / 1e3) / rate
            report.add("passes", f"{heading(name)}: share of the copy rate", share)


def measure_rounds(report: Report, session: Session) -> None:
    """Decode in whole rounds."""
    assert session.retrieval is not None
    session.retrieval.min_interval = 1
    sampling, lengths = Sampling(0.6, top_p=0.9), (Fixed(32), Fixed(1))
    decoder, seconds = decode_loop(session, int(session.prompt[0]), sampling, lengths)
    stats = decoder.stats
    report.add("rounds", "a round", 1e3 * seconds / stats.passes, "ms")
    report.add("rounds", "tokens drafted in it", stats.proposed_per_pass or 0.0)
    what = "tokens per verification (drawn weights say nothing)"
    report.add("rounds", what, stats.tokens_per_pass or 0.0)
    for name, value in session.runner.counts.items():
        report.add("rounds", f"kinds of short passes: {name}", "none" if value is None else value)
    report.add("rounds", "peak memory", gigabytes(session.runtime.link.peak()), "GB")


def models(
    target: str, draft: str | None, group: Group, settings: Settings
) -> tuple[Runtime, Any | None]:
    """Return models of drawn weights, or those that are named and their tokenizer."""
    if target not in PAIRS:
        engine = Engine.from_pretrained(target, draft, settings, group=group)
        return engine.runtime, engine.tokenizer
    large, small = (random_model(config_of(each), group, torch.bfloat16) for each in PAIRS[target])
    return Runtime.make(large, small, "hierarchical", settings), None


def prompt_of(config: ModelConfig, tokenizer: Any | None, tokens: int) -> list[int]:
    """Return so many tokens of real text, and drawn ones for drawn weights."""
    if tokenizer is not None:
        return prompt_tokens(tokenizer, tokens)
    generator = torch.Generator().manual_seed(0)
    drawn: list[int] = torch.randint(config.vocab, (tokens,), generator=generator).tolist()
    return drawn


@benchmark
def main(
    target: Annotated[
        str, typer.Option(help="Drawn weights: 7b, or tiny to see that all of it runs; or a model.")
    ] = "7b",
    draft: Draft = None,
    rope: Rope = None,
    context: Annotated[
        int, typer.Option(help="Prompt tokens, fewer where host memory is short.")
    ] = CONTEXT,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    device_memory: Annotated[
        float, typer.Option(help="GB of device memory to use at most, weights included.")
    ] = 24.0,
    budget: Annotated[int, typer.Option(help="Retrieval budget, tokens a head.")] = 4096,
    resident_layers: Annotated[
        int | None, typer.Option(help="Layers on the device; by default as many as fit.")
    ] = None,
    link: Annotated[str, typer.Option(help="auto; on a CPU also emulated:RATE.")] = "auto",
    tests: Annotated[bool, typer.Option(help="Also run the CUDA tests.")] = True,
    output: Annotated[
        Path, typer.Option(help="JSON document, written again after every line.")
    ] = Path("results/gpu.json"),
) -> None:
    """Run every part, print one table, and keep what was measured as it comes."""
    prepare(0)
    group, cap, report = Group.from_environment(device), int(device_memory * 1e9), Report(output)
    if group.device.type == "cuda":
        total = torch.cuda.get_device_properties(group.device).total_memory
        report.add("device", "name", torch.cuda.get_device_name(group.device))
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), group.device)
        if tests:  # elsewhere they run on a stand-in
            run_cuda_tests(report)
    settings = Settings(
        rope=rope,
        budget=budget,
        link=link,
        resident_layers=resident_layers,
        device_memory=int(0.9 * cap),
        graphs=graphs_work(group),
    )
    recorded = "yes" if settings.graphs else "no"
    report.add("device", "short passes can be recorded as CUDA graphs", recorded)
    with torch.inference_mode():
        runtime, tokenizer = models(target, draft, group, settings)
        rate = measure_link(report, runtime.link)
        measure_slices(report, runtime)
        measure_steady(report, runtime)
        config = runtime.target.config
        tokens = min(context_that_fits(config, runtime.dtype, context), config.max_positions - 1024)
        session = measure_prefill(report, runtime, prompt_of(config, tokenizer, tokens))
        measure_passes(report, session, rate)
        measure_rounds(report, session)
        runtime.link.close()
    where = f"{group.device}, at most {device_memory:g} GB of device memory"
    show(f"{target} at {tokens:,} tokens on {where}", report.rows)
    print(f"written to {output}")
