"""What only a GPU can tell, in a quarter of an hour: the CUDA tests, kernels, copies and a model.

The model has the dimensions of an 8B (or a 7B) and weights that were drawn: it costs what the real
one costs, and writes nonsense. A model that is named (`--target`) reads real text. Every row is
saved as it comes. A part that fails or hangs is noted and ended, and the next one goes on.

The physics: copies should run at the bandwidth that one large copy from pinned memory reaches; a
verification should take the larger of its link time and its compute; prefill should be bound by
arithmetic; and no peak should exceed the plan.
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

TESTS_S = 170  # seconds
NAMES = (*list(PARTS)[:6], "tests", *list(PARTS)[6:])


@benchmark("GPU day: {target}")
def main(
    parts: Annotated[
        str,
        typer.Option(help="Parts to run, in this order, separated by commas; by default all."),
    ] = ",".join(NAMES),
    limit: Annotated[
        float, typer.Option(help="Seconds for all parts together. Each has its own limit, too.")
    ] = 900,
    matching: Annotated[
        str | None, typer.Option("-k", help="Of the part tests, those that match, as pytest's -k.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option(help="Run all parts in tiny sizes, without a GPU on a stand-in for one.")
    ] = False,
    target: Annotated[
        str, typer.Option(help="Drawn weights: 8b, 7b or tiny; or a model, which reads real text.")
    ] = "8b",
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    mode: Annotated[
        str, typer.Option(help="Mode of the parts resident, streamed and plan.")
    ] = "hierarchical",
    context: Annotated[
        int | None,
        typer.Option(help="Prompt tokens; by default 65,536, and 130,048 in the part plan."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    device_memory: Annotated[
        float,
        typer.Option(help="The part plan plans as a card of so many GiB does: 24 as an RTX 4090."),
    ] = 24.0,
    retrieval_budget: opt.Budget = 4096,
    gpu_kv_layers: Annotated[
        int | None,
        typer.Option(help="Layers on the device: streamed has 0 by default, plan all that fit."),
    ] = None,
    int8: Annotated[
        bool | None,
        typer.Option(
            "--int8/--no-int8",
            help="Keep the retrieval cache in 8 bits; by default in the parts streamed and plan.",
        ),
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Record short passes as CUDA graphs; by default where it is found to work.",
        ),
    ] = None,
    link: Annotated[str, typer.Option(help="auto; on a CPU also emulated:RATE.")] = "auto",
    output: Annotated[
        Path, typer.Option(help="JSON document, written again after every row.")
    ] = Path("results/gpu.json"),
) -> Measurement:
    """Run parts, each to its end or its limit, and print one table."""
    options, ends_at = locals(), time.monotonic() + limit
    names = parts.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise TierForceError(f"--parts {','.join(unknown)}: use some of {','.join(NAMES)}.")
    if mode not in LEVELS:
        raise TierForceError(f"--mode {mode}: use one of {', '.join(LEVELS)}.")
    choices = Choices(**{each.name: options[each.name] for each in fields(Choices)})
    if rehearse:
        choices = replace(choices, target="tiny")
    rows = list[Row]()
    note = {"note": "a rehearsal in tiny sizes: none of these numbers is a measurement"}
    log = output.with_suffix(".tests.log")
    with _ended_by_sigterm():
        for each in _run(names, choices, ends_at, log, matching):
            rows.append(each)
            say(f"{each['part']}: {each['what']}: {cell(each['value'])} {each['unit']}")
            yield (note if rehearse else {}) | {"rows": rows}
    if failed := dict.fromkeys(each["part"] for each in rows if each["what"] == "failed"):
        raise TierForceError(f"parts that failed: {', '.join(failed)}.")


def _run(
    names: list[str], choices: Choices, ends_at: float, log: Path, matching: str | None
) -> Iterator[Row]:
    """Run parts in their order, as many in one process as stand together without the tests."""
    left = list(names)
    while left:
        if (rest := ends_at - time.monotonic()) <= 0:
            for name in left:
                yield row(name, "failed", "not begun: the time for all parts was up")
            return
        if left[0] == "tests":
            left.pop(0)
            yield from run_tests(log, min(TESTS_S, rest), choices.rehearse, matching)
            continue
        count = left.index("tests") if "tests" in left else len(left)
        left[:count] = yield from run_parts(left[:count], choices, ends_at)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, such as that of `timeout`, end what this process has started, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
