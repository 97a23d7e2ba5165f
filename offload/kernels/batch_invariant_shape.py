"""How large the blocks are in which rows and keys are computed (`batch_invariant_attention`)."""

from __future__ import annotations

from offload.layout import KVLayout, ceil_div

ROW_BLOCK = 8  # rows of a block
KEY_BLOCK = 2048  # keys of a block; WIDTH divides it


def working_bytes(layout: KVLayout, tokens: int, rows: int, groups: int) -> int:
    """Return what a layer's attention of `rows` rows to so many tokens holds beside their KV.

    That is what lies across an end of a block of keys, the last block, and, in float32, what every
    row finds in each. `groups`: query heads to a KV head.
    """
    blocks = ceil_div(tokens, KEY_BLOCK)
    query_heads = layout.heads * groups
    values = layout.head_dim + 1
    partial = 4 * blocks * rows * query_heads * values
    return 2 * layout.bytes(KEY_BLOCK, 1) + partial
