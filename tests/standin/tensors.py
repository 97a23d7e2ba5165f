"""Tensors that report a GPU as their device, with their numbers in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from standin.machine import Allocation


class GpuTensor(Tensor):
    """A tensor on the stand-in: `inner` holds its numbers, `block` is its memory on the device."""

    inner: Tensor
    block: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, block: Allocation) -> GpuTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=block.machine.device,
        )
        tensor.inner, tensor.block = inner, block
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called outside the stand-in")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **options: Any) -> str:
        return f"GpuTensor({self.inner!r})"


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, tuple | list | dict):
        return []
    tensors: list[Tensor] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list | dict):
            tensors += tensors_in(value)
    return tensors


def unwrap(values: Any) -> Any:
    if isinstance(values, GpuTensor):
        return values.inner
    if isinstance(values, tuple | list):
        return type(values)(unwrap(value) for value in values)
    if isinstance(values, dict):
        return {name: unwrap(value) for name, value in values.items()}
    return values


def clone(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.clone()
    return (
        type(values)(clone(value) for value in values)
        if isinstance(values, tuple | list)
        else values
    )


def wrap(values: Any, block: Allocation) -> Any:
    """Return values as tensors in the block."""
    if isinstance(values, Tensor):
        return GpuTensor(values, block)
    return type(values)(wrap(value, block) for value in values)


def poison(values: Any, integer: int | None = None) -> None:
    """Fill values like uninitialized memory: with NaN, and integers that are invalid as an index.

    `integer` replaces the latter.
    """
    for x in tensors_in(values):
        if x.is_floating_point():
            x.fill_(torch.nan)
        elif x.dtype != torch.bool:
            x.fill_(torch.iinfo(x.dtype).min if integer is None else integer)
