"""Kernels that a CPU build of torch lacks: their conditions, shapes, layouts and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.layout import ceil_div

aten = torch.ops.aten
HALF_DTYPES = (torch.float16, torch.bfloat16)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, diagonal: int = 1
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, D) and lse (B, H, T) float32.

    If causal, keys from the `diagonal` on are masked, as by `torch.triu`.
    """
    _require(k.shape[2] > 0, "attention needs at least one key")
    scores = q.float() @ k.float().transpose(2, 3) / math.sqrt(q.shape[-1])
    if causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).triu(diagonal)
        scores = scores.masked_fill(mask, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _check(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    _require(q.dim() == k.dim() == v.dim() == 4, "attention takes (B, H, T, D)")
    _require(q.dtype == k.dtype == v.dtype, f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    _require(q.shape[0] == k.shape[0] == v.shape[0], "batches must agree")
    _require(k.shape[1] == v.shape[1], "heads of keys and values must agree")
    _require(k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3], "keys and values must agree")
    _require(all(x.stride(-1) == 1 for x in (q, k, v)), "the last dimension must be contiguous")
    _require(dropout == 0, "dropout is not supported")


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False
) -> tuple[Any, ...]:
    _check(q, k, v, dropout)
    _require(q.dtype in HALF_DTYPES, "FlashAttention only support fp16 and bf16 data type")
    _require(
        q.shape[3] % 8 == 0 and q.shape[3] <= 256,
        "head_size must be a multiple of 8, of at most 256",
    )
    rows, keys = q.shape[2], k.shape[2]
    _require(not causal or rows <= keys, "a causal mask needs a key for each query")
    _require(q.shape[1] % k.shape[1] == 0, "query heads must be a multiple of KV heads")
    seed = torch.zeros(2, dtype=torch.int64)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = _attention(q, k, v, causal, diagonal=keys - rows + 1)
    return (
        torch.empty_like(q).copy_(out),
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        seed,
        seed[0],
        q.new_empty(0),
    )


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
) -> tuple[Any, ...]:
    _check(q, k, v, dropout)
    _require(bias is None, "an attention bias is not supported")
    _require(q.shape[1] == k.shape[1], "heads must agree")
    out, sums = _attention(q, k, v, causal)
    padded = sums.new_full((*sums.shape[:2], ceil_div(sums.shape[2], 32) * 32), torch.inf)
    padded[:, :, : sums.shape[2]] = sums
    seed = torch.zeros((), dtype=torch.int64)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, padded if lse else sums[:, :, :0], seed, seed


def matmul_out_dtype(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    _require(
        x.dtype == y.dtype and x.dtype in HALF_DTYPES and dtype in (x.dtype, torch.float32),
        "out_dtype needs 16-bit inputs",
    )
    return x.to(dtype) @ y.to(dtype)


def rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    _require(weight is None or weight.dtype == x.dtype, "other dtypes are not normalized in one")
    return torch.rms_norm(x, shape, weight, eps)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten.bmm.dtype: matmul_out_dtype,
    aten.mm.dtype: matmul_out_dtype,
    aten.rms_norm.default: rms_norm,
}
CPU_ONLY = {aten._scaled_dot_product_flash_attention_for_cpu.default}
# operations that wait for the device, since the host needs a number or a shape of their result
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
UNSET = {  # operations that return uninitialized memory
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
