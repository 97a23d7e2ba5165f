"""Microbenchmarks of split layers: reconstruction, and attention to high bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.probe.rates import median_seconds, random_tensor
from offload.attention import partial_attention
from offload.attention.folding import empty_partial
from offload.attention.head_major import token_slice
from offload.codec.format import PLAIN_SPLIT_TOKENS, split_format
from offload.codec.split_float import SplitFloatCodec
from offload.kernels.selection import split_kernels
from parallel.config.model_config import ModelConfig

_TOKENS = 16_384  # far more than a processor's cache holds


def split_rates(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure a hardware profile's rates of split layers; empty if `dtype` cannot be split.

    They are in bytes/s of the 16-bit elements, with this device's implementation: fused kernels or
    separate operations.
    """
    split = split_format(dtype)
    if split is None:
        return {}
    codec = SplitFloatCodec(split)
    layout = config.kv_layout(1, dtype)
    kernels, _ = split_kernels(device.type, dtype, layout.head_dim, layout.groups)
    kv = random_tensor(*layout.shape(1, _TOKENS), device=device, dtype=dtype)[0]
    q = random_tensor(1, config.heads, config.head_dim, device=device, dtype=dtype)
    offsets = codec.offsets(kv)
    table = torch.tensor(offsets, dtype=torch.int32, device=device)
    parts = [
        codec.split(token_slice(kv, start, start + PLAIN_SPLIT_TOKENS), offsets)[:2]
        for start in range(0, _TOKENS, PLAIN_SPLIT_TOKENS)
    ]
    high, low = (torch.cat(blocks, dim=2) for blocks in zip(*parts, strict=True))
    out = torch.empty_like(kv)

    def reconstruct() -> Tensor:
        if kernels is None:
            codec.reconstruct(high, low, offsets, out)
        else:
            kernels.reconstruct(split, high, low, table, out)
        return out

    nothing = empty_partial(q)

    def attend() -> Tensor:
        if kernels is not None:
            return kernels.attend(split, q, high, table, nothing)[0]
        codec.reconstruct(high, None, offsets, out)
        keys, values = (part.transpose(0, 1) for part in out)
        return partial_attention(q, keys, values, causal=False)[0]

    return {
        "reconstruct_rate": kv.nbytes / median_seconds(reconstruct),
        "high_bits_rate": kv.nbytes / median_seconds(attend),
    }
