"""Number formats to count bytes with, where torch is not loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offload.errors import TierForceError

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class CountedDtype:
    """A stand-in for one of torch's dtypes: bytes are counted with it, and torch is not loaded."""

    name: str
    itemsize: int  # bytes


def counted_dtype(name: str) -> torch.dtype:
    """Return a stand-in for torch's dtype of this name; it may size caches, and not make them.

    Raises TierForceError for what no model is run in.
    """
    if name not in _ITEM_BYTES:
        raise TierForceError(f"`dtype` {name} is not known: use {', '.join(_ITEM_BYTES)}.")
    return cast("torch.dtype", CountedDtype(name, _ITEM_BYTES[name]))
