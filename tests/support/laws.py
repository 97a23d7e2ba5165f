"""Whether samples follow a law: Pearson's chi-square test, rare outcomes pooled."""

from __future__ import annotations

import torch
from torch import Tensor

# seeds are fixed, so a correct law passes for good; another build of torch gets it wrong once in
# 10,000
LIKELY = 1e-4
BROKEN = 1e-6


def p_value(counts: Tensor, law: Tensor) -> float:
    """How likely counts are this far from `law` or farther, had they been drawn from it; 0 where an
    impossible outcome occurred.

    counts and law have one shape; the law need not be normalised. Too few counts to tell anything
    give 1.
    """
    counts, law = counts.double().flatten(), law.double().flatten()
    if counts[law == 0].any():
        return 0.0
    expected, order = (law / law.sum() * counts.sum()).sort(descending=True)
    counts = counts[order]
    # the approximation by chi-square needs five or so in every cell
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
    """How often each of 0..kinds-1 occurs, (kinds,)."""
    return torch.bincount(torch.tensor(outcomes, dtype=torch.int64), minlength=kinds)
