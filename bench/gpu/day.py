"""All measurements that need a GPU, in 15 minutes: the CUDA tests, kernels, copies and a model.

The model has the dimensions of an 8B (or a 7B) and random weights: it costs as much as the real one
and generates nonsense. A named model (`--target`) runs on real text. Every row is saved
immediately. A part that fails or hangs is reported and ended, and the next one runs.

The physics: copies should reach the bandwidth of one large copy from pinned memory; a verification
should take the larger of its link time and its compute; prefill should be compute-bound; and no
peak should exceed the plan.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from bench.gpu.choices import Choices, row
from bench.gpu.tests import run_tests
from bench.gpu.worker import PARTS, run_parts
from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import cell, say
from decoding.config.settings import LEVELS
from offload.errors import TierForceError

TESTS_S = 170  # time limit, seconds
NAMES = (*list(PARTS)[:7], "tests", *list(PARTS)[7:])


@benchmark("GPU day: {target}")
def main(
    parts: Annotated[
        str,
        typer.Option(help="Comma-separated parts to run, in this order; by default all."),
    ] = ",".join(NAMES),
    limit: Annotated[
        float,
        typer.Option(help="Time limit of all parts together, seconds. Each part also has its own."),
    ] = 900,
    matching: Annotated[
        str | None,
        typer.Option("-k", help="Run only matching tests in the part tests, like pytest's -k."),
    ] = None,
    rehearse: Annotated[
        bool, typer.Option(help="Run all parts with tiny sizes; without a GPU, on a stand-in.")
    ] = False,
    target: Annotated[
        str, typer.Option(help="8b, 7b or tiny, with random weights; or a model, run on real text.")
    ] = "8b",
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    mode: Annotated[
        str, typer.Option(help="Mode in the parts resident, streamed and plan.")
    ] = "hierarchical",
    context: Annotated[
        int | None,
        typer.Option(help="Prompt tokens; by default 65,536, or 130,048 in the part plan."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    device_memory: Annotated[
        float,
        typer.Option(help="GPU memory that the part plan assumes, GiB: 24 for an RTX 4090."),
    ] = 24.0,
    retrieval_budget: opt.Budget = 4096,
    gpu_kv_layers: Annotated[
        int | None,
        typer.Option(help="KV layers on the GPU; by default 0 in streamed, all that fit in plan."),
    ] = None,
    int8: Annotated[
        bool | None,
        typer.Option(
            "--int8/--no-int8",
            help="Store the retrieval cache in 8 bits; by default as an engine does.",
        ),
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Capture short forwards as CUDA graphs; by default if a self-test succeeds.",
        ),
    ] = None,
    link: Annotated[str, typer.Option(help="auto; on a CPU also emulated:RATE.")] = "auto",
    output: Annotated[Path, typer.Option(help="JSON document, rewritten after every row.")] = Path(
        "results/gpu.json"
    ),
) -> Measurement:
    """Run parts, each to its end or its time limit, and print one table."""
    options, ends_at = locals(), time.monotonic() + limit
    names = parts.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise TierForceError(f"--parts {','.join(unknown)}: use some of {','.join(NAMES)}.")
    if mode not in LEVELS:
        raise TierForceError(f"--mode {mode}: use one of {', '.join(LEVELS)}.")
    choices = Choices(**{field.name: options[field.name] for field in fields(Choices)})
    if rehearse:
        choices = replace(choices, target="tiny")
    rows = list[Row]()
    note = {"note": "a rehearsal with tiny sizes: none of these numbers is a measurement"}
    log = output.with_suffix(".tests.log")
    with _exit_on_sigterm():
        for new_row in _run(names, choices, ends_at, log, matching):
            rows.append(new_row)
            value = cell(new_row["value"])
            say(f"{new_row['part']}: {new_row['what']}: {value} {new_row['unit']}")
            yield (note if rehearse else {}) | {"rows": rows}
    if failed := dict.fromkeys(entry["part"] for entry in rows if entry["what"] == "failed"):
        raise TierForceError(f"parts that failed: {', '.join(failed)}.")


def _run(
    names: list[str], choices: Choices, ends_at: float, log: Path, matching: str | None
) -> Iterator[Row]:
    """Run parts in order; adjacent ones, other than the tests, share a process."""
    pending = list(names)
    while pending:
        if (remaining_s := ends_at - time.monotonic()) <= 0:
            for name in pending:
                yield row(name, "failed", "not started: the time limit of all parts was reached")
            return
        if pending[0] == "tests":
            pending.pop(0)
            yield from run_tests(log, min(TESTS_S, remaining_s), choices.rehearse, matching)
            continue
        count = pending.index("tests") if "tests" in pending else len(pending)
        pending[:count] = yield from run_parts(pending[:count], choices, ends_at)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM, for example from `timeout`, which also ends child processes."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
