"""What only a GPU can tell, in one command and a few minutes: the CUDA tests, the link, prefill and
passes of a 7B model.

The model has Llama-2-7B's dimensions and weights that were drawn: it costs what the real one costs,
and writes nonsense. Device memory is capped at a consumer card's, so that offloading is real on a
larger card too; the text is 130,048 tokens, or fewer where host memory is short. What is measured
is kept after every part, so that a lease that ends loses no more than the part under way.

The physics: copies should run at the bandwidth that one large copy from pinned memory reaches; a
verification should take the larger of its link time and its compute; prefill should be bound by
arithmetic.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench.harness.decode_loop import continued
from bench.harness.dimensions import LLAMA_7B, LLAMA_68M, TINY, config_of
from bench.harness.record import benchmark, prepare, save, show
from bench.speed.passes import DRAFTED, passes
from decoding import Sampling, Settings
from decoding.planning.passes import prefill_flops
from decoding.probe.rates import matmul_rate
from decoding.runtime import Runtime
from decoding.session import Session
from decoding.speculation.draft_length import Fixed
from offload.bandwidth import Copies
from offload.errors import FitError
from offload.host_memory import host_available
from offload.link import Link
from parallel.config import ModelConfig
from parallel.graphs import graphs_work
from parallel.group import Group
from parallel.loading import random_model

CONTEXT = 130_048
# target and draft
PAIRS = {"7b": (LLAMA_7B, LLAMA_68M), "tiny": (TINY, TINY | {"num_hidden_layers": 1})}


class Report:
    """Rows of one table, saved whenever one is added."""

    def __init__(self, output: Path, settings: dict[str, Any]):
        self.output, self.settings = output, settings
        self.rows: list[dict[str, Any]] = []
        self.progress = Console(stderr=True)

    def add(self, part: str, what: str, value: float | str, unit: str = "") -> None:
        self.rows.append({"part": part, "what": what, "value": value, "unit": unit})
        self.progress.print(
            f"{part}: {what}: {value if isinstance(value, str) else format(value, ',.3f')} {unit}"
        )
        save(self.output, {"settings": self.settings, "rows": self.rows}, quiet=True)


def room(config: ModelConfig, dtype: torch.dtype, wanted: int) -> int:
    """Tokens, at most those wanted, whose KV leaves a tenth of the host's free memory alone."""
    fits = int(0.9 * host_available()) // config.kv_layout(1, dtype).bytes(1) // 1024 * 1024
    if not fits:
        raise FitError("there is not enough host memory for the KV of 1,024 tokens.")
    return min(wanted, fits)


def gigabytes(count: int | None) -> float | str:
    return "unknown" if count is None else count / 1e9


def cuda_tests(report: Report) -> None:
    """Those marked `cuda`, two ranks on one GPU among them."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-x", "--timeout", "120"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    report.add("tests", "pytest -m cuda", lines[-1])
    if done.returncode not in (0, 5):  # 5: none was selected
        report.add("tests", "what failed", "\n".join(lines[-40:]))


def link_rates(report: Report, link: Link) -> float:
    """Reports both directions; returns bytes a second towards the device."""
    with closing(Copies(link)) as copies:
        rate = copies.rate(out=False)
        report.add("link", "pinned host to device", rate / 1e9, "GB/s")
        report.add("link", "device to pinned host", copies.rate(out=True) / 1e9, "GB/s")
    return rate


def read(report: Report, models: Runtime, context: int) -> Session:
    """A session behind its prefill."""
    config, device = models.target.config, models.target.group.device
    arithmetic = matmul_rate(device, models.dtype)
    report.add("prefill", "one large matrix product", arithmetic / 1e12, "TFLOP/s")
    prompt = torch.randint(
        config.vocab, (context,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    started = time.perf_counter()
    session = Session(models, prompt, DRAFTED)
    report.add("prefill", "memory planned and allocated", time.perf_counter() - started, "s")
    started = time.perf_counter()
    session.prefill()[0, 0].item()
    seconds = time.perf_counter() - started
    report.add("prefill", f"{context:,} tokens", seconds, "s")
    report.add("prefill", "speed", context / seconds, "tokens/s")
    report.add(
        "prefill",
        "share of the matrix product's rate (MFU)",
        sum(prefill_flops(config, context)) / seconds / arithmetic,
    )
    report.add("prefill", "peak memory", gigabytes(session.peaks["prefill"]), "GB")
    report.add("prefill", "resident layers", session.plan.resident_layers)
    report.add("prefill", "slots of heads", f"{session.plan.slots} x {session.plan.slot_heads}")
    return session


def verified(report: Report, session: Session, rate: float) -> None:
    """Passes of all levels, and what share of the link a verification reaches; then whole
    rounds.
    """
    before, times = session.target.traffic.link_in, passes(session, repeats=3)
    count = 4 * 4  # kinds of target passes, each once to warm up and three times timed
    moved = (session.target.traffic.link_in - before) / count
    for name, value in times.items():
        report.add("passes", name, value, "ms")
    if moved:
        report.add("passes", "bytes a verification", moved / 1e9, "GB")
        for name in ("target 1", "target 17", "target 33", "33 and refresh"):
            report.add(
                "passes", f"{name}: share of the copy rate", moved / (times[name] / 1e3) / rate
            )
    assert session.retrieval is not None
    session.retrieval.min_interval = 1
    sampling, lengths = Sampling(0.6, top_p=0.9), (Fixed(32), Fixed(1))
    decoder, seconds = continued(session, int(session.prompt[0]), sampling, lengths)
    report.add("rounds", "a round", 1e3 * seconds / decoder.stats.passes, "ms")
    report.add("rounds", "tokens drafted in it", decoder.stats.proposed_per_pass or 0.0)
    report.add(
        "rounds",
        "tokens per verification (drawn weights: says nothing)",
        decoder.stats.tokens_per_pass or 0.0,
    )
    for name, value in session.forward.counts.items():
        report.add("rounds", f"kinds of short passes: {name}", "none" if value is None else value)
    report.add("rounds", "peak memory", gigabytes(session.runtime.link.peak()), "GB")


@benchmark
def main(
    pair: Annotated[
        str, typer.Option(help="Dimensions: 7b, or tiny to see that all of it runs.")
    ] = "7b",
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
    if pair not in PAIRS:
        raise typer.BadParameter(f"{pair} is not one of {', '.join(PAIRS)}", param_hint="--pair")
    group = Group.from_environment(device)
    cap = int(device_memory * 1e9)
    report = Report(
        output,
        {"pair": pair, "context": context, "device_memory_gb": device_memory, "budget": budget},
    )
    if group.device.type == "cuda":
        total = torch.cuda.get_device_properties(group.device).total_memory
        report.add("device", "name", torch.cuda.get_device_name(group.device))
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), group.device)
    if tests and group.device.type == "cuda":  # elsewhere they run on a stand-in
        cuda_tests(report)
    settings = Settings(
        mode="hierarchical",
        budget=budget,
        link=link,
        resident_layers=resident_layers,
        device_memory=int(0.9 * cap),
        graphs=graphs_work(group),
    )
    report.add(
        "device", "short passes can be recorded as CUDA graphs", "yes" if settings.graphs else "no"
    )
    with torch.inference_mode():
        target, draft = (
            random_model(config_of(each), group, torch.bfloat16) for each in PAIRS[pair]
        )
        models = Runtime.make(target, draft, settings.mode, settings)
        rate = link_rates(report, models.link)
        session = read(report, models, room(target.config, models.dtype, context))
        verified(report, session, rate)
        models.link.close()
    show(
        f"{pair} at {len(session.prompt):,} tokens on {group.device}, at most {device_memory:g} GB "
        "of device memory",
        report.rows,
    )
    print(f"written to {output}")
