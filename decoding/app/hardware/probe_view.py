"""What `tierforce probe` measured, as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

# by the field of a hardware file: what it is in words, and the unit it is shown in
ROWS = {
    "device_memory": ("free memory, each GPU", "GB"),
    "host_memory": ("free host memory", "GB"),
    "link_in": ("host to GPU, all at once", "GB/s"),
    "link_in_alone": ("host to GPU, one alone", "GB/s"),
    "link_out": ("GPU to host, all at once", "GB/s"),
    "memory_rate": ("reading weights", "GB/s"),
    "kv_rate": ("reading KV in attention", "GB/s"),
    "score_rate": ("KV looked through to select from it", "GB/s"),
    "reconstruct_rate": ("KV joined of slices", "GB/s"),
    "high_bits_rate": ("KV attended to by its codes", "GB/s"),
    "int8_rate": ("selected KV attended to, kept in 8 bits", "GB/s"),
    "matmul_alone": ("one large matrix product", "TFLOP/s"),
    "matmul": ("products of a prefill", "TFLOP/s"),
    "prefill_attention": ("attention of a prefill", "TFLOP/s"),
    "attention": ("attention of a short pass", "TFLOP/s"),
    "matmul_3": ("products of a pass's further rows, of 3", "TFLOP/s"),
    "matmul_5": ("of 5", "TFLOP/s"),
    "matmul_33": ("of 33", "TFLOP/s"),
    "layer_s": ("a layer of a short pass, beside reading it", "microseconds"),
    "chunk_s": ("a block of keys of a head, with --deterministic", "microseconds"),
    "forward_s": ("a short pass, beside its layers", "microseconds"),
    "sample_s": ("the law of one token", "microseconds"),
    "draw_s": ("drawing a token", "microseconds"),
    "all_reduce_s": ("a small sum over GPUs", "microseconds"),
    "all_reduce_rate": ("a large sum over GPUs", "GB/s"),
}
_SCALES = {"GB/s": 1e-9, "TFLOP/s": 1e-12, "GB": 1e-9, "microseconds": 1e6}


def table(measured: dict[str, Any], device: str) -> Table:
    """Return the numbers of a hardware file that were measured, in words and with units."""
    ranks = measured["gpus"]["value"]
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    shown = Table(title=f"This machine, {who} on {device}:", title_justify="left", box=None)
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_column("")
    for name, (words, unit) in ROWS.items():
        alone = ranks == 1 and name.startswith("all_reduce")
        if name in measured and not alone:
            shown.add_row(words, f"{measured[name]['value'] * _SCALES[unit]:,.2f}", unit)
    return shown
