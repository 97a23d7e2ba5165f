"""What `tierforce probe` found, as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

_UNITS = {
    "link_in": "GB/s",
    "link_in_alone": "GB/s",
    "link_out": "GB/s",
    "memory_rate": "GB/s",
    "all_reduce_rate": "GB/s",
}
_UNITS |= {"kv_rate": "GB/s", "score_rate": "GB/s", "summary_rate": "GB/s", "weigh_rate": "GB/s"}
_UNITS |= dict.fromkeys(("matmul_alone", "matmul", "attention", "prefill_attention"), "TFLOP/s")
_UNITS |= dict.fromkeys(("pass_s", "sample_s", "draw_s"), "microseconds")
_UNITS |= {
    "device_memory": "GB",
    "host_memory": "GB",
    "all_reduce_s": "microseconds",
    "layer_s": "microseconds",
}
_SCALES = {"GB/s": 1e-9, "TFLOP/s": 1e-12, "GB": 1e-9, "microseconds": 1e6}


def table(found: dict[str, Any], device: str) -> Table:
    """The numbers, for people."""
    ranks = found["gpus"]["value"]
    shown = Table(title=f"This machine: {ranks} ranks on {device}", title_justify="left")
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_column("")
    for name, unit in _UNITS.items():
        if name in found and (ranks > 1 or not name.startswith("all_reduce")):
            shown.add_row(name, f"{found[name]['value'] * _SCALES[unit]:,.2f}", unit)
    return shown
