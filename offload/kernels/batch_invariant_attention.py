"""Attention whose numbers for a row depend on that row and on what stands before it alone.

Rows and keys are computed in blocks that begin at fixed positions of the text, each in one shape.
So it makes no difference how many rows a pass has, where a prefix ends, how many heads come
together, or what is behind the last row: the same kernel does the same sums. What blocks lack is
zeros that a mask leaves out.

On a GPU fused kernels do the same in two launches, where a trial shows that they are right. Which
of both it is, is chosen once for all passes of a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.attention import masked_attention
from offload.attention.folding import Partial, merge
from offload.attention.head_major import token_slice
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.kernels.selection import batch_invariant_kernels
from offload.layout import ceil_div
from offload.traffic import ByteCounters


def batch_invariant_attention(q: Tensor, parts: Sequence[Tensor], traffic: ByteCounters) -> Tensor:
    """Return the causal attention (T, Hq, D) of the last T of N tokens, q (T, Hq, D).

    parts: keys and values (2, Hkv, n, D) of all N tokens, one part behind the other. The bytes that
    are read count in `traffic`.
    """
    end = sum(part.shape[2] for part in parts)
    start = end - len(q)
    _, heads, _, dim = parts[0].shape
    kernels, _ = batch_invariant_kernels(q.device.type, q.dtype, dim, q.shape[1] // heads)
    if kernels is not None:
        # a block of rows reads the keys up to its own end
        token_bytes = sum(part.nbytes for part in parts) // end
        for block in range(start // ROW_BLOCK, ceil_div(end, ROW_BLOCK)):
            traffic.attended += token_bytes * min(end, (block + 1) * ROW_BLOCK)
        return kernels.attend(q, parts)
    lead = start % ROW_BLOCK
    padded = F.pad(q, (0, 0, 0, 0, lead, -end % ROW_BLOCK))
    gathered: dict[int, Tensor] = {}  # by block of keys
    outs = []
    at = start - lead
    for rows in padded.split(ROW_BLOCK):
        partials = []
        for key in range(0, at + 1, KEY_BLOCK):
            if key not in gathered:
                gathered[key] = _gathered(parts, key)
            traffic.attended += gathered[key].nbytes
            partials.append(_attend(rows, gathered[key], at - key))
        outs.append(merge(partials)[0])
        at += ROW_BLOCK
    return torch.cat(outs)[lead : lead + len(q)]


def _attend(rows: Tensor, kv: Tensor, at: int) -> Partial:
    """Attend with rows (WIDTH, Hq, D) to a block kv (2, Hkv, KEYS, D), head by head.

    The first row is `at` behind the block's first key.
    """
    mask = _mask(min(at, KEY_BLOCK), rows.device)
    heads = kv.shape[1]
    parts = []
    for head, own in enumerate(rows.chunk(heads, dim=1)):
        keys, values = kv[:, head, :, None]  # (KEYS, 1, D)
        parts.append(masked_attention(own, keys, values, mask))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _mask(at: int, device: torch.device) -> Tensor:
    """Return what rows see (WIDTH, KEYS) that begin `at` behind a block's first key."""
    return _staircase(device)[:, KEY_BLOCK - at : 2 * KEY_BLOCK - at]


@cache
def _staircase(device: torch.device) -> Tensor:
    """Return the mask (WIDTH, 2 * KEYS) of rows of which the first stands at KEYS."""
    with torch.inference_mode(False):
        mask = torch.full((ROW_BLOCK, 2 * KEY_BLOCK), -torch.inf, device=device)
        return mask.triu_(KEY_BLOCK + 1)


def _gathered(parts: Sequence[Tensor], start: int) -> Tensor:
    """Return the keys and values (2, Hkv, KEYS, D) from `start` on, and zeros behind the last.

    They are a view where they stand in one part.
    """
    end = start + KEY_BLOCK
    block: Tensor | None = None
    before = 0  # tokens of the parts so far
    for part in parts:
        behind = before + part.shape[2]
        first, last = max(start, before), min(end, behind)
        if first < last:
            piece = token_slice(part, first - before, last - before)
            if piece.shape[2] == KEY_BLOCK:
                return piece
            if block is None:
                block = part.new_zeros(2, part.shape[1], KEY_BLOCK, part.shape[3])
            token_slice(block, first - start, last - start).copy_(piece)
        before = behind
    assert block is not None
    return block
