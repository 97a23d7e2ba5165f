"""Attention on a GPU: the flash-attn package, torch's kernels, and matmuls for masks."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.attention.folding import Backend, Partial, attend_gqa, merge
from offload.layout import ceil_div

_ROWS_PER_BLOCK = 64  # block size of torch's kernel
_MAX_DIM = 256  # dimensions of a head, of flash kernels
_PART_KEYS, _MAX_PARTS = 2048, 64  # keys that a block reads alone, and parts of them
_LONG = 4096  # keys from which reading them more often than necessary costs more than launches


def cuda_backend(dtype: torch.dtype) -> Backend:
    """Return the kernels for a dtype: flash-attn if it is installed, else torch's."""
    if dtype == torch.float32:
        return Backend(cuda_float32, matmul_op)
    try:
        from flash_attn import flash_attn_func  # noqa: F401
    except (ImportError, OSError):  # not installed, or built for another torch
        return Backend(cuda_flash, matmul_op)
    return Backend(flash_attn_kernel, matmul_op)


def cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attend with torch's built-in FlashAttention-2, for 16-bit dtypes.

    It requires a head dimension that is a multiple of 8 and at most 256; others use the
    memory-efficient kernel.
    It supports GQA and bottom-right causality, but each query head reads the keys again. Where the
    query heads of a KV head fill fewer blocks together, a long prefix is folded.
    """
    if q.shape[-1] > _MAX_DIM:
        return attend_gqa(_wide_op, q, k, v, causal)
    if q.shape[-1] % 8:
        return attend_gqa(_efficient_op, q, k, v, causal)
    rows, heads, _ = q.shape
    if not causal:
        return attend_gqa(_flash_op, q, k, v, False)
    prefix, groups = len(k) - rows, heads // k.shape[1]
    blocks = ceil_div(rows * groups, _ROWS_PER_BLOCK)
    if prefix < _LONG or blocks == groups * ceil_div(rows, _ROWS_PER_BLOCK):
        return _flash(q, k, v)
    before = attend_gqa(_flash_op, q, k[:prefix], v[:prefix], False)
    return merge([before, _flash(q, k[prefix:], v[prefix:])])


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend causally in one launch; the arguments are those of `cuda_flash`."""
    rows, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = _flash_op(rows, keys, values, True)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _flash_op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[:2]


def cuda_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attend with torch's memory-efficient kernel: flash kernels do not support float32."""
    return attend_gqa(_efficient_op, q, k, v, causal)


def _efficient_op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse = efficient(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse[..., : q.shape[2]]  # lse is padded to a multiple of 32 rows


def _wide_op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attend as `_efficient_op`, but with many keys in parts.

    That kernel has one block for some rows of a head, which reads all of its keys.
    """
    keys = k.shape[2]
    parts = min(_MAX_PARTS, keys // _PART_KEYS)
    if causal or parts < 2 or q.shape[2] > _ROWS_PER_BLOCK:
        return _efficient_op(q, k, v, causal)
    whole = keys // parts * parts  # equal parts; the remaining keys are a part of their own
    by_part = [x[0, :, :whole].unflatten(1, (parts, -1)).transpose(0, 1) for x in (k, v)]
    out, lse = _efficient_op(q.expand(parts, -1, -1, -1), by_part[0], by_part[1], False)
    partials = [(out[part, None], lse[part, None]) for part in range(parts)]
    if whole < keys:
        partials.append(_efficient_op(q, k[:, :, whole:], v[:, :, whole:], False))
    return merge(partials)


def flash_attn_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attend with the flash-attn package, which supports GQA and bottom-right causality."""
    from flash_attn import flash_attn_func

    if q.shape[-1] > _MAX_DIM:
        return attend_gqa(_wide_op, q, k, v, causal)
    out, lse, _ = flash_attn_func(
        q[None],
        k[None],
        v[None],
        causal=causal,
        return_attn_probs=True,  # also returns lse (1, Hq, T)
    )
    return out[0], lse[0].transpose(0, 1)


def matmul_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor) -> Partial:
    """Attend with few rows and a mask, which fused kernels do not support.

    Scores and softmax are float32, matmuls take the inputs' dtype.
    """
    rows = q[0]  # (H, T, D)
    keys = k[0].transpose(1, 2)  # (H, D, N)
    if q.dtype != torch.float32 and q.device.type == "cuda":
        products = torch.bmm(rows, keys, torch.float32)
    else:  # other devices have no matmul of 16-bit inputs with float32 output
        products = torch.bmm(rows, keys).float()
    scores = products[None] * q.shape[-1] ** -0.5 + mask  # (1, H, T, N)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(v.dtype)
    return weights @ v, lse
