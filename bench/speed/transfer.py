"""Overlap of transfers and compute: verification time over the larger of its two parts.

The physics: a verification transfers the offloaded KV of every layer (bytes / rate) and computes
attention over it (the time of the same forward when host memory is device memory). With perfect
overlap, the wall time is the larger of the two. The transfer of the first chunk and the compute on
the last one cannot be overlapped.

Layers are streamed as they are, compressed, or split. The latter two transfer fewer bytes, and
their reconstruction is part of the compute.
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


def useful_kinds(dtype: str) -> list[str]:
    """Return the kinds of layers that transfer different numbers of bytes of this dtype."""
    split = split_format(dtype)
    if split is None:
        return ["streamed"]
    return [kind for kind in LAYERS if kind != "compressed" or split.planes < 4]


def settings_of(layers: str, count: int, base: Settings) -> Settings:
    """Return settings with all `count` layers of this kind."""
    if layers == "split":
        return replace(base, mode="split", split_kv_layers=count)
    return replace(base, compress_offload=layers == "compressed")


@benchmark(
    "Verification of {rows} tokens after {context:,}, all layers offloaded, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    rope: opt.Rope = None,
    text: opt.Text = None,
    layers: Annotated[
        str | None,
        typer.Option(help=f"Of {','.join(LAYERS)}; default: those that save bytes of the dtype."),
    ] = None,
    context: opt.Context = opt.NATIVE,
    rates: opt.Rates = "0.25,0.5,1,2,4",
    rows: Annotated[int, typer.Option(help="Tokens per verification.")] = 17,
    dtype: opt.Dtype = "bfloat16",
    threads: opt.Threads = 0,
    repeats: opt.Repeats = 5,
    output: opt.Output = Path("results/transfer.json"),
) -> Measurement:
    """Time verifications over emulated links and report wall / max(link, compute)."""
    kinds = useful_kinds(dtype) if layers is None else layers.split(",")
    if unknown := set(kinds) - set(LAYERS):
        raise typer.BadParameter(f"{', '.join(unknown)}: use {LAYERS}", param_hint="--layers")
    base = Settings(mode="plain", rope=rope, dtype=dtype, link="view", gpu_kv_layers=0)
    engine = Engine.from_pretrained(target, settings=base)
    model, table = engine.runtime.target, list[Row]()
    prompt = prompt_tokens(engine.tokenizer, context, text)
    codec_rates = split_rates(model.config, model.group.device, engine.runtime.dtype)
    for kind in kinds:
        settings = settings_of(kind, model.config.full_layers, base)
        on_device = SequenceState(engine.runtime.with_settings(settings), prompt, rows + 1)
        on_device.prefill()
        for rate in opt.decimals(rates):
            runtime = engine.runtime.with_settings(replace(settings, link=f"emulated:{rate}"))
            offloaded = SequenceState(runtime, prompt, rows + 1)
            offloaded.prefill()
            table.append(time_verification(kind, rate, model, on_device, offloaded, rows, repeats))
            yield {"rows": table, "slices": codec_rates}
            offloaded.close()
            runtime.link.close()
        on_device.close()


def time_verification(
    layers: str,
    rate: float,
    model: Transformer,
    on_device: SequenceState,
    offloaded: SequenceState,
    rows: int,
    repeats: int,
) -> Row:
    """Return the row of one rate: verification with the KV in device memory and over the link."""
    tokens, before = on_device.prompt[:rows], offloaded.target.traffic.link_in
    compute_ms = median_ms(model, on_device.target, tokens, repeats)
    wall_ms = median_ms(model, offloaded.target, tokens, repeats)
    link_bytes = (offloaded.target.traffic.link_in - before) // (repeats + 1)
    link_ms = link_bytes / rate / 1e6
    return {
        "layers": layers,  # one of LAYERS
        "link_gbps": rate,
        "mb_per_verification": link_bytes / 1e6,
        "link_ms": link_ms,
        "compute_ms": compute_ms,
        "wall_ms": wall_ms,
        "wall_over_bound": wall_ms / max(link_ms, compute_ms),
    }
