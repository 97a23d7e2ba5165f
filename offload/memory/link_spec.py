"""What links are called. It needs no torch, so that a slip is told before anything is loaded."""

from offload.errors import TierForceError

LEAST_RATE = 1e-3  # GB/s of an emulated link: at less a text takes days


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
        if rate >= LEAST_RATE:
            return rate
    raise TierForceError(
        f"`link` {name} is not known: use auto, or on a CPU view or emulated:RATE (GB/s, at least "
        f"{LEAST_RATE:g}, as in emulated:0.5)."
    )


def refuse_on_gpu(name: str, device: str) -> None:
    """Raise TierForceError for a link that is for a CPU, where the device is another."""
    if device != "cpu" and name != "auto":
        raise TierForceError(f"`link` {name} is for a CPU: leave it out on {device}.")
