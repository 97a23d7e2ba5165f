"""Pearson's chi-square test of whether samples follow a distribution; rare outcomes are pooled."""

from __future__ import annotations

import torch
from torch import Tensor

# seeds are fixed: with another build of torch, a correct distribution fails once in 10,000
LIKELY = 1e-4
BROKEN = 1e-6


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Return the p-value of counts under `probs`; 0 if an impossible outcome occurred.

    Both have one shape; the probabilities need not be normalized. Too few counts for a test give 1.
    """
    counts, probs = counts.double().flatten(), probs.double().flatten()
    if counts[probs == 0].any():
        return 0.0
    expected, order = (probs / probs.sum() * counts.sum()).sort(descending=True)
    counts = counts[order]
    # the chi-square approximation needs about five expected counts per cell
    cells = int((expected >= 5).sum())
    if expected[cells:].sum() < 5:
        cells -= 1
    if cells < 1:
        return 1.0
    counts, expected = (torch.cat((x[:cells], x[cells:].sum()[None])) for x in (counts, expected))
    distance = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor(cells / 2, dtype=torch.float64), distance / 2)
    )


def frequencies(outcomes: list[int], kinds: int) -> Tensor:
    """Return how often each of 0..kinds-1 occurs, (kinds,)."""
    return torch.bincount(torch.tensor(outcomes, dtype=torch.int64), minlength=kinds)
