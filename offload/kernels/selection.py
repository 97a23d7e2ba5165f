"""Selection of fused kernels: they are used on a device if they pass a self-test there."""

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

_HEADS, _TOKENS = 2, 300  # size of the self-test
_BLOCKS = 16, 32, 64  # rows of a KV head per program: a kernel is compiled for each
_BATCH_INVARIANT_TOKENS, _BATCH_INVARIANT_ROWS = (
    KEY_BLOCK + 44,
    11,
)  # several blocks of keys and rows
_TOLERANCE = 2e-2  # attention in bfloat16 rounds its weights, too
_TOLERANCE_IN_32_BITS = 1e-4

Kernels = tuple[ModuleType | None, str]  # the kernels to use, or None, and the reason


@cache
def split_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.split_float` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the elements to be split.
        dim: head dimension.
        groups: query heads per KV head.
    """
    if split_format(dtype) is None:
        return None, f"elements of {dtype} cannot be split"
    return _run_self_test("offload.kernels.split_float", _test_split, device, dtype, dim, groups)


@cache
def batch_invariant_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.batch_invariant` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the elements.
        dim: head dimension.
        groups: query heads per KV head.
    """
    return _run_self_test(
        "offload.kernels.batch_invariant", _test_batch_invariant, device, dtype, dim, groups
    )


def _run_self_test(name: str, test: Callable[..., None], device: str, *shape: Any) -> Kernels:
    """Return a module of kernels if they pass `test`, which gets the device and `shape`.

    Raises out-of-memory errors (`is_out_of_memory`): they do not mean that the kernels are wrong.
    """
    if device != "cuda":
        return None, f"there are none for {device}"
    try:
        kernels = import_module(name)
        test(kernels, torch.device(device), *shape)
    # whichever error a compiler or driver raises, plain operations work without the kernels
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, _reason(error)
    return kernels, "the self-test passed"


def _reason(error: Exception) -> str:
    """Return why kernels cannot be used, and what to install if triton cannot compile."""
    reason = f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, CalledProcessError | FileNotFoundError) or "C compiler" in reason:
        reason += "; triton needs gcc and Python.h here: install gcc and python3-dev"
    return reason


def _test_split(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError if the kernels' results differ from those of plain operations."""
    fmt = split_format(dtype)
    assert fmt is not None
    codec = SplitFloatCodec(fmt)
    counts = _row_counts(groups)
    kv, queries = _inputs(device, dtype, _TOKENS, dim, counts[-1], groups)
    offsets = codec.offsets(kv)
    table = torch.tensor(offsets, dtype=torch.int32, device=device)
    high, low, _ = codec.split(kv, offsets)
    actual, expected, decoded = torch.empty_like(kv), torch.empty_like(kv), torch.empty_like(kv)
    codec.reconstruct(high, low, offsets, expected)
    kernels.reconstruct(fmt, high, low, table, actual)
    if not torch.equal(actual.view(torch.int16), expected.view(torch.int16)):
        raise RuntimeError(f"elements of {dtype} are reconstructed incorrectly")
    codec.reconstruct(high, None, offsets, decoded)
    keys, values = decoded.transpose(1, 2)
    for rows in counts:
        q = queries[:rows]
        expected, _ = partial_attention(q, keys, values, causal=False)
        actual, _ = kernels.attend(fmt, q, high, table)
        _check_close(f"attention over high bytes of {dtype}", actual, expected)


def _row_counts(groups: int) -> list[int]:
    """Return numbers of rows with which all kernels for attention over high bytes are compiled.

    The largest has two blocks of the largest size; the second is incomplete.
    """
    rows = {max(1, block // groups) for block in _BLOCKS}
    return sorted(rows | {1, _BLOCKS[-1] // groups + 1})


def _test_batch_invariant(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError if kernels are wrong, or a row's result depends on other rows."""
    kv, q = _inputs(device, dtype, _BATCH_INVARIANT_TOKENS, dim, _BATCH_INVARIANT_ROWS, groups)
    keys, values = kv.transpose(1, 2)
    expected, _ = partial_attention(q, keys, values, causal=True)
    whole = kernels.attend(q, [kv])
    _check_close(f"batch-invariant attention in {dtype}", whole, expected)
    first = (
        _BATCH_INVARIANT_TOKENS - _BATCH_INVARIANT_ROWS + 1
    )  # number of tokens the first row sees
    prefix = kv[:, :, :17].contiguous()
    alone = kernels.attend(q[:1], [prefix, kv[:, :, 17:first]])
    if not torch.equal(alone[0], whole[0]):
        raise RuntimeError(f"batch-invariant attention in {dtype} depends on other rows")


def _inputs(
    device: torch.device, dtype: torch.dtype, tokens: int, dim: int, rows: int, groups: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values (2, H, N, D), and queries (T, H * groups, D)."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, _HEADS, tokens, dim, generator=generator)
    q = torch.randn(rows, _HEADS * groups, dim, generator=generator)
    return kv.to(device, dtype), q.to(device, dtype)


def _check_close(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise RuntimeError if a result is not close to the expected one."""
    error = (actual.float() - expected.float()).abs().max().item()
    if not error < (_TOLERANCE_IN_32_BITS if expected.dtype == torch.float32 else _TOLERANCE):
        raise RuntimeError(f"{name} is off by {error:.3g}")
