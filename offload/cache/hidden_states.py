"""The target's hidden states of recent tokens, from which its prediction block drafts."""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenStates:
    """The hidden states (hidden,) of a sequence's last `kept` tokens, after the final norm.

    Levels with the target's weights write those of all tokens of a forward. What they write of
    rejected ones is replaced by the forward that has others in their place.
    """

    def __init__(
        self, kept: int, margin: int, hidden: int, dtype: torch.dtype, device: torch.device
    ):
        """`margin`: the most tokens after those of `record` of which states are written."""
        self.kept, self.rows = kept, kept + margin
        # The state at position p is in row p % rows; the last row is for padding. At first all
        # differ: a captured forward that reads others than its launches do should be seen.
        indices, columns = (torch.arange(size, device=device) for size in (self.rows + 1, hidden))
        self.states = (indices[:, None] * columns + columns).cos().to(dtype)
        self.first = self._end = 0  # all those from the first position to the end are there

    @property
    def nbytes(self) -> int:
        """The bytes of device memory."""
        return self.states.nbytes

    def reset(self) -> None:
        """Begin another sequence."""
        self.first = self._end = 0

    def crop(self, length: int) -> None:
        """Forget the states of all but the first `length` tokens."""
        self._end = min(self._end, length)
        self.first = min(self.first, length)

    def record(self, states: Tensor, start: int) -> None:
        """Take the states (T, hidden) of the tokens from `start` on, or of the last of them."""
        end = start + len(states)
        if not self.first <= start <= self._end:
            self.first = start
        self._end, self.first = end, max(self.first, end - self.kept)
        last = states[-self.rows :]
        self.write(last, end - len(last))

    def write(self, states: Tensor, start: int) -> None:
        """Write states (T, hidden), those from position `start` on."""
        self.states.index_copy_(0, self._indices(start, len(states)), states)

    def write_first(self, states: Tensor, start: Tensor, tokens: Tensor) -> None:
        """Write the first `tokens` of states (T, hidden), as `write`; in a captured forward."""
        steps = torch.arange(len(states), device=states.device)
        indices = torch.where(steps < tokens, (start + steps) % self.rows, self.rows)
        self.states.index_copy_(0, indices, states)

    def read(self, start: int | Tensor, tokens: int) -> Tensor:
        """Return the states (T, hidden) from position `start` on, -1 being of no token."""
        return self.states.index_select(0, self._indices(start, tokens))

    def _indices(self, start: int | Tensor, tokens: int) -> Tensor:
        return (torch.arange(tokens, device=self.states.device) + start) % self.rows
