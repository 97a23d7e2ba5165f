"""Sizes of the blocks in which rows and keys are computed (`batch_invariant_attention`)."""

from __future__ import annotations

from offload.layout import KVLayout, ceil_div

ROW_BLOCK = 8  # rows of a block
KEY_BLOCK = 2048  # keys of a block; a multiple of ROW_BLOCK


def working_bytes(layout: KVLayout, tokens: int, rows: int, groups: int) -> int:
    """Return the working memory of a layer's attention of `rows` rows over `tokens` tokens.

    It holds the block of keys that spans two parts, the last block, the float32 partial results of
    every row in each block, and the log-sum-exp of all. `groups`: query heads per KV head.
    """
    blocks = ceil_div(tokens, KEY_BLOCK)
    query_heads = layout.heads * groups
    values = layout.head_dim + 1
    partial = 4 * rows * query_heads * (blocks * values + 1)
    return 2 * layout.in_pairs.bytes(KEY_BLOCK, 1) + partial
