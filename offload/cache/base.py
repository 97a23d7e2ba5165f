"""What every cache is: the owner of keys, values, positions and attention.

Models only call `attend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.traffic import ByteCounters


class Cache(ABC):
    """KV of one sequence. `length` tokens count; it changes through `advance` and `crop` alone."""

    # what changes while tokens come, but for buffers that are only added to
    _state: ClassVar[tuple[str, ...]] = ("length",)
    # whether what a token attends with must not depend on those beside it (`offload.kernels`)
    is_batch_invariant = False

    def __init__(self, layout: KVLayout):
        self.layout = layout
        self.length = 0
        self.traffic = ByteCounters()

    def begin_forward(self, rows: int) -> None:
        """Start a pass over all layers, with `rows` new tokens behind the first `length`."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Keep the KV of the tokens at `start` and return their attention output.

        q (T, Hq, D), k and v (T, Hkv, D), none of them rotated; out (T, Hq, D). Tokens past
        `length` may be written again.
        """

    def advance(self, rows: int) -> None:
        """Let the next `rows` tokens, already attended, count from now on."""
        self.length += rows

    def crop(self, length: int) -> None:
        """Let only the first `length` tokens count from now on, if there are more."""
        self.length = min(self.length, length)

    def set_length(self, length: int) -> None:
        """Stand at `length` tokens, whichever way that is."""
        if length >= self.length:
            self.advance(length - self.length)
        else:
            self.crop(length)

    def snapshot(self) -> dict[str, Any]:
        """Return what it takes to come back to here with `restore`.

        It is good as long as no other text has been read in between.
        """
        state: dict[str, Any] = {}
        for name in self._state:
            value = getattr(self, name)
            state[name] = value.clone() if isinstance(value, Tensor) else deepcopy(value)
        return state

    @torch.inference_mode()
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Stand where the cache stood when the snapshot was taken."""
        for name, value in snapshot.items():
            if isinstance(value, Tensor):
                getattr(self, name).copy_(value)  # in place: a recorded pass knows the address
            else:
                setattr(self, name, deepcopy(value))

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of device memory this cache has allocated."""


class AttentionObserver(Protocol):
    """A cache that lives off another's KV: the retrieval cache off the target's."""

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        """Start to follow a pass of the target.

        There are `boundary` tokens of prefix, `length` tokens that stand, and new ones up to `end`.
        Prefill counts as one pass, of which the last rows are shown.
        """

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        """Look at what the target attends with, and to what, in one layer.

        q (T, h * G, D) are the queries of KV heads `head` to `head` + h. prefix (2, h, N, D) are
        the tokens up to the boundary, recent (2, h, M, D) those behind it, of which the last are
        the rows' own. All of it is rotated, and on the device for this call.
        """

    def on_advance(self, length: int) -> None:
        """Take note that the target stands at `length` tokens; at 0, another text begins."""
