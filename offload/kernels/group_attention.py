"""Attention over a layer's KV heads, a few at a time: fast, or batch-invariant.

A group of heads has its keys and values in segments: a prefix and a tail, or both in one. The last
tokens are those of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offload.attention.folding import Partial, concatenated, merge
from offload.attention.head_major import attend_prefix
from offload.attention.window import attend_slots
from offload.kernels.batch_invariant_attention import (
    batch_invariant_attention,
    batch_invariant_window,
)
from offload.traffic import ByteCounters


class GroupAttention:
    """Attention over each segment, merged. A tail is attended once, for all groups together."""

    def attend(self, q: Tensor, segments: Sequence[Tensor], traffic: ByteCounters) -> Partial:
        """Attend with the queries q (T, h * G, D) of one group to its segments (2, h, n, D).

        Bytes read are counted in `traffic`.
        """
        first = segments[0]
        return attend_prefix(first, q, first.shape[2], traffic, causal=len(segments) == 1)

    def attend_window(
        self, q: Tensor, kv: Tensor, start: int, window: int, traffic: ByteCounters
    ) -> Partial:
        """Attend with the queries q (T, Hq, D) of the last T tokens of kv, each to its window.

        kv (2, Hkv, n, D) are all heads of a layer, from position `start` on: they are the only
        group. `window` counts tokens.
        """
        return attend_slots(kv, q, kv.shape[2], traffic, window)

    def join(
        self, parts: list[Partial], q: Tensor, tail: Tensor | None, traffic: ByteCounters
    ) -> Partial:
        """Return the attention of q (T, Hq, D), from what `attend` returned for each group.

        `tail` (2, Hkv, n, D) is the last segment of all groups, if they have two.
        """
        whole = concatenated(parts, dim=1)
        if tail is None:
            return whole
        return merge([attend_prefix(tail, q, tail.shape[2], traffic), whole])


class BatchInvariantAttention(GroupAttention):
    """Attention in blocks at fixed positions, which both segments of a group share."""

    def attend(self, q: Tensor, segments: Sequence[Tensor], traffic: ByteCounters) -> Partial:
        return batch_invariant_attention(q, segments, traffic)

    def attend_window(
        self, q: Tensor, kv: Tensor, start: int, window: int, traffic: ByteCounters
    ) -> Partial:
        return batch_invariant_window(q, kv, start, window, traffic)

    def join(
        self, parts: list[Partial], q: Tensor, tail: Tensor | None, traffic: ByteCounters
    ) -> Partial:
        return concatenated(parts, dim=1)


FAST, BATCH_INVARIANT = GroupAttention(), BatchInvariantAttention()
