"""Whether the ring overlaps: a verification against the larger of its link and compute times.

The physics: a verification has to move the flushed KV of every host layer (bytes / rate) and to
compute over it (what the same pass takes when host memory is device memory). With perfect overlap
the wall time is the larger of the two. What is lost is the first chunk, which nothing hides, and
the compute on the last.

Layers are streamed whole, or packed, or sliced: of these two less is moved, and joining them is
part of the compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.harness.options import (
    NATIVE,
    SMOLLM2,
    Context,
    Dtype,
    Output,
    Rates,
    Repeats,
    Rope,
    Target,
    Text,
    Threads,
    decimals,
)
from bench.harness.record import benchmark, prepare, publish
from bench.harness.text import prompt_tokens
from bench.speed.passes import median_ms
from decoding import Engine, Settings
from decoding.engine.session import Session
from decoding.probe.slices import slice_rates
from offload.codec.format import slice_format
from parallel.model.transformer import Llama


@dataclass(frozen=True)
class Row:
    """Verifications over one link."""

    layers: str  # one of LAYERS
    link_gbps: float
    mb_per_verification: float
    link_ms: float
    compute_ms: float
    wall_ms: float
    wall_over_bound: float  # the bound is the larger of link and compute


LAYERS = ("streamed", "packed", "sliced")


def saving(dtype: str) -> list[str]:
    """Return the kinds of layers that differ in what they move of this dtype."""
    cut = slice_format(dtype)
    if cut is None:
        return ["streamed"]
    return [kind for kind in LAYERS if kind != "packed" or cut.planes < 4]


def settings_of(layers: str, count: int, base: Settings) -> Settings:
    """Return the settings under which all layers, so many, are of this kind."""
    if layers == "sliced":
        return replace(base, mode="sliced", sliced_layers=count)
    return replace(base, packed=layers == "packed")


@benchmark
def main(
    target: Target = SMOLLM2,
    rope: Rope = None,
    text: Text = None,
    layers: Annotated[
        str | None,
        typer.Option(help=f"Of {','.join(LAYERS)}; by default those that save bytes of the dtype."),
    ] = None,
    context: Context = NATIVE,
    rates: Rates = "0.25,0.5,1,2,4",
    rows: Annotated[int, typer.Option(help="Tokens per verification pass.")] = 17,
    dtype: Dtype = "bfloat16",
    threads: Threads = 0,
    repeats: Repeats = 5,
    output: Output = Path("results/transfer.json"),
) -> None:
    """Time verification passes over emulated links and report wall / max(link, compute)."""
    prepare(threads)
    kinds = saving(dtype) if layers is None else layers.split(",")
    if unknown := set(kinds) - set(LAYERS):
        raise typer.BadParameter(f"{', '.join(unknown)}: use {LAYERS}", param_hint="--layers")
    base = Settings(mode="plain", rope=rope, dtype=dtype, link="view", resident_layers=0)
    engine = Engine.from_pretrained(target, settings=base)
    model, table = engine.runtime.target, list[Row]()
    prompt = prompt_tokens(engine.tokenizer, context, text)
    for kind in kinds:
        settings = settings_of(kind, model.config.layers, base)
        near = Session(engine.runtime.with_settings(settings), prompt, rows + 1)
        near.prefill()
        for rate in decimals(rates):
            runtime = engine.runtime.with_settings(replace(settings, link=f"emulated:{rate}"))
            far = Session(runtime, prompt, rows + 1)
            far.prefill()
            table.append(verified(kind, rate, model, near, far, rows, repeats))
            far.close()
            runtime.link.close()
        near.close()
    rates_of_slices = slice_rates(model.config, model.group.device, engine.runtime.dtype)
    title = (
        f"Verifying {rows} tokens behind {context:,}, no layer resident, "
        f"{torch.get_num_threads()} threads"
    )
    publish(output, title, table, slices=rates_of_slices)
    for name, each in rates_of_slices.items():
        print(f"{name} {each / 1e9:.1f} GB/s")


def verified(
    layers: str, rate: float, model: Llama, near: Session, far: Session, rows: int, repeats: int
) -> Row:
    """Time verifications of the same text in device memory and over the link."""
    tokens, before = near.prompt[:rows], far.target.traffic.link_in
    compute_ms = median_ms(model, near.target, tokens, repeats)
    wall_ms = median_ms(model, far.target, tokens, repeats)
    moved = (far.target.traffic.link_in - before) // (repeats + 1)
    link_ms = moved / rate / 1e6
    bound = max(link_ms, compute_ms)
    return Row(layers, rate, moved / 1e6, link_ms, compute_ms, wall_ms, wall_ms / bound)
