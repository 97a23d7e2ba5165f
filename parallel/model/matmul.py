"""Products with weights, and the way round processors that multiply bfloat16 one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.attention.shape_buckets import compiles_per_shape, has_native_bf16, pad_rows
from offload.kernels.batch_invariant_shape import ROW_BLOCK
from parallel.batch_invariant import map_blocks

_WIDENED_VALUES = 1 << 19  # of a weight at once: what is widened stays in the processor's cache
_WIDENED_ROWS = 7  # with fewer, reading the weights is most of what there is to do
# x W^T of few rows is shared out badly over a CPU's threads: with a large weight it takes up to
# twice as long as W x^T, which is the same. One thread alone is faster with the first.
_FEW_ROWS, _LARGE_WEIGHT = 128, 1 << 19
_EVEN_ROWS = 512  # where products are compiled for their number of rows: a multiple of it at once


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, (T, Dout), of x (T, Din) and weight (Dout, Din).

    On a processor without instructions for bfloat16 the weight is widened part by part, which loses
    nothing: products are summed in float32 either way, and rounded once.
    """
    return map_blocks(lambda rows: _linear(rows, weight, bias), x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    may_widen = x.is_cpu and x.dtype == torch.bfloat16
    if may_widen and len(x) >= _WIDENED_ROWS and not has_native_bf16():
        return _widened(x, weight, bias)
    if compiles_per_shape(x, ROW_BLOCK):  # blocks of as many rows are one shape
        return _linear_bucketed(x, weight, bias)
    if x.is_cpu and x.dtype == torch.float32 and _is_poorly_parallel(x, weight):
        out = torch.mm(weight, x.t()).t().contiguous()
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)


def _linear_bucketed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, the rows behind a multiple of _EVEN_ROWS by themselves, and filled up."""
    even = len(x) // _EVEN_ROWS * _EVEN_ROWS
    last = pad_rows(x[even:])
    out = x.new_empty(even + len(last), len(weight))
    for rows, place in ((x[:even], out[:even]), (last, out[even:])):
        if bias is None:
            torch.mm(rows, weight.t(), out=place)
        else:
            torch.addmm(bias, rows, weight.t(), out=place)
    return out[: len(x)]


def linear_fp32_out(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, (T, Dout) float32, as it was summed: not rounded to the inputs' dtype.

    It is for logits. Rounded to bfloat16 they come in steps of an eighth, and passes of other
    widths fall on other steps: that alone rejects 2.5% of what SmolLM2 proposes to itself
    (docs/log.md). MiniMax-M1 needed the same for training by what inference said (arXiv
    2506.13585).
    """
    if x.dtype == torch.float32:
        return linear(x, weight)
    return map_blocks(lambda rows: _linear_fp32_out(rows, weight), x)


def _linear_fp32_out(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cpu:
        return _widened(x, weight, None, torch.float32)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _widened(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return x W^T + b in this dtype, by default that of x, with inputs of 16 bits widened."""
    out = x.new_empty(len(x), len(weight), dtype=dtype)
    wide, turned = x.float(), _is_poorly_parallel(x, weight)
    step = max(1, _WIDENED_VALUES // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        wider = weight[part].float()
        product = torch.mm(wider, wide.t()).t() if turned else F.linear(wide, wider)
        out[:, part] = product if bias is None else product + bias[part].float()
    return out


def _is_poorly_parallel(x: Tensor, weight: Tensor) -> bool:
    many = torch.get_num_threads() > 1
    return many and 1 < len(x) <= _FEW_ROWS and weight.numel() >= _LARGE_WEIGHT
