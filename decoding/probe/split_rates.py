"""The rates of layers in slices: joining them, and attention to codes."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.probe.rates import median_seconds, random_tensor
from offload.attention import partial_attention
from offload.attention.head_major import token_slice
from offload.codec.format import SPLIT_TOKENS, split_format
from offload.codec.split_float import SplitFloatCodec
from offload.kernels.selection import split_kernels
from parallel.config.model_config import ModelConfig

_TOKENS = 16_384  # far more than a processor's cache holds


def split_rates(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure the numbers of a hardware profile that are of slices; none where none are cut.

    They are bytes a second of the elements that slices stand for, as this device deals with them:
    by fused kernels, or step by step.
    """
    cut = split_format(dtype)
    if cut is None:
        return {}
    codec = SplitFloatCodec(cut)
    layout = config.kv_layout(1, dtype)
    kernels, _ = split_kernels(device.type, dtype, layout.head_dim, layout.groups)
    kv = random_tensor(*layout.shape(1, _TOKENS), device=device, dtype=dtype)[0]
    q = random_tensor(1, config.heads, config.head_dim, device=device, dtype=dtype)
    offsets = codec.offsets(kv)
    table = torch.tensor(offsets, dtype=torch.int32, device=device)
    parts = [
        codec.split(token_slice(kv, start, start + SPLIT_TOKENS), offsets)[:2]
        for start in range(0, _TOKENS, SPLIT_TOKENS)
    ]
    codes, lows = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    out = torch.empty_like(kv)

    def join() -> Tensor:
        if kernels is None:
            codec.reconstruct(codes, lows, offsets, out)
        else:
            kernels.reconstruct(cut, codes, lows, table, out)
        return out

    def attend() -> Tensor:
        if kernels is not None:
            return kernels.attend(cut, q, codes, table)[0]
        codec.reconstruct(codes, None, offsets, out)
        keys, values = (each.transpose(0, 1) for each in out)
        return partial_attention(q, keys, values, causal=False)[0]

    return {
        "reconstruct_rate": kv.nbytes / median_seconds(join),
        "high_bits_rate": kv.nbytes / median_seconds(attend),
    }
