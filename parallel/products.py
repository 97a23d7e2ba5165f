"""Products with weights, and the way round processors that multiply bfloat16 one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.processor import multiplies_bfloat16

_WIDENED_VALUES = 1 << 19  # of a weight at once: what is widened stays in the processor's cache
_MIN_ROWS = 4  # with fewer, reading the weights is all there is to do


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, (T, Dout), of x (T, Din) and weight (Dout, Din).

    On a processor without instructions for bfloat16 the weight is widened part by part, which loses
    nothing: products are summed in float32 either way, and rounded once.
    """
    widens = x.is_cpu and x.dtype == torch.bfloat16 and len(x) >= _MIN_ROWS
    if not widens or multiplies_bfloat16():
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    wide = x.float()
    step = max(1, _WIDENED_VALUES // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        own = None if bias is None else bias[part].float()
        out[:, part] = F.linear(wide, weight[part].float(), own)
    return out
