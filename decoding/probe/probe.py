"""A machine measured: the hardware file that `tierforce plan` reads."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import torch

from decoding.probe import rates
from decoding.probe.advice import warning_of_sums, warnings
from decoding.probe.kernels import pass_rates, usual_dimensions
from decoding.probe.survey import Machine
from offload.dtypes import NO_FLOAT16, dtype_name
from offload.errors import TierForceError, one_line
from offload.memory.bandwidth import BandwidthProbe
from offload.memory.link_spec import make_link
from offload.memory.numa import gpu_address
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup

_SMALL_SUM_BYTES = 8192  # one token's hidden state in a 7B model
_ONE_RANK = {"all_reduce_s": 0.0, "all_reduce_rate": 1e15}  # sums over one rank cost nothing


def profile(
    group: TensorParallelGroup, model: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Measure this machine: the content of a hardware file, and what the system tells.

    All ranks call it. Rates are the slowest rank's while all are at work; `link_in_alone` are those
    of each while the others wait. Those of kernels are for layers of the named model's dimensions.
    Without a GPU the device is the host. What goes wrong on one rank is raised on all
    (TierForceError).
    """
    cuda = group.device.type == "cuda"
    with group.sync_errors():
        if not cuda and dtype == torch.float16:
            raise TierForceError(NO_FLOAT16)
        config = (
            ModelConfig.from_name(model) if model is not None else usual_dimensions(group.device)
        )
    numbers: dict[str, float] = {
        "gpus": group.size,
        "host_memory": group.broadcast(Machine.detect().host_available),
    }
    own, alone, busy = _of_this_rank(group, config, dtype)
    numbers |= _slowest(group.gather(own)) | _sums(group)
    source = _source(group, model, dtype)
    content: dict[str, Any] = {
        name: {"value": value, "source": source} for name, value in numbers.items()
    }
    content["link_in_alone"] = {"value": min(alone), "of each": alone, "source": source}
    content["runs_ahead"] = {
        "value": cuda,
        "source": "a GPU's host runs ahead of it, a CPU does all by itself",
    }
    # each rank says where it may run itself
    used = group.gather(busy.at(gpu_address(group.device))) if cuda else []
    content["machine"] = busy.as_dict()
    link_in, sum_rate = numbers["link_in"], numbers["all_reduce_rate"]
    content["warnings"] = warnings(busy, used, link_in, alone)
    content["warnings"] += warning_of_sums(used, link_in, sum_rate)
    return content


def _of_this_rank(
    group: TensorParallelGroup, config: ModelConfig, dtype: torch.dtype
) -> tuple[dict[str, float], list[float], Machine]:
    """Measure this rank's own numbers, the rate of each rank's link alone, and the machine.

    The machine is looked at while its links are busy.
    """
    with group.sync_errors():
        link = make_link("auto", group.device)
        copies = BandwidthProbe(link)
    mine = 0.0
    for rank in range(group.size):
        with group.sync_errors():
            mine = copies.rate(out=False) if rank == group.rank else mine
    alone = group.gather(mine)
    own: dict[str, float] = {}
    for name, out in (("link_in", False), ("link_out", True)):
        with group.sync_errors():  # which also lets all ranks begin at once
            pass
        with group.sync_errors():
            own[name] = copies.rate(out)
    with group.sync_errors():
        busy = copies.call_while_copying(Machine.detect)
        copies.close()
        own["device_memory"] = link.device_available()
        if group.device.type != "cuda":
            own["device_memory"] //= group.size  # the host's memory, which all ranks share
        own["matmul_alone"] = rates.matmul_rate(group.device, dtype)
        try:
            with torch.inference_mode():
                own |= pass_rates(config, group.device, dtype)
        except (RuntimeError, MemoryError) as error:  # torch raises the first for want of memory
            raise TierForceError(
                f"layers of these dimensions cannot be measured here ({one_line(error)})."
            ) from error
        link.close()
    return own, alone, busy


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the numbers that all ranks have, each of the rank that is slowest in it."""
    common = [name for name in ranks[0] if all(name in numbers for numbers in ranks)]
    return {
        name: (max if name.endswith("_s") else min)(numbers[name] for numbers in ranks)
        for name in common
    }


def _sums(group: TensorParallelGroup) -> dict[str, float]:
    """Measure sums over ranks; all ranks call it."""
    if group.size == 1:
        return _ONE_RANK
    return {
        "all_reduce_s": max(group.gather(rates.all_reduce_seconds(group, _SMALL_SUM_BYTES))),
        "all_reduce_rate": min(group.gather(rates.all_reduce_rate(group))),
    }


def _source(group: TensorParallelGroup, model: str | None, dtype: torch.dtype) -> str:
    """Return what stands beside each number: when it was measured, and on what."""
    device = "a CPU"
    if group.device.type == "cuda":
        device = torch.cuda.get_device_name(group.device)
    source = (
        f"measured {date.today().isoformat()} on {device}, with layers of "
        f"{Path(model).name if model else 'usual dimensions'} in {dtype_name(dtype)}"
    )
    return source + ", one rank" if group.size == 1 else source
