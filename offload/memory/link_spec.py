"""Links by name. Only opening one needs torch, so that a typo is reported before anything loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.errors import TierForceError

if TYPE_CHECKING:
    import torch

    from offload.memory.link import Link

MIN_RATE = 1e-3  # GB/s of an emulated link: at less a text takes days


def emulated_rate(name: str) -> float | None:
    """Return the GB/s of an emulated link; None for a link of another kind.

    Raises TierForceError for what is the name of no link.
    """
    kind, _, given = name.partition(":")
    if name in ("auto", "view"):
        return None
    if kind == "emulated":
        try:
            rate = float(given)
        except ValueError:
            rate = 0.0
        if rate >= MIN_RATE:
            return rate
    raise TierForceError(
        f"`link` {name} is not known: use auto, or on a CPU view or emulated:RATE (GB/s, at least "
        f"{MIN_RATE:g}, as in emulated:0.5)."
    )


def check_device(name: str, device: str) -> None:
    """Raise TierForceError for a link that is for a CPU, where the device is another."""
    if device != "cpu" and name != "auto":
        raise TierForceError(f"`link` {name} is for a CPU: leave it out on {device}.")


def make_link(spec: str, device: torch.device) -> Link:
    """Return the link that `spec` names.

    It is `auto` (CUDA streams on a GPU, a view on a CPU), `view`, or `emulated:RATE`, in GB/s.
    Raises TierForceError for any other, and as `check_device` does.
    """
    from offload.memory.cpu_link import EmulatedLink, ZeroCopyLink
    from offload.memory.cuda_link import CudaLink

    rate = emulated_rate(spec)
    if device.type == "cpu":
        return ZeroCopyLink(device) if rate is None else EmulatedLink(device, rate * 1e9)
    check_device(spec, device.type)
    return CudaLink(device)
