"""Whether the fused kernels for slices are used on a device: where a trial shows they are right."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from offload.attention import partial_attention
from offload.errors import one_line
from offload.slice_format import SLICED_DTYPES, slice_format
from offload.slices import SliceCodec

_HEADS, _TOKENS, _DIM, _ROWS = 2, 300, 64, 3  # of a trial
_CLOSE = 2e-2  # of attention in bfloat16, of which weights are rounded too


@cache
def fused_kernels(device: str) -> tuple[ModuleType | None, str]:
    """Return `offload.slice_kernels` for a type of device, or None, and why it is so."""
    if device != "cuda":
        return None, f"there are none for {device}"
    try:
        from offload import slice_kernels

        for dtype in SLICED_DTYPES:
            _try(slice_kernels, torch.device(device), getattr(torch, dtype))
    # whatever a compiler or driver makes of them, plain operations do the same
    except Exception as error:
        return None, f"{type(error).__name__}: {one_line(error)}"
    return slice_kernels, "a trial showed that they are right"


def _try(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    """Raise RuntimeError where kernels say something else than plain operations."""
    cut = slice_format(dtype)
    assert cut is not None
    codec = SliceCodec(cut)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, _HEADS, _TOKENS, _DIM, generator=generator)
    kv = kv.to(device, dtype)
    q = torch.randn(_ROWS, 2 * _HEADS, _DIM, generator=generator)
    q = q.to(device, dtype)
    offsets = codec.offsets(kv)
    table = torch.tensor(offsets, dtype=torch.int32, device=device)
    codes, lows, _ = codec.split(kv, offsets)
    joined = torch.empty_like(kv)
    wanted = torch.empty_like(kv)
    near = torch.empty_like(kv)
    codec.join(codes, lows, offsets, wanted)
    kernels.join(cut, codes, lows, table, joined)
    patterns = joined.view(torch.int16)
    if not torch.equal(patterns, wanted.view(torch.int16)):
        raise RuntimeError(f"elements of {dtype} are joined wrongly")
    codec.join(codes, None, offsets, near)
    keys = near[0].transpose(0, 1)
    values = near[1].transpose(0, 1)
    right, _ = partial_attention(q, keys, values, causal=False)
    found, _ = kernels.attend(cut, q, codes, table)
    apart = found.float() - right.float()
    error = apart.abs().max().item()
    if not error < _CLOSE:
        raise RuntimeError(f"attention to codes of {dtype} is off by {error:.3g}")
