"""The cache of the target's prediction block: a window of recent tokens, and hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.cache.hidden_states import HiddenStates
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.layout import KVLayout
from offload.rotary import Rotary


class PredictionCache(StreamingCache):
    """The KV of a block that reads each token with the hidden state of the one before it.

    The block's output for a token predicts the target's hidden state of that token. Where a draft
    goes on before the target has read the token, it replaces that state.
    """

    hidden_states: HiddenStates

    def __init__(
        self, layout: KVLayout, shape: StreamingCacheSpec, rotary: Rotary, device: torch.device
    ):
        super().__init__(layout, shape, rotary, device)
        self.hidden_states = HiddenStates(
            shape.slots, shape.rewind, shape.hidden, layout.dtype, device
        )

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self.hidden_states.nbytes

    @property
    def state_tensors(self) -> list[Tensor]:
        return [*super().state_tensors, self.hidden_states.states]

    def reset(self) -> None:
        super().reset()
        self.hidden_states.reset()

    def clear(self) -> None:
        """Empty the cache, but keep the hidden states."""
        super().reset()

    def previous_hidden_states(self, rows: int) -> Tensor:
        """Return the hidden states (T, hidden) of the tokens before each of the next `rows`."""
        return self.hidden_states.read(self.length - 1, rows)

    def keep_hidden_states(self, states: Tensor, rows: int) -> None:
        if rows:  # else other tokens follow, whose predecessors the target has read
            self.hidden_states.write(states[-1:], self.length + len(states) - 1)

    def keep_first_hidden_states(self, states: Tensor, start: Tensor, tokens: Tensor) -> None:
        last = (tokens - 1).clamp(min=0)
        self.hidden_states.write_first(states.index_select(0, last[None]), start + last, tokens)
