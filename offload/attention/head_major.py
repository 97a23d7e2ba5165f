"""Head-major buffers (2, Hkv, capacity, D) of keys and values: slicing, writing, attention.

A buffer (1, Hkv, capacity, D) has keys that are the values as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from offload.attention import partial_attention
from offload.attention.folding import Partial, concatenated
from offload.traffic import ByteCounters


def token_slice(kv: Tensor, start: int, end: int) -> Tensor:
    """Return the tokens from `start` to `end` of keys or values (..., tokens, D)."""
    return kv[..., start:end, :]


def in_pairs(kv: Tensor) -> Tensor:
    """Return a view (2, H, N, D) of a buffer, whose values may be its keys."""
    return kv if len(kv) == 2 else kv.expand(2, -1, -1, -1)


def write_tokens(kv: Tensor, k: Tensor, v: Tensor, at: int) -> None:
    """Write k and v (T, H, D) into a buffer kv (2, H, capacity, D) from slot `at` on.

    Of a buffer that has no values of their own, v is not read.
    """
    for plane, x in zip(_slots(kv, at, len(k)).transpose(1, 2), (k, v), strict=False):
        plane.copy_(x)


def copy_tokens(kv: Tensor, tokens: Tensor, at: int) -> None:
    """Copy tokens (2, H, T, D) into a buffer kv (2, H, capacity, D) from slot `at` on."""
    _slots(kv, at, tokens.shape[2]).copy_(tokens)


def move_tokens(kv: Tensor, start: int, to: int, count: int) -> None:
    """Move `count` tokens of a buffer kv (2, H, capacity, D) from slot `start` on to slot `to`."""
    if count and start != to:
        tokens = token_slice(kv, start, start + count).clone()
        token_slice(kv, to, to + count).copy_(tokens)


def attend_prefix(
    kv: Tensor, q: Tensor, tokens: int, traffic: ByteCounters, causal: bool = True
) -> Partial:
    """Return the attention of q (T, Hq, D) over the first `tokens` of a buffer; count its bytes.

    If causal, the last T tokens are those of the queries.
    """
    k, v = token_slice(in_pairs(kv), 0, tokens).transpose(1, 2)  # (N, Hkv, D)
    traffic.attended += 2 * k.nbytes
    return partial_attention(q, k, v, causal)


def attend_by_heads(
    q: Tensor,
    kv_heads: int,
    parts: Iterable[tuple[slice, Tensor]],
    attend: Callable[[Tensor, Tensor, Tensor], Partial],
) -> Partial:
    """Return the attention of q (T, Hq, D) computed by `attend` for a few KV heads at a time.

    Each part is a slice of the `kv_heads` KV heads and their KV (2, h, N, D), in order;
    attend(q, k, v) gets k (N, h, D).
    """
    by_head = q.unflatten(1, (kv_heads, -1))  # (T, Hkv, G, D)
    outs = []
    for heads, kv in parts:
        k, v = kv.transpose(1, 2)
        outs.append(attend(by_head[:, heads].flatten(1, 2), k, v))
    return concatenated(outs, dim=1)


def _slots(kv: Tensor, at: int, count: int) -> Tensor:
    """Return `count` slots of a buffer kv (2, H, capacity, D), from `at` on.

    Raises ValueError if it has fewer: torch would silently drop a single row, which broadcasts to
    none.
    """
    end = at + count
    if end > kv.shape[2]:
        raise ValueError(f"{count} tokens at slot {at} do not fit a buffer of {kv.shape[2]}")
    return token_slice(kv, at, end)
