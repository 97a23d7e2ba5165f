"""Matrix products with weights, and workarounds for CPUs without bfloat16 instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.attention.shape_buckets import compiles_per_shape, has_native_bf16, pad_rows
from offload.kernels.batch_invariant_shape import ROW_BLOCK
from parallel.batch_invariant import map_blocks

_WIDENED_VALUES = 1 << 20  # weight values widened at once, few enough for the CPU's cache
# From so many rows on widening is faster: torch's product takes time in proportion to the rows.
_WIDENED_ROWS = 4
# x W^T with few rows is poorly parallelized over a CPU's threads: with a large weight it takes up
# to twice as long as the equal W x^T. A single thread is faster with the former.
_FEW_ROWS, _LARGE_WEIGHT = 128, 1 << 19
_EVEN_ROWS = 512  # row unit of a product on devices that compile kernels per number of rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, (T, Dout), of x (T, Din) and weight (Dout, Din).

    On a CPU without bfloat16 instructions the weight is widened part by part, which is exact:
    products are summed in float32 either way, and rounded once.
    """
    return map_blocks(lambda rows: _linear(rows, weight, bias), x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    may_widen = x.is_cpu and x.dtype == torch.bfloat16
    if may_widen and len(x) >= _WIDENED_ROWS and not has_native_bf16():
        return _widened(x, weight, bias)
    if compiles_per_shape(x, ROW_BLOCK):  # blocks of ROW_BLOCK rows have one shape already
        return _linear_bucketed(x, weight, bias)
    if x.is_cpu and x.dtype == torch.float32 and _is_poorly_parallel(x, weight):
        out = torch.mm(weight, x.t()).t().contiguous()
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)


def _linear_bucketed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b; rows after a multiple of _EVEN_ROWS are computed separately, padded."""
    even = len(x) // _EVEN_ROWS * _EVEN_ROWS
    last = pad_rows(x[even:])
    out = x.new_empty(even + len(last), len(weight))
    for rows, target in ((x[:even], out[:even]), (last, out[even:])):
        if bias is None:
            torch.mm(rows, weight.t(), out=target)
        else:
            torch.addmm(bias, rows, weight.t(), out=target)
    return out[: len(x)]


class Rows(Protocol):
    """A weight (Dout, Din), of which a slice gives rows."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


def linear_fp32_out(x: Tensor, weight: Tensor | Rows) -> Tensor:
    """Return x W^T, (T, Dout), in the float32 of its accumulation, not rounded to x's dtype.

    Used for logits. Rounded to bfloat16 they come in steps of an eighth, and forwards with other
    numbers of query tokens round differently: that alone rejects 2.5% of the tokens that SmolLM2
    drafts for itself (docs/log.md). MiniMax-M1 computes its LM head in float32 for the same reason,
    so that training and inference probabilities agree (arXiv 2506.13585).
    """
    if x.dtype == torch.float32:
        return linear(x, weight[:])
    return map_blocks(lambda rows: _linear_fp32_out(rows, weight), x)


def _linear_fp32_out(x: Tensor, weight: Tensor | Rows) -> Tensor:
    if x.is_cpu:
        return _widened(x, weight, None, torch.float32)
    return torch.mm(x, weight[:].t(), out_dtype=torch.float32)


def _widened(
    x: Tensor, weight: Tensor | Rows, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return x W^T + b in `dtype`, by default x's, with 16-bit inputs widened to float32."""
    rows, columns = weight.shape
    out = x.new_empty(len(x), rows, dtype=dtype)
    wide = x.float()
    transposed = _is_poorly_parallel(x, weight)
    step = min(rows, max(1, _WIDENED_VALUES // columns))
    # one buffer for all parts: the C library may return one of each part to the system, every time
    buffer = wide.new_empty(step, columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = weight[part]
        wide_part = buffer[: len(values)].copy_(values)
        product = torch.mm(wide_part, wide.t()).t() if transposed else F.linear(wide, wide_part)
        out[:, part] = product if bias is None else product + bias[part].float()
    return out


def _is_poorly_parallel(x: Tensor, weight: Tensor | Rows) -> bool:
    is_threaded = torch.get_num_threads() > 1
    is_large = len(weight) * weight.shape[1] >= _LARGE_WEIGHT
    return is_threaded and 1 < len(x) <= _FEW_ROWS and is_large
