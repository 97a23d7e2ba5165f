"""Recurrent states that can go back by more than a forward: those of a draft model."""

from __future__ import annotations

from typing import Any

import torch

from offload.layout import RecurrentShape
from offload.recurrent.states import RecurrentStates, StateTensors


class RewindableStates(RecurrentStates):
    """The states after the last tokens, and older ones with what all tokens since would change.

    A draft model drafts token by token, any number of which are rejected at once.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        rows: int,
        rewind: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Allocate states after no tokens; `rewind`: tokens by which they can go back."""
        super().__init__(shape, rows, dtype, device)
        self._rewind = rewind
        self._room = 2 * rewind + rows  # the older states move once in a while
        self._older = StateTensors.zeros(shape, self._room, dtype, device)
        self.oldest = 0  # the position of the older states

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._older.nbytes

    def begin(self, start: int, rows: int) -> None:
        """Begin a forward of `rows` tokens from `start` on, which may be before the last ones.

        Raises ValueError if it is before the oldest position, or if tokens were not computed.
        """
        if start < self.oldest:
            raise ValueError(f"the states before position {self.oldest} are lost, found {start}")
        if start < self.position:
            self._tensors.copy_states(self._older)
            self._tensors.add(self._older, start - self.oldest, by_steps=False)
            self.position = start
        elif self.holds(start):
            self._remember(start - self.position)
        super().begin(start, rows)

    def skip(self, tokens: int) -> None:
        """Count tokens that are never computed, right after a forward whose tokens all count."""
        self._advance_to(self.position + self._written)
        self.end_prompt(self.position + tokens)
        self._forget()

    def snapshot(self) -> Any:
        return super().snapshot(), [each.clone() for each in self._older.all], self.oldest

    def restore(self, snapshot: Any) -> None:
        states, older, self.oldest = snapshot
        super().restore(states)
        for tensor, saved in zip(self._older.all, older, strict=True):
            tensor.copy_(saved)

    def _clear(self) -> None:
        super()._clear()
        self._forget()

    def _forget(self) -> None:
        """Let the older states be the current ones."""
        self._older.copy_states(self._tensors)
        self.oldest = self.position

    def _remember(self, count: int) -> None:
        """Keep what the first `count` tokens of the last forward change, for going back."""
        first = self.position - self.oldest
        if first + count > self._room:
            moved = first - self._rewind
            self._older.add(self._older, moved, by_steps=False)
            self._older.drop(moved, first)
            self.oldest += moved
            first = self._rewind
        self._older.append(self._tensors, first, count)
