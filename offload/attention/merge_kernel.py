"""Fused GPU kernel that merges partial attention: plain operations take eight launches for two.

Importing this needs triton, which comes with CUDA builds of torch. Source: the online softmax
(Milakov & Gimelshein 2018), as in `offload.attention.folding`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.attention.folding import Partial


def merge_parts(outs: Tensor, lses: Tensor, other: Partial) -> Partial:
    """Return the attention over all keys, from S parts and another one; any may be empty.

    Args:
        outs: (S, T, Hq, D); the elements of a head are contiguous.
        lses: (S, T, Hq) float32.
        other: (T, Hq, D) in the dtype of the result, and (T, Hq); likewise.
    """
    parts, rows, heads, dim = outs.shape
    other_out, other_lse = other
    out = torch.empty(rows, heads, dim, dtype=other_out.dtype, device=outs.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=outs.device)
    _merge[rows, heads](
        outs,
        lses,
        other_out,
        other_lse,
        out,
        lse,
        parts,
        dim,
        *outs.stride()[:3],
        *lses.stride(),
        *other_out.stride()[:2],
        *other_lse.stride(),
        DIM=triton.next_power_of_2(dim),
    )
    return out, lse


# Specialising on argument values would compile another kernel in the middle of a request.
@triton.jit(
    do_not_specialize=[
        "parts",
        "out_part",
        "out_row",
        "out_head",
        "lse_part",
        "lse_row",
        "lse_head",
        "other_row",
        "other_head",
        "other_lse_row",
        "other_lse_head",
    ]
)
def _merge(
    outs,
    lses,
    other_out,
    other_lse,
    merged,
    lse,
    parts,
    dim,
    out_part,
    out_row,
    out_head,
    lse_part,
    lse_row,
    lse_head,
    other_row,
    other_head,
    other_lse_row,
    other_lse_head,
    DIM: tl.constexpr,
):
    """Merge the parts of one row and query head, by the online softmax."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    column = tl.arange(0, DIM)
    mask = column < dim
    pointers = other_out + row.to(tl.int64) * other_row + head * other_head + column
    weighted = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    peak = tl.load(other_lse + row * other_lse_row + head * other_lse_head)
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    pointers = outs + row.to(tl.int64) * out_row + head * out_head + column
    lse_pointer = lses + row * lse_row + head * lse_head
    for _ in range(parts):
        part_lse = tl.load(lse_pointer)
        found = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        pointers += out_part
        lse_pointer += lse_part
        new_peak = tl.maximum(peak, part_lse)
        offset = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # all are empty so far
        weight = tl.exp(part_lse - offset)
        rescale = tl.exp(peak - offset)
        weighted = weighted * rescale + found * weight
        total = total * rescale + weight
        peak = new_peak
    entry = row * heads + head
    total = tl.where(total > 0, total, 1.0)
    out = weighted / total
    pointers = merged + entry.to(tl.int64) * dim + column
    tl.store(pointers, out.to(merged.dtype.element_ty), mask=mask)
    tl.store(lse + entry, peak + tl.log(total))
