"""`tierforce probe`: measure on all ranks, print on rank 0, and write a hardware file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from decoding.app.hardware.probe_view import table
from decoding.app.terminal.files import check_writable, write_json
from decoding.app.terminal.streams import say, silence_transformers, warn
from decoding.probe.probe import profile
from offload.dtypes import dtype_of
from parallel.ranks.process_group import TensorParallelGroup


def run(model: str | None, dtype: str, device: str, output: Path) -> None:
    """Measure this machine with the dimensions of `model`; all ranks call it."""
    silence_transformers()
    kind = dtype_of(dtype)
    group = TensorParallelGroup.from_environment(device, warn)
    with group.sync_errors():
        if group.rank == 0:
            check_writable("--output", output)  # early, since measuring takes a minute or two
    measured = profile(group, model, kind)
    with group.sync_errors():
        if group.rank == 0:
            write_json("--output", output, measured)
    if group.rank:
        return
    Console().print(table(measured, str(group.device)))
    say(f"driver: {measured['machine']['driver']}")
    for warning in measured["warnings"]:
        say(f"warning: {warning}")
    say(f"written to {output}")
