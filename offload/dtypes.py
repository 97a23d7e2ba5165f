"""Number formats of weights and KV: their names, their sizes, and torch's dtypes.

torch is imported on use only: checking names and counting bytes does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from offload.errors import TierForceError

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPES = tuple(_ITEM_BYTES)  # supported dtypes of models
NO_FLOAT16 = "float16 is not supported on a CPU: use `dtype` float32, or bfloat16."


@dataclass(frozen=True)
class DTypeSpec:
    """A stand-in for a torch dtype, for counting bytes."""

    name: str
    itemsize: int  # bytes


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of this name. Raises TierForceError if it is not supported."""
    check_dtype(name)
    import torch

    return cast("torch.dtype", getattr(torch, name))


def dtype_spec(name: str) -> torch.dtype:
    """Return a stand-in for torch's dtype of this name, for sizing caches but not allocating them.

    Raises TierForceError if it is not supported.
    """
    check_dtype(name)
    return cast("torch.dtype", DTypeSpec(name, _ITEM_BYTES[name]))


def check_dtype(name: str) -> None:
    """Raise TierForceError if the name is not that of a supported dtype."""
    if name not in DTYPES:
        raise TierForceError(f"`dtype` {name} is not known: use {', '.join(DTYPES)}.")


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype or of its stand-in."""
    return dtype.name if hasattr(dtype, "name") else str(dtype).removeprefix("torch.")
