"""The recurrent states of a sequence, as one level of decoding has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.layout import STATE_TOKENS, RecurrentShape
from offload.recurrent.recurrence import (
    RecurrentInputs,
    advance,
    advance_by_steps,
    for_key_heads,
    for_value_heads,
    outputs_in_chunk,
    outputs_in_chunks,
    recurrent_rows,
    step,
)
from offload.recurrent.selection import prompt_kernels


@dataclass(frozen=True)
class StateTensors:
    """The states of all recurrent layers, and what the tokens of a forward would change in them.

    All are float32 but the channels, and keep their addresses.
    """

    states: Tensor  # (L, Hv, Dk, Dv)
    channels: Tensor  # (L, K - 1 + rows, C), with those of the tokens before the forward's
    keys: Tensor  # (L, Hk, rows, Dk)
    updates: Tensor  # (L, Hv, rows, Dv), what is added to the values of the keys
    decays: Tensor  # (L, Hv, rows)
    shape: RecurrentShape

    @classmethod
    def zeros(
        cls, shape: RecurrentShape, rows: int, dtype: torch.dtype, device: torch.device
    ) -> StateTensors:
        """Return those after no tokens; `dtype` is that of the channels.

        There is room for `rows` tokens of a forward, and for one of padding.
        """
        rows += 1

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(len(shape.layers), *sizes, dtype=dtype, device=device)

        heads = shape.value_heads
        return cls(
            zeros(heads, shape.key_dim, shape.value_dim),
            zeros(shape.kernel_size - 1 + rows, shape.channels, dtype=dtype),
            zeros(shape.key_heads, rows, shape.key_dim),
            zeros(heads, rows, shape.value_dim),
            zeros(heads, rows),
            shape,
        )

    @property
    def all(self) -> list[Tensor]:
        return [self.states, self.channels, self.keys, self.updates, self.decays]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.all)

    @property
    def padding(self) -> int:
        """The place of padding, after those of a forward's tokens."""
        return self.decays.shape[-1] - 1

    @property
    def before(self) -> Tensor:
        """The channels (L, K - 1, C) of the tokens before a forward's."""
        return self.channels[:, : self.shape.kernel_size - 1]

    def copy_states(self, other: StateTensors) -> None:
        """Copy the states, and the channels before them."""
        self.states.copy_(other.states)
        self.before.copy_(other.before)

    def keep(
        self, index: int, places: Tensor, channels: Tensor, k: Tensor, d: Tensor, decays: Tensor
    ) -> None:
        """Keep what the tokens of a forward would change in a layer, at these places (T,)."""
        first = self.shape.kernel_size - 1
        self.channels[index].index_copy_(0, places + first, channels.to(self.channels.dtype))
        self.keys[index].index_copy_(1, places, for_key_heads(self.shape, k))
        self.updates[index].index_copy_(1, places, d)
        self.decays[index].index_copy_(1, places, decays)

    def add(self, other: StateTensors, count: int, by_steps: bool) -> None:
        """Advance past the first `count` tokens that others have kept after the same states."""
        if not count:
            return
        keys = for_value_heads(self.shape, other.keys[:, :, :count])
        kept = keys, other.updates[:, :, :count], other.decays[:, :, :count]
        if by_steps:
            for state, *own in zip(self.states, *kept, strict=True):
                advance_by_steps(state, *own)
        else:
            advance(self.states, *kept)
        self.before.copy_(other.channels[:, count : count + self.shape.kernel_size - 1].clone())

    def append(self, other: StateTensors, first: int, count: int) -> None:
        """Copy what the first `count` tokens of others change to the place of the `first`."""
        for own, theirs in zip(self._kept, other._kept, strict=True):
            own[:, :, first : first + count].copy_(theirs[:, :, :count])

    def drop(self, count: int, end: int) -> None:
        """Move what the tokens from `count` to `end` change to the first places."""
        for own in self._kept:
            own[:, :, : end - count].copy_(own[:, :, count:end].clone())

    @property
    def _kept(self) -> list[Tensor]:
        """What a forward's tokens would change, (L, heads, rows, ...) each."""
        channels = self.channels[:, self.shape.kernel_size - 1 :].unsqueeze(1)
        return [channels, self.keys, self.updates, self.decays]


class RecurrentStates:
    """The states of all recurrent layers, after `position` tokens.

    A forward computes outputs of the tokens after them, any of which may be rejected later, and
    leaves the states as they are. It keeps what each of its tokens would change; when the next
    forward begins, the states advance past those that count by then. So nothing is ever taken
    back, and every forward begins where the states are: its addresses can be captured.

    A level that drafts has states of its own. They begin as a copy of its parent's, that is of the
    level that verifies it, each time when that has made a forward.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        is_batch_invariant: bool = False,
    ):
        """Allocate states after no tokens.

        Args:
            shape: the layers, with the heads of this rank.
            rows: tokens of the largest forward.
            dtype: the model's.
            device: where the states are.
            is_batch_invariant: whether a token's output must not depend on its batch.
        """
        self.shape, self.is_batch_invariant = shape, is_batch_invariant
        self.position = 0
        self.parent: RecurrentStates | None = None
        self._index = {layer: index for index, layer in enumerate(sorted(shape.layers))}
        self._tensors = StateTensors.zeros(shape, rows, dtype, device)
        self._written = 0  # tokens of the last forward, from `position` on
        self._forwards = 0  # begun, by which a child knows that it is out of date
        self._copied = -1  # the parent's forwards when its states were copied

    @property
    def nbytes(self) -> int:
        """The bytes of device memory."""
        return self._tensors.nbytes

    def begin(self, start: int, rows: int) -> None:
        """Begin a forward of `rows` tokens from `start` on: the states advance up to there.

        Raises ValueError if they are past it, or if tokens in between were not computed.
        """
        if self.parent is None:
            self._advance_to(start)
        else:
            self._follow(self.parent, start)
        self._written, self._forwards = rows, self._forwards + 1

    def outputs(self, layer: int, inputs: RecurrentInputs, tokens: Tensor | None = None) -> Tensor:
        """Return a layer's outputs (T, Hv, Dv) of the current forward's tokens.

        If only the first `tokens` () int64 are tokens, the rest is padding, of which nothing is
        kept; of a forward without any, the states and what they keep stay as they are.
        """
        tensors, index, count = self._tensors, self._index[layer], len(inputs.channels)
        places = torch.arange(count, device=inputs.channels.device)
        if tokens is not None:
            places = torch.where(places < tokens, places, tensors.padding)
        before = tensors.before[index]
        if not self.is_batch_invariant:
            rows = recurrent_rows(self.shape, inputs, before)
            out, d = outputs_in_chunk(rows, tensors.states[index])
            decays = inputs.log_decay.t().exp()
            tensors.keep(index, places, inputs.channels, rows.k, d, decays)
            return out.transpose(0, 1).to(inputs.channels.dtype)
        state, outs = tensors.states[index].clone(), []
        for row in range(count):
            single = inputs.rows(slice(row, row + 1))
            rows = recurrent_rows(self.shape, single, before)
            decay = single.log_decay[0].exp()
            out, d = step(rows, decay, state)
            own = places[row : row + 1]
            tensors.keep(index, own, single.channels, rows.k, d, decay[:, None])
            before = torch.cat((before, single.channels))[1:]
            outs.append(out.transpose(0, 1))
        return torch.cat(outs).to(inputs.channels.dtype)

    def extend(self, layer: int, inputs: RecurrentInputs) -> Tensor:
        """Return a layer's outputs (T, Hv, Dv) of a prompt's next tokens; its state advances."""
        state, before = self.state_of(layer)
        kernels, _ = prompt_kernels(state.device.type, inputs.channels.dtype, self.shape)
        outs = []
        for first in range(0, len(inputs.channels), STATE_TOKENS):
            part = inputs.rows(slice(first, first + STATE_TOKENS))
            rows = recurrent_rows(self.shape, part, before)
            if kernels is None:
                out = outputs_in_chunks(rows, state)
            else:
                out = kernels.outputs_in_chunks(rows, state, part.channels.dtype)
            before.copy_(torch.cat((before, part.channels))[-len(before) :])
            outs.append(out.transpose(0, 1).to(part.channels.dtype))
        return torch.cat(outs)

    def end_prompt(self, position: int) -> None:
        """Set the position after all layers were extended, or their states replaced."""
        self.position, self._written = position, 0
        self._forwards += 1

    def holds(self, length: int) -> bool:
        """Return whether the states, or what the last forward kept, reach to a position."""
        return self.position <= length <= self.position + self._written

    def reset(self) -> None:
        """Return to the states after no tokens, without a parent."""
        self._clear()
        self.parent, self._copied = None, -1

    def snapshot(self) -> Any:
        """Return the state that `restore` returns to."""
        tensors = [each.clone() for each in self._tensors.all]
        return tensors, self.position, self._written, self._copied

    def restore(self, snapshot: Any) -> None:
        """Return to the state of a snapshot."""
        tensors, self.position, self._written, self._copied = snapshot
        for tensor, saved in zip(self._tensors.all, tensors, strict=True):
            tensor.copy_(saved)
        self._forwards += 1

    def state_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's state (Hv, Dk, Dv), and the channels (K - 1, C) before `position`."""
        index = self._index[layer]
        return self._tensors.states[index], self._tensors.before[index]

    def _clear(self) -> None:
        self.position = 0
        for tensor in self._tensors.all:
            tensor.zero_()
        self.end_prompt(0)

    def _advance_to(self, start: int) -> None:
        if not self.holds(start):
            raise ValueError(
                f"the recurrent states are after {self.position} tokens, {self._written} more of "
                f"which can be added: a forward cannot begin at {start}"
            )
        self._tensors.add(self._tensors, start - self.position, self.is_batch_invariant)
        self.position = start

    def _follow(self, parent: RecurrentStates, start: int) -> None:
        """Advance to `start`, from the parent's states if it has made a forward meanwhile.

        So it does to a position that its own states do not hold: the parent's are near.

        A level that has not drafted for a while begins with tokens that the parent's states already
        include. It reads them twice, which only drafts suffer from.
        """
        if parent.parent is not None and parent._copied != parent.parent._forwards:
            parent._follow(parent.parent, start)
            parent._written, parent._forwards = 0, parent._forwards + 1
        source: RecurrentStates = self
        if self._copied != parent._forwards or not self.holds(start):
            self._tensors.copy_states(parent._tensors)
            source, self.position, self._copied = parent, parent.position, parent._forwards
        count = min(max(0, start - self.position), source._written)
        self._tensors.add(source._tensors, count, self.is_batch_invariant)
        self.position = start
