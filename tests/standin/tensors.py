"""Tensors that say they are on a GPU and keep their numbers in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from standin.machine import Allocation


class GpuTensor(Tensor):
    """`inner` holds the numbers, `block` is the memory they would lie in."""

    inner: Tensor
    block: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, block: Allocation) -> GpuTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=block.machine.device,
        )
        made.inner, made.block = inner, block
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside the stand-in")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **options: Any) -> str:
        return f"GpuTensor({self.inner!r})"


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, tuple | list | dict):
        return []
    found: list[Tensor] = []
    for each in values.values() if isinstance(values, dict) else values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list | dict):
            found += tensors_in(each)
    return found


def unwrapped(values: Any) -> Any:
    if isinstance(values, GpuTensor):
        return values.inner
    if isinstance(values, tuple | list):
        return type(values)(unwrapped(each) for each in values)
    if isinstance(values, dict):
        return {name: unwrapped(each) for name, each in values.items()}
    return values


def copied(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.clone()
    return (
        type(values)(copied(each) for each in values)
        if isinstance(values, tuple | list)
        else values
    )


def wrapped(values: Any, block: Allocation) -> Any:
    """Return values as views of the block."""
    if isinstance(values, Tensor):
        return GpuTensor(values, block)
    return type(values)(wrapped(each, block) for each in values)


def poison(values: Any, integer: int | None = None) -> None:
    """Fill values with what memory holds that nobody wrote.

    That is no number, and no integer that would do as an index, unless one is given.
    """
    for x in tensors_in(values):
        if x.is_floating_point():
            x.fill_(torch.nan)
        elif x.dtype != torch.bool:
            x.fill_(torch.iinfo(x.dtype).min if integer is None else integer)
