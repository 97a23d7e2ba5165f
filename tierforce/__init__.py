"""TierForce: exact decoding after book-length prompts, on consumer GPUs.

The names that programs use, which are those of `decoding`, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import decoding
from decoding import __all__ as __all__

if TYPE_CHECKING:
    from decoding import GREEDY as GREEDY
    from decoding import Engine as Engine
    from decoding import Grammar as Grammar
    from decoding import Sampling as Sampling
    from decoding import Settings as Settings


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(decoding, name)
