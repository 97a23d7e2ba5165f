"""`tierforce probe`: what this machine can do, measured, in a file that `tierforce plan` reads."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

from decoding.probe import rates
from decoding.probe.advice import warnings
from decoding.probe.kernels import pass_rates, usual
from decoding.probe.survey import Machine
from offload.bandwidth import Copies
from offload.errors import TierForceError, one_line
from offload.link import make_link
from offload.numa import gpu_address
from parallel.config import ModelConfig
from parallel.group import Group

SMALL = 8192  # bytes of a small all-reduce: one token's hidden state in a 7B model


def profile(
    group: Group, model: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """A hardware file's content, with what the system tells and warnings beside the numbers. All
    ranks call it.

    Rates are the slowest rank's while all are at work, `link_in_alone` those of each while the
    others wait; those of kernels are for layers of the named model's dimensions. Without a GPU the
    device is the host. What goes wrong on one rank is raised on all (TierForceError).
    """
    cuda = group.device.type == "cuda"
    with group.together():
        if not cuda and dtype == torch.float16:
            raise TierForceError(
                "float16 is not supported on a CPU: use --dtype float32, or bfloat16."
            )
        config = ModelConfig.find(model) if model is not None else usual(group.device)
    numbers: dict[str, float] = {
        "gpus": group.size,
        "host_memory": group.broadcast(Machine.here().host_available),
    }
    with group.together():
        link = make_link("auto", group.device)
        copies = Copies(link)
    mine = 0.0
    for rank in range(group.size):
        with group.together():
            mine = copies.rate(out=False) if rank == group.rank else mine
    alone = group.gather(mine)
    own: dict[str, float] = {}
    for name, out in (("link_in", False), ("link_out", True)):
        with group.together():  # which also lets all ranks begin at once
            pass
        with group.together():
            own[name] = copies.rate(out)
    with group.together():
        busy = copies.meanwhile(Machine.here)
        copies.close()
        own["device_memory"] = link.device_available() // (1 if cuda else group.size)
        own["matmul_alone"] = rates.matmul_rate(group.device, dtype)
        try:
            with torch.inference_mode():
                own |= pass_rates(config, group.device, dtype)
        except (RuntimeError, MemoryError) as error:  # torch raises the first for want of memory
            raise TierForceError(
                f"layers of these dimensions cannot be measured here ({one_line(error)})."
            ) from error
        link.close()
    every = group.gather(own)
    numbers |= {
        name: (max if name.endswith("_s") else min)(each[name] for each in every)
        for name in own
        if all(name in each for each in every)
    }
    numbers |= {"all_reduce_s": 0.0, "all_reduce_rate": 1e15}  # of one rank
    if group.size > 1:
        numbers["all_reduce_s"] = max(group.gather(rates.sum_seconds(group, SMALL)))
        numbers["all_reduce_rate"] = min(group.gather(rates.sum_rate(group)))
    of = f"with layers of {model or 'usual dimensions'} in {str(dtype).removeprefix('torch.')}"
    source = (
        f"measured {date.today().isoformat()} on "
        f"{torch.cuda.get_device_name(group.device) if cuda else 'a CPU'}, {of}"
    )
    if group.size == 1:
        source += ", one rank"
    found: dict[str, Any] = {
        name: {"value": value, "source": source} for name, value in numbers.items()
    }
    found["link_in_alone"] = {"value": min(alone), "of each": alone, "source": source}
    # each rank says where it may run itself
    used = group.gather(busy.at(gpu_address(group.device))) if cuda else []
    said = warnings(busy, used, numbers["link_in"], alone)
    found["runs_ahead"] = {
        "value": cuda,
        "source": "a GPU's host runs ahead of it, a CPU does all by itself",
    }
    return {**found, "machine": busy.as_dict(), "warnings": said}


def write(found: dict[str, Any], output: Path) -> None:
    """Raises TierForceError where the file cannot be written."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise TierForceError(f"--output {output} cannot be written ({error.strerror}).") from error
