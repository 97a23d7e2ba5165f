"""The cache interface: a cache owns keys, values, positions and attention.

Models only call `attend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.cache.hidden_states import HiddenStates
from offload.layout import KVLayout
from offload.recurrent.recurrence import RecurrentInputs
from offload.recurrent.states import RecurrentStates
from offload.traffic import ByteCounters


@runtime_checkable
class Stateful(Protocol):
    """A part of a cache with a state of its own, in a list that `_state` names."""

    def snapshot(self) -> Any:
        """Return the state that `restore` returns to."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Return to the state of a snapshot."""
        ...


class Cache(ABC):
    """KV of one sequence of `length` tokens; only `advance`, `crop` and the like change it."""

    # attributes that decoding changes, except for append-only buffers
    _state: ClassVar[tuple[str, ...]] = ("length",)
    verified = 0  # the first tokens, which a cache that it is built from holds as well
    # whether a token's attention must not depend on its batch (`offload.kernels`)
    is_batch_invariant = False

    def __init__(self, layout: KVLayout):
        self.layout = layout
        self.length = 0
        self.traffic = ByteCounters()
        self.recurrent: RecurrentStates | None = None  # None without recurrent layers
        self.hidden_states: HiddenStates | None = None  # None without a prediction block

    def begin_forward(self, rows: int) -> None:
        """Start a forward over all layers, with `rows` tokens after the first `length`."""
        if self.recurrent is not None:
            self.recurrent.begin(self.length, rows)

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        """Store the KV of the tokens at `start` and return their attention.

        q (T, Hq, D), k and v (T, Hkv, D), none of them rotated. Tokens past `length` may be
        overwritten.
        """

    def recur(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor:
        """Return a recurrent layer's outputs (T, Hv, Dv) of the tokens at `start`."""
        assert self.recurrent is not None
        return self.recurrent.outputs(layer, inputs)

    def keep_hidden_states(self, states: Tensor, rows: int) -> None:
        """Keep what is needed of a forward's hidden states (T, hidden), after the final norm.

        `rows`: the number of its last tokens whose logits are asked for.
        """
        if self.hidden_states is not None:
            self.hidden_states.record(states, self.length)

    def advance(self, rows: int) -> None:
        """Add the next `rows` tokens, already attended, to the sequence."""
        self.length += rows

    def follow(self, length: int, end: int | None = None) -> None:
        """Take over the length of a cache that this one is built from.

        If that is `end`, the end of its last forward, all tokens of that were accepted: those that
        were drafted after them continue the sequence.
        """
        self.length = max(length, self.length) if length == end else length
        self.verified = length

    def crop(self, length: int) -> None:
        """Shorten the sequence to its first `length` tokens, if it is longer."""
        self.length = min(self.length, length)

    def set_length(self, length: int) -> None:
        """Advance or crop to `length` tokens."""
        if length > self.length:
            self.advance(length - self.length)
        elif length < self.length:
            self.crop(length)

    def snapshot(self) -> dict[str, Any]:
        """Return the state that `restore` returns to.

        It is valid until the cache is used for another sequence.
        """
        state: dict[str, Any] = {}
        for name in self._state:
            value = getattr(self, name)
            if isinstance(value, list):
                state[name] = [each.snapshot() for each in value if isinstance(each, Stateful)]
            else:
                state[name] = value.clone() if isinstance(value, Tensor) else deepcopy(value)
        state["tensors"] = [tensor.clone() for tensor in self.state_tensors]
        state["recurrent"] = None if self.recurrent is None else self.recurrent.snapshot()
        return state

    @property
    def state_tensors(self) -> list[Tensor]:
        """Return tensors that decoding changes, beside the attributes in `_state`."""
        return []

    @torch.inference_mode()
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        state = dict(snapshot)
        recurrent = state.pop("recurrent")
        if self.recurrent is not None:
            self.recurrent.restore(recurrent)
        for tensor, saved in zip(self.state_tensors, state.pop("tensors"), strict=True):
            tensor.copy_(saved)
        for name, value in state.items():
            if isinstance(value, Tensor):
                getattr(self, name).copy_(value)  # in place: captured graphs use its address
            elif isinstance(value, list):
                parts = (each for each in getattr(self, name) if isinstance(each, Stateful))
                for part, saved in zip(parts, value, strict=True):
                    part.restore(saved)
            else:
                setattr(self, name, deepcopy(value))

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of device memory this cache has allocated."""


class AttentionObserver(Protocol):
    """A cache that is built from another's KV, as the retrieval cache from the target's."""

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        """Observe the start of a forward of the target.

        It has `boundary` prefix tokens, `length` accepted tokens, and query tokens up to `end`.
        Prefill counts as one forward, of which only the last queries are passed on.
        """

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        """Observe the queries, keys and values of one layer's attention.

        q (T, h * G, D) are the queries of KV heads `head` to `head` + h. prefix (2, h, N, D) are
        the tokens up to the boundary, recent (2, h, M, D) those after it, the last of which are the
        query tokens' own. All are rotated, and on the device during this call.
        """

    def on_advance(self, length: int) -> None:
        """Observe that the target now has `length` tokens; 0 begins another sequence."""
