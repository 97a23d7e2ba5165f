"""Whether the ring overlaps: a verification against the larger of its link and compute times.

The physics: a verification has to move the flushed KV of every host layer (bytes / rate) and to
compute over it (what the same pass takes when host memory is device memory). With perfect overlap
the wall time is the larger of the two. What is lost is the first chunk, which nothing hides, and
the compute on the last.

Layers are streamed whole, or compressed, or split: of these two less is moved, and joining them is
part of the compute.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.text import prompt_tokens
from bench.speed.forwards import median_ms
from decoding import Engine, Settings
from decoding.engine.session import SequenceState
from decoding.probe.split_rates import split_rates
from offload.codec.format import split_format
from parallel.model.transformer import Transformer

LAYERS = ("streamed", "compressed", "split")


def saving(dtype: str) -> list[str]:
    """Return the kinds of layers that differ in what they move of this dtype."""
    cut = split_format(dtype)
    if cut is None:
        return ["streamed"]
    return [kind for kind in LAYERS if kind != "compressed" or cut.planes < 4]


def settings_of(layers: str, count: int, base: Settings) -> Settings:
    """Return the settings under which all layers, so many, are of this kind."""
    if layers == "split":
        return replace(base, mode="split", split_kv_layers=count)
    return replace(base, compress_offload=layers == "compressed")


@benchmark("Verifying {rows} tokens behind {context:,}, no layer resident, {threads} threads")
def main(
    target: opt.Target = opt.SMOLLM2,
    rope: opt.Rope = None,
    text: opt.Text = None,
    layers: Annotated[
        str | None,
        typer.Option(help=f"Of {','.join(LAYERS)}; by default those that save bytes of the dtype."),
    ] = None,
    context: opt.Context = opt.NATIVE,
    rates: opt.Rates = "0.25,0.5,1,2,4",
    rows: Annotated[int, typer.Option(help="Tokens per verification pass.")] = 17,
    dtype: opt.Dtype = "bfloat16",
    threads: opt.Threads = 0,
    repeats: opt.Repeats = 5,
    output: opt.Output = Path("results/transfer.json"),
) -> Measurement:
    """Time verification passes over emulated links and report wall / max(link, compute)."""
    kinds = saving(dtype) if layers is None else layers.split(",")
    if unknown := set(kinds) - set(LAYERS):
        raise typer.BadParameter(f"{', '.join(unknown)}: use {LAYERS}", param_hint="--layers")
    base = Settings(mode="plain", rope=rope, dtype=dtype, link="view", gpu_kv_layers=0)
    engine = Engine.from_pretrained(target, settings=base)
    model, table = engine.runtime.target, list[Row]()
    prompt = prompt_tokens(engine.tokenizer, context, text)
    rates_of_slices = split_rates(model.config, model.group.device, engine.runtime.dtype)
    for kind in kinds:
        settings = settings_of(kind, model.config.layers, base)
        near = SequenceState(engine.runtime.with_settings(settings), prompt, rows + 1)
        near.prefill()
        for rate in opt.decimals(rates):
            runtime = engine.runtime.with_settings(replace(settings, link=f"emulated:{rate}"))
            far = SequenceState(runtime, prompt, rows + 1)
            far.prefill()
            table.append(verified(kind, rate, model, near, far, rows, repeats))
            yield {"rows": table, "slices": rates_of_slices}
            far.close()
            runtime.link.close()
        near.close()


def verified(
    layers: str,
    rate: float,
    model: Transformer,
    near: SequenceState,
    far: SequenceState,
    rows: int,
    repeats: int,
) -> Row:
    """Time verifications of the same text in device memory and over the link."""
    tokens, before = near.prompt[:rows], far.target.traffic.link_in
    compute_ms = median_ms(model, near.target, tokens, repeats)
    wall_ms = median_ms(model, far.target, tokens, repeats)
    moved = (far.target.traffic.link_in - before) // (repeats + 1)
    link_ms = moved / rate / 1e6
    return {
        "layers": layers,  # one of LAYERS
        "link_gbps": rate,
        "mb_per_verification": moved / 1e6,
        "link_ms": link_ms,
        "compute_ms": compute_ms,
        "wall_ms": wall_ms,
        "wall_over_bound": wall_ms / max(link_ms, compute_ms),
    }
