"""Batch-invariant attention: a row's result depends on that row and the tokens up to it alone.

Rows and keys are computed in blocks that begin at fixed positions of the sequence, each in one
shape. A row's result is therefore the same however many rows a forward has, wherever a prefix ends,
however many heads are computed together, and whatever follows the last row: the same kernel does
the same sums. Incomplete blocks are padded with zeros that a mask excludes.

On a GPU, fused kernels do the same in two launches if they pass a self-test. Either they or plain
operations are used by all forwards of a process.
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

    parts: keys and values (2, Hkv, n, D) of all N tokens, in order. The bytes read are added to
    `traffic`.
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
    key_blocks: dict[int, Tensor] = {}  # keyed by first token
    outs = []
    position = start - lead
    for rows in padded.split(ROW_BLOCK):
        partials = []
        for key in range(0, position + 1, KEY_BLOCK):
            if key not in key_blocks:
                key_blocks[key] = _key_block(parts, key)
            traffic.attended += key_blocks[key].nbytes
            partials.append(_attend(rows, key_blocks[key], position - key))
        outs.append(merge(partials)[0])
        position += ROW_BLOCK
    return torch.cat(outs)[lead : lead + len(q)]


def _attend(rows: Tensor, kv: Tensor, offset: int) -> Partial:
    """Attend with rows (ROW_BLOCK, Hq, D) to a block kv (2, Hkv, KEY_BLOCK, D), head by head.

    `offset` is the position of the first row relative to the block's first key.
    """
    mask = _mask(min(offset, KEY_BLOCK), rows.device)
    heads = kv.shape[1]
    parts = []
    for head, queries in enumerate(rows.chunk(heads, dim=1)):
        keys, values = kv[:, head, :, None]  # (KEY_BLOCK, 1, D)
        parts.append(masked_attention(queries, keys, values, mask))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _mask(offset: int, device: torch.device) -> Tensor:
    """Return the causal mask (ROW_BLOCK, KEY_BLOCK) of rows at `offset` in a block of keys."""
    return _causal_mask(device)[:, KEY_BLOCK - offset : 2 * KEY_BLOCK - offset]


@cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the causal mask (ROW_BLOCK, 2 * KEY_BLOCK) of rows from position KEY_BLOCK on."""
    with torch.inference_mode(False):
        mask = torch.full((ROW_BLOCK, 2 * KEY_BLOCK), -torch.inf, device=device)
        return mask.triu_(KEY_BLOCK + 1)


def _key_block(parts: Sequence[Tensor], start: int) -> Tensor:
    """Return keys and values (2, Hkv, KEY_BLOCK, D) from `start` on, zero-padded at the end.

    A block within one part is a view of it.
    """
    end = start + KEY_BLOCK
    block: Tensor | None = None
    part_start = 0
    for part in parts:
        part_end = part_start + part.shape[2]
        first, last = max(start, part_start), min(end, part_end)
        if first < last:
            piece = token_slice(part, first - part_start, last - part_start)
            if piece.shape[2] == KEY_BLOCK:
                return piece
            if block is None:
                block = part.new_zeros(2, part.shape[1], KEY_BLOCK, part.shape[3])
            token_slice(block, first - start, last - start).copy_(piece)
        part_start = part_end
    assert block is not None
    return block
