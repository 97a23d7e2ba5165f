"""The measurements of `tierforce probe` as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

# label and displayed unit of each field of a hardware file
ROWS = {
    "device_memory": ("free memory per GPU", "GB"),
    "host_memory": ("free host memory", "GB"),
    "link_in": ("host to GPU, all links busy", "GB/s"),
    "link_in_alone": ("host to GPU, single link", "GB/s"),
    "link_out": ("GPU to host, all links busy", "GB/s"),
    "memory_rate": ("reading weights", "GB/s"),
    "kv_rate": ("reading KV in attention", "GB/s"),
    "score_rate": ("KV scored by selection", "GB/s"),
    "reconstruct_rate": ("reconstructing split KV", "GB/s"),
    "high_bits_rate": ("attention to high bytes of split KV", "GB/s"),
    "int8_rate": ("attention to an 8-bit retrieval cache", "GB/s"),
    "packed_rate": ("weights unpacked from 4 bits", "billion/s"),
    "matmul_alone": ("one large matmul", "TFLOP/s"),
    "matmul": ("matmuls of a prefill", "TFLOP/s"),
    "prefill_attention": ("attention of a prefill", "TFLOP/s"),
    "attention": ("attention of a short forward", "TFLOP/s"),
    "matmul_3": ("extra query tokens, forward of 3", "TFLOP/s"),
    "matmul_5": ("extra query tokens, forward of 5", "TFLOP/s"),
    "matmul_33": ("extra query tokens, forward of 33", "TFLOP/s"),
    "multiprocessors": ("multiprocessors of a GPU", ""),
    "layer_s": ("overhead per layer of a short forward", "microseconds"),
    "eager_layer_s": ("a layer of a short forward without CUDA graphs", "microseconds"),
    "chunk_s": ("overhead per key block and head, with --deterministic", "microseconds"),
    "forward_s": ("overhead of a short forward", "microseconds"),
    "sample_s": ("probabilities of one token", "microseconds"),
    "draw_s": ("sampling a token", "microseconds"),
    "all_reduce_s": ("small all-reduce", "microseconds"),
    "all_reduce_rate": ("large all-reduce, NCCL or gloo", "GB/s"),
    "shared_all_reduce_rate": ("large all-reduce, shared memory", "GB/s"),
}
_SCALES = {"GB/s": 1e-9, "billion/s": 1e-9, "TFLOP/s": 1e-12, "GB": 1e-9, "microseconds": 1e6}


def table(measured: dict[str, Any], device: str) -> Table:
    """Return the measured numbers of a hardware file with labels and units."""
    ranks = measured["gpus"]["value"]
    label = "1 rank" if ranks == 1 else f"{ranks} ranks"
    shown = Table(title=f"This machine, {label} on {device}:", title_justify="left", box=None)
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_column("")
    for name, (words, unit) in ROWS.items():
        single = ranks == 1 and name.startswith("all_reduce")
        if name in measured and not single:
            value = measured[name]["value"] * _SCALES.get(unit, 1.0)
            shown.add_row(words, f"{value:,.2f}" if unit else f"{value:,.0f}", unit)
    return shown
