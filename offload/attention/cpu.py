"""Attention on a CPU: torch's own flash operator, and where it wants help."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from offload.attention.folding import Backend, Partial, attend_causally, attend_folded, merge
from offload.attention.shape_buckets import ROWS, filled_up, is_compiled
from offload.layout import ceil_div

# torch's operator works through so many rows and keys at a time
_ROWS_PER_BLOCK, _KEYS_PER_BLOCK = 32, 512
# a merge takes as long as attention to so many keys
_MERGED_KEYS = 4096
# up to so many scores a head, one masked call beats a prefix, a square and their merge
_SMALL_MASK = 1 << 16


def cpu_backend(dtype: torch.dtype, measures: bool) -> Backend:
    """Return the kernels for a dtype. Not for float16, which torch's operator hardly supports.

    `measures`: whether a clock may decide which.
    """
    pairs_rows = measures and dtype != torch.float32 and two_rows_are_faster(dtype)
    kernels = CpuKernels(pairs_rows)
    return Backend(kernels.attend, kernels.op)


class CpuKernels:
    """torch's flash operator: float32 accumulation whatever the dtype."""

    def __init__(self, pairs_rows: bool):
        """`pairs_rows`: whether a lone row gets a twin, for the operator is faster with two."""
        self._pairs_rows = pairs_rows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        if not is_compiled(q, ROWS):
            return self._attend(q, k, v, causal)
        filled = filled_up(q)
        parts = []
        prefix = len(k) - len(q) if causal else len(k)
        if prefix:
            parts.append(self._attend(filled, k[:prefix], v[:prefix], False))
        if causal:  # what is filled up stands behind all rows, which do not see it
            keys = filled_up(k[prefix:])
            values = filled_up(v[prefix:])
            parts.append(self._attend(filled, keys, values, True))
        out, lse = merge(parts)
        return out[: len(q)], lse[: len(q)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        scores = len(q) * len(k)  # of a head
        if causal and scores <= _SMALL_MASK:
            return attend_causally(self.op, q, k, v)
        return attend_folded(self.op, q, k, v, causal)

    def op(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None
    ) -> Partial:
        rows = q.shape[2]
        lone = rows % _ROWS_PER_BLOCK == 1
        masks_alike = mask is None or mask.shape[2] == 1
        same_keys = not causal and masks_alike  # for all rows
        if self._pairs_rows and lone and same_keys:
            twin = q[:, :, -1:]
            q = torch.cat((q, twin), dim=2)
        if causal or mask is not None:
            out, lse = _flash(q, k, v, causal, mask)
        else:
            out, lse = _attend_split(q, k, v)
        out = out[:, :, :rows]
        lse = lse[:, :, :rows]
        return out, lse


def two_rows_are_faster(dtype: torch.dtype) -> bool:
    """Measure whether the operator is faster with two rows than with one, of 16 bits.

    One row takes a path of its own: half as fast as two on AMD's Zen 5, twice as fast on Sapphire
    Rapids.
    """
    # a single head, for which one thread does all: on a busy machine threads wait for each other,
    # by chance longer for two rows, and what is decided here holds as long as the process
    kv = torch.ones(1, 1, 8 * _KEYS_PER_BLOCK, 64, dtype=dtype)

    def seconds(rows: int) -> float:
        started = time.perf_counter()
        _flash(kv[:, :, :rows], kv, kv)
        return time.perf_counter() - started

    seconds(2)  # the first ones warm up
    seconds(1)
    twos = []
    ones = []
    for _ in range(10):
        twos.append(seconds(2))
        ones.append(seconds(1))
    return min(twos) < min(ones)


def _attend_split(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Split the keys over threads that the operator would leave idle.

    It shares out heads and blocks of rows over the threads; here these may be few.
    """
    _, heads, keys, _ = k.shape
    rows = q.shape[2]
    threads = torch.get_num_threads()
    blocks = ceil_div(rows, _ROWS_PER_BLOCK)
    parts = threads // math.gcd(threads, heads)  # by heads alone: the last block may be a small one
    busy = heads * blocks >= 4 * threads
    too_few = keys < (_MERGED_KEYS if heads >= threads else parts * _KEYS_PER_BLOCK)
    if busy or too_few:
        parts = 1
    rest = keys % parts  # what is left over when all parts have one size
    whole = keys - rest
    even_keys = k[:, :, :whole]
    even_values = v[:, :, :whole]
    partials = _attend_parts(q, even_keys, even_values, parts)
    if rest:
        last_keys = k[:, :, whole:]
        last_values = v[:, :, whole:]
        partials += _attend_parts(q, last_keys, last_values, 1)
    return merge(partials)


def _attend_parts(q: Tensor, k: Tensor, v: Tensor, parts: int) -> list[Partial]:
    """Attend to `parts` parts of the keys, all of one size."""

    def part_by_part(x: Tensor) -> Tensor:  # (1, H, N, D) to (P, H, N / P, D)
        split = x[0].unflatten(1, (parts, -1))
        return split.transpose(0, 1)

    q = q.expand(parts, -1, -1, -1)
    k = part_by_part(k)
    v = part_by_part(v)
    out, lse = _flash(q, k, v)
    partials = []
    for part in range(parts):
        part_out = out[part, None]
        part_lse = lse[part, None]
        partials.append((part_out, part_lse))
    return partials


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
) -> Partial:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
