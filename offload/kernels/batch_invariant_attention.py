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
from offload.attention.folding import Partial, concatenated, merge_stacked
from offload.attention.head_major import token_slice
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.kernels.selection import batch_invariant_kernels
from offload.layout import ceil_div
from offload.traffic import ByteCounters


def batch_invariant_attention(q: Tensor, parts: Sequence[Tensor], traffic: ByteCounters) -> Partial:
    """Return the causal attention of the last T of N tokens, q (T, Hq, D).

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
        attended: Partial = kernels.attend(q, parts)
        return attended
    lead = start % ROW_BLOCK
    padded = F.pad(q, (0, 0, 0, 0, lead, -end % ROW_BLOCK))
    key_blocks: dict[int, Tensor] = {}  # keyed by first token
    blocks = []
    position = start - lead
    for rows in padded.split(ROW_BLOCK):
        partials = []
        for key in range(0, position + 1, KEY_BLOCK):
            if key not in key_blocks:
                key_blocks[key] = _key_block(parts, key)
            traffic.attended += key_blocks[key].nbytes
            partials.append(_attend(rows, key_blocks[key], position - key))
        # on a CPU what `merge` does to two parts of a row depends on the number of rows and heads
        blocks.append(partials[0] if len(partials) == 1 else merge_stacked(partials))
        position += ROW_BLOCK
    return _own_rows(blocks, lead, len(q))


def batch_invariant_window(
    q: Tensor, kv: Tensor, start: int, window: int, traffic: ByteCounters
) -> Partial:
    """Return the attention of the last T tokens of kv, each to its window.

    A block of rows attends in one call to its own keys and as many before it as its first row sees,
    rounded up to whole blocks: in a shape that depends on its position alone, and for all heads
    together. There is no kernel of its own.

    Args:
        q: (T, Hq, D).
        kv: keys and values (2, Hkv, N, D), at least those in the window of any query.
        start: position of the first of them.
        window: number of tokens that each query sees, its own the last of them.
        traffic: counts the bytes read.
    """
    end = start + kv.shape[2]
    first = end - len(q)
    lead = first % ROW_BLOCK
    padded = F.pad(q, (0, 0, 0, 0, lead, -end % ROW_BLOCK))
    span = ceil_div(window - 1, ROW_BLOCK) * ROW_BLOCK + ROW_BLOCK
    blocks = []
    stop = first - lead
    for rows in padded.split(ROW_BLOCK):
        stop += ROW_BLOCK
        tokens = min(span, stop)  # there are none before the sequence
        block = _block(kv, stop - tokens - start, tokens)
        traffic.attended += block.nbytes
        k, v = block.transpose(1, 2)
        mask = _window_mask(window, span, q.device)[:, span - tokens :]
        blocks.append(masked_attention(rows, k, v, mask))
    return _own_rows(blocks, lead, len(q))


def _own_rows(blocks: Sequence[Partial], lead: int, count: int) -> Partial:
    """Return `count` rows after the first `lead` of blocks of rows."""
    out, lse = concatenated(blocks, dim=0)
    return out[lead : lead + count], lse[lead : lead + count]


def _block(kv: Tensor, start: int, tokens: int) -> Tensor:
    """Return so many tokens of kv (2, Hkv, N, D) from index `start` on; those it lacks are zero."""
    first, last = max(0, start), min(kv.shape[2], start + tokens)
    piece = token_slice(kv, first, last)
    if last - first == tokens:
        return piece
    return F.pad(piece, (0, 0, first - start, start + tokens - last))


@cache
def _window_mask(window: int, span: int, device: torch.device) -> Tensor:
    """Return the mask (ROW_BLOCK, span) of the last rows of so many keys."""
    with torch.inference_mode(False):
        rows = torch.arange(span - ROW_BLOCK, span, device=device)[:, None]
        keys = torch.arange(span, device=device)
        mask = torch.zeros(ROW_BLOCK, span, device=device)
        return mask.masked_fill((keys > rows) | (keys <= rows - window), -torch.inf)


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
    return concatenated(parts, dim=1)


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
