"""Whether fused kernels are used on a device: where a trial shows they are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.codec.format import split_format
from offload.codec.split_float import SplitFloatCodec
from offload.errors import is_out_of_memory, one_line
from offload.kernels.batch_invariant_shape import KEY_BLOCK

_HEADS, _TOKENS = 2, 300  # of a trial
_BLOCKS = 16, 32, 64  # rows of a KV head that a program takes: a kernel is compiled for each
_BATCH_INVARIANT_TOKENS, _BATCH_INVARIANT_ROWS = KEY_BLOCK + 44, 11  # with several blocks of both
_CLOSE = 2e-2  # of attention in bfloat16, of which weights are rounded too
_CLOSE_IN_32_BITS = 1e-4

Kernels = tuple[ModuleType | None, str]  # that are used, and why, or why none are


@cache
def split_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.split_float` for a type of device, or None, and why it is so.

    Args:
        device: the type.
        dtype: of the elements, which are cut into slices.
        dim: of a head.
        groups: query heads to a KV head.
    """
    if split_format(dtype) is None:
        return None, f"elements of {dtype} cannot be split"
    return _run_self_test("offload.kernels.split_float", _test_split, device, dtype, dim, groups)


@cache
def batch_invariant_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.batch_invariant` for a type of device, or None, and why it is so.

    Args:
        device: the type.
        dtype: of the elements.
        dim: of a head.
        groups: query heads to a KV head.
    """
    return _run_self_test(
        "offload.kernels.batch_invariant", _test_batch_invariant, device, dtype, dim, groups
    )


def _run_self_test(name: str, trial: Callable[..., None], device: str, *shape: Any) -> Kernels:
    """Return the kernels of a module where they pass a trial, with what follows the device.

    Raises what says that memory ran out (`is_out_of_memory`), which says nothing of them.
    """
    if device != "cuda":
        return None, f"there are none for {device}"
    try:
        kernels = import_module(name)
        trial(kernels, torch.device(device), *shape)
    # whatever a compiler or driver makes of them, plain operations do without
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, _reason(error)
    return kernels, "a trial showed that they are right"


def _reason(error: Exception) -> str:
    """Return why kernels cannot be used, and what is missing where triton cannot compile."""
    reason = f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, CalledProcessError | FileNotFoundError) or "C compiler" in reason:
        reason += "; triton needs gcc and Python.h here: install gcc and python3-dev"
    return reason


def _test_split(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError where kernels say something else than plain operations."""
    cut = split_format(dtype)
    assert cut is not None
    codec = SplitFloatCodec(cut)
    passes = _rows(groups)
    kv, queries = _inputs(device, dtype, _TOKENS, dim, passes[-1], groups)
    offsets = codec.offsets(kv)
    table = torch.tensor(offsets, dtype=torch.int32, device=device)
    codes, lows, _ = codec.split(kv, offsets)
    joined, wanted, near = torch.empty_like(kv), torch.empty_like(kv), torch.empty_like(kv)
    codec.reconstruct(codes, lows, offsets, wanted)
    kernels.reconstruct(cut, codes, lows, table, joined)
    if not torch.equal(joined.view(torch.int16), wanted.view(torch.int16)):
        raise RuntimeError(f"elements of {dtype} are joined wrongly")
    codec.reconstruct(codes, None, offsets, near)
    keys, values = near.transpose(1, 2)
    for rows in passes:
        q = queries[:rows]
        right, _ = partial_attention(q, keys, values, causal=False)
        found, _ = kernels.attend(cut, q, codes, table)
        _check_close(f"attention to codes of {dtype}", found, right)


def _rows(groups: int) -> list[int]:
    """Return the rows of passes for which all kernels of attention to codes are compiled.

    Of the largest block there are two, of which the second is not full.
    """
    rows = {max(1, block // groups) for block in _BLOCKS}
    return sorted(rows | {1, _BLOCKS[-1] // groups + 1})


def _test_batch_invariant(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError where kernels for steady attention are wrong, or a row's numbers vary."""
    kv, q = _inputs(device, dtype, _BATCH_INVARIANT_TOKENS, dim, _BATCH_INVARIANT_ROWS, groups)
    keys, values = kv.transpose(1, 2)
    right, _ = partial_attention(q, keys, values, causal=True)
    whole = kernels.attend(q, [kv])
    _check_close(f"steady attention in {dtype}", whole, right)
    first = _BATCH_INVARIANT_TOKENS - _BATCH_INVARIANT_ROWS + 1  # tokens that the first row sees
    prefix = kv[:, :, :17].contiguous()
    alone = kernels.attend(q[:1], [prefix, kv[:, :, 17:first]])
    if not torch.equal(alone[0], whole[0]):
        raise RuntimeError(f"steady attention in {dtype} depends on other rows")


def _inputs(
    device: torch.device, dtype: torch.dtype, tokens: int, dim: int, rows: int, groups: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values (2, H, N, D), and queries (T, H * groups, D)."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, _HEADS, tokens, dim, generator=generator)
    q = torch.randn(rows, _HEADS * groups, dim, generator=generator)
    return kv.to(device, dtype), q.to(device, dtype)


def _check_close(name: str, attended: Tensor, right: Tensor) -> None:
    """Raise RuntimeError where numbers are not close to the right ones."""
    error = (attended.float() - right.float()).abs().max().item()
    if not error < (_CLOSE_IN_32_BITS if right.dtype == torch.float32 else _CLOSE):
        raise RuntimeError(f"{name} is off by {error:.3g}")
