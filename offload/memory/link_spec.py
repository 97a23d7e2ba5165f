"""Links by name. Only opening one needs torch: a typo is reported before anything loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.errors import TierForceError

if TYPE_CHECKING:
    import torch

    from offload.memory.link import Link

MIN_RATE = 1e-3  # GB/s of an emulated link: with less, a document takes days


def emulated_rate(name: str) -> float | None:
    """Return the rate of an emulated link in GB/s, or None for other links.

    Raises TierForceError for an unknown name.
    """
    kind, _, value = name.partition(":")
    if name in ("auto", "view"):
        return None
    if kind == "emulated":
        try:
            rate = float(value)
        except ValueError:
            rate = 0.0
        if rate >= MIN_RATE:
            return rate
    raise TierForceError(
        f"`link` {name} is not known: use auto, or on a CPU view or emulated:RATE (GB/s, at least "
        f"{MIN_RATE:g}, as in emulated:0.5)."
    )


def check_device(name: str, device: str) -> None:
    """Raise TierForceError if a link for a CPU is to be used on another device."""
    if device != "cpu" and name != "auto":
        raise TierForceError(f"`link` {name} is for a CPU: leave it out on {device}.")


def make_link(spec: str, device: torch.device) -> Link:
    """Return the link named `spec`.

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
