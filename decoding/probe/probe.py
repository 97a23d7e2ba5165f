"""Benchmark of a machine, written as the hardware file that `tierforce plan` reads."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import torch

from decoding.probe import rates
from decoding.probe.advice import all_reduce_warnings, warnings
from decoding.probe.kernels import default_dimensions, kernel_rates
from decoding.probe.survey import Machine
from offload.dtypes import NO_FLOAT16, dtype_name
from offload.errors import TierForceError, one_line
from offload.memory.bandwidth import BandwidthProbe
from offload.memory.link_spec import make_link
from offload.memory.numa import gpu_address
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup

_SMALL_ALL_REDUCE_BYTES = 8192  # one token's hidden state in a 7B model
_ONE_RANK = {"all_reduce_s": 0.0, "all_reduce_rate": 1e15}  # no all-reduce


def profile(
    group: TensorParallelGroup, model: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Measure this machine; return the content of a hardware file with a survey and warnings.

    All ranks call it. Rates are those of the slowest rank while all are busy; `link_in_alone` holds
    each rank's while the others are idle. Kernel rates are for layers with the model's dimensions.
    Without a GPU the device is the host. An error on one rank is raised on all (TierForceError).
    """
    cuda = group.device.type == "cuda"
    with group.sync_errors():
        if not cuda and dtype == torch.float16:
            raise TierForceError(NO_FLOAT16)
        config = (
            ModelConfig.from_name(model) if model is not None else default_dimensions(group.device)
        )
    numbers: dict[str, float] = {
        "gpus": group.size,
        "host_memory": group.broadcast(Machine.detect().host_available),
    }
    if group.multiprocessors is not None:
        numbers["multiprocessors"] = group.multiprocessors
    own, alone, machine = _measure_rank(group, config, dtype)
    numbers |= _slowest(group.gather(own)) | _all_reduces(group)
    source = _source(group, model, dtype)
    content: dict[str, Any] = {
        name: {"value": value, "source": source} for name, value in numbers.items()
    }
    content["link_in_alone"] = {"value": min(alone), "of each": alone, "source": source}
    content["runs_ahead"] = {
        "value": cuda,
        "source": "kernel launches on a GPU are asynchronous, on a CPU synchronous",
    }
    # Each rank reports its own GPU, because `nearby` depends on the CPUs that it may use.
    used = group.gather(machine.gpu_at(gpu_address(group.device))) if cuda else []
    content["machine"] = machine.as_dict()
    link_in = numbers["link_in"]
    all_reduce_rate = max(numbers["all_reduce_rate"], numbers.get("shared_all_reduce_rate", 0.0))
    content["warnings"] = warnings(machine, used, link_in, alone)
    content["warnings"] += all_reduce_warnings(used, link_in, all_reduce_rate)
    return content


def _measure_rank(
    group: TensorParallelGroup, config: ModelConfig, dtype: torch.dtype
) -> tuple[dict[str, float], list[float], Machine]:
    """Measure this rank's own numbers and the rate of each rank's link alone; survey the machine.

    The survey runs while the links are busy.
    """
    with group.sync_errors():
        link = make_link("auto", group.device)
        copies = BandwidthProbe(link)
    own_rate = 0.0
    for rank in range(group.size):
        with group.sync_errors():
            own_rate = copies.rate(out=False) if rank == group.rank else own_rate
    alone = group.gather(own_rate)
    own: dict[str, float] = {}
    for name, out in (("link_in", False), ("link_out", True)):
        with group.sync_errors():  # also a barrier: all ranks start together
            pass
        with group.sync_errors():
            own[name] = copies.rate(out)
    with group.sync_errors():
        machine = copies.call_while_copying(Machine.detect)
        copies.close()
        own["device_memory"] = link.device_available()
        if group.device.type != "cuda":
            own["device_memory"] //= group.size  # host memory, shared by all ranks
        own["matmul_alone"] = rates.matmul_rate(group.device, dtype)
        try:
            with torch.inference_mode():
                own |= kernel_rates(config, group.device, dtype)
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when out of memory
            raise TierForceError(
                f"layers of these dimensions cannot be measured here ({one_line(error)})."
            ) from error
        link.close()
    return own, alone, machine


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the numbers that all ranks have, each from the slowest rank."""
    common = [name for name in ranks[0] if all(name in numbers for numbers in ranks)]
    return {
        name: (max if name.endswith("_s") else min)(numbers[name] for numbers in ranks)
        for name in common
    }


def _all_reduces(group: TensorParallelGroup) -> dict[str, float]:
    """Measure all-reduces, large ones both ways; all ranks call it."""
    if group.size == 1:
        return _ONE_RANK
    seconds = max(group.gather(rates.all_reduce_seconds(group, _SMALL_ALL_REDUCE_BYTES)))
    numbers = {"all_reduce_s": seconds}
    shared_sum = group.shared_sum
    if shared_sum is None:
        return numbers | {"all_reduce_rate": min(group.gather(rates.all_reduce_rate(group)))}
    was_faster = shared_sum.is_faster
    for name, is_shared in (("all_reduce_rate", False), ("shared_all_reduce_rate", True)):
        shared_sum.is_faster = is_shared
        numbers[name] = min(group.gather(rates.all_reduce_rate(group)))
    shared_sum.is_faster = was_faster
    return numbers


def _source(group: TensorParallelGroup, model: str | None, dtype: torch.dtype) -> str:
    """Return the source note of each number: date, device and model."""
    device = "a CPU"
    if group.device.type == "cuda":
        device = torch.cuda.get_device_name(group.device)
    source = (
        f"measured {date.today().isoformat()} on {device}, with layers of "
        f"{Path(model).name if model else 'default dimensions'} in {dtype_name(dtype)}"
    )
    return source + ", one rank" if group.size == 1 else source
