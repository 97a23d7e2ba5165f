"""The link of a device, by its name."""

from __future__ import annotations

import torch

from offload.memory.cpu_link import EmulatedLink, ViewLink
from offload.memory.cuda_link import CudaLink
from offload.memory.link import Link
from offload.memory.link_spec import emulated_rate, refuse_on_gpu


def make_link(spec: str, device: torch.device) -> Link:
    """Return the link that `spec` names.

    It is `auto` (CUDA streams on a GPU, a view on a CPU), `view`, or `emulated:RATE`, in GB/s.
    Raises TierForceError for any other, and as `refuse_on_gpu` does.
    """
    rate = emulated_rate(spec)
    if device.type == "cpu":
        return ViewLink(device) if rate is None else EmulatedLink(device, rate * 1e9)
    refuse_on_gpu(spec, device.type)
    return CudaLink(device)
