"""The bytes of tensors that are live at once, counted on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all tensors that operations inside of the context read or return.

    Memory that an operation frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0  # bytes
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen:
            return
        self._seen.add(id(storage))
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, id(storage), size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.remove(key)
        self.now -= size
