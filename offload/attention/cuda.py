"""Attention on a GPU: the flash-attn package, torch's kernels, and plain products where no kernel
takes a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.attention.folding import Partial, attend_folded


def cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """torch's built-in FlashAttention-2, for 16-bit dtypes."""

    def op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[:2]

    return attend_folded(op, q, k, v, causal)


def cuda_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """torch's memory-efficient kernel: the flash kernels take no float32. Its lse is padded to a
    multiple of 32 rows.
    """

    def op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal
        )[:2]
        return out, lse[..., : q.shape[2]]

    return attend_folded(op, q, k, v, causal)


def flash_attn_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """The flash-attn package: grouped heads and bottom-right causal masks are its own."""
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(q[None], k[None], v[None], causal=causal, return_attn_probs=True)
    return out[0], lse[0].transpose(0, 1)  # lse (1, Hq, T)


def matmul_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor) -> Partial:
    """Few rows with a bias, where no fused kernel takes one: matmul, softmax in float32, matmul."""
    keys = k[0].transpose(1, 2)  # (H, D, N)
    # other devices know no such product
    wide = q.dtype != torch.float32 and q.device.type == "cuda"
    products = torch.bmm(q[0], keys, torch.float32) if wide else torch.bmm(q[0], keys).float()
    scores = products[None] * q.shape[-1] ** -0.5 + mask  # (1, H, T, N)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse
